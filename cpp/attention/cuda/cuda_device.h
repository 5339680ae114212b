// Launches kernels on a stream of CUDA. Included by nvcc alone.

#pragma once

#include <cuda_runtime.h>

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
        kernel<<<dim3(unsigned(grid.x), unsigned(grid.y), unsigned(grid.z)), threads, shared_bytes, stream>>>(args...);
    }
};

} // namespace cuda
} // namespace mixedkv
