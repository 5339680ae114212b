// Launches kernels on a stream of CUDA, each of which starts while the one before it ends where the device can do that.
// Included by nvcc alone.

#pragma once

#include "common.cuh" // of ggml-cuda

namespace mixedkv {
namespace cuda {

struct grid_size {
    int x, y, z;
};

struct cuda_device {
    cudaStream_t stream;

    template <class... Params, class... Args>
    void launch(grid_size grid, int threads, size_t shared_bytes, void (*kernel)(Params...), Args... args) {
        if (shared_bytes > 48 * 1024) { // what a kernel may have unasked
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
        }
        const dim3 blocks(unsigned(grid.x), unsigned(grid.y), unsigned(grid.z));
        ggml_cuda_kernel_launch(kernel, ggml_cuda_kernel_launch_params(blocks, dim3(threads), shared_bytes, stream),
                                args...);
    }
};

} // namespace cuda
} // namespace mixedkv
