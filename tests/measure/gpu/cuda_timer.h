// A CUDA device that allocates, launches and times, without ggml. The kernels that are timed start as in the package:
// each while the one before it ends, where the device can do that.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

namespace mixedkv {
namespace cuda {

struct grid_size {
    int x, y, z;
};

inline void expect_success(cudaError_t status, const char * what) {
    if (status != cudaSuccess) {
        std::fprintf(stderr, "kernel_times: %s: %s\n", what, cudaGetErrorString(status));
        std::exit(1);
    }
}

class cuda_timer {
    cudaDeviceProp properties = {};
    cudaEvent_t    begin = nullptr, end = nullptr;
    bool           overlaps = false;

  public:
    cuda_timer() {
        expect_success(cudaGetDeviceProperties(&properties, 0), "device 0");
        expect_success(cudaEventCreate(&begin), "event");
        expect_success(cudaEventCreate(&end), "event");
    }
    cuda_timer(const cuda_timer &) = delete;

    const char * name() const { return properties.name; }
    int          n_processors() const { return properties.multiProcessorCount; }
    int          most_shared_bytes() const { return int(properties.sharedMemPerBlockOptin); }
    bool         has_tensor_cores() const { return properties.major >= 8; }

    void * allocate(size_t bytes) {
        void * res = nullptr;
        expect_success(cudaMalloc(&res, bytes), "memory");
        return res;
    }
    void release(void * p) { cudaFree(p); }

    void read(void * to, const void * from, size_t bytes) {
        expect_success(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "kernel");
    }

    template <class... Params, class... Args>
    void launch(grid_size grid, int threads, size_t shared_bytes, void (*kernel)(Params...), Args... args) {
        if (shared_bytes > 48 * 1024) { // what a kernel may have unasked
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
        }
        cudaLaunchAttribute attribute                        = {};
        attribute.id                                         = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config                            = {};
        config.gridDim          = dim3(unsigned(grid.x), unsigned(grid.y), unsigned(grid.z));
        config.blockDim         = dim3(unsigned(threads));
        config.dynamicSmemBytes = shared_bytes;
        config.attrs            = &attribute;
        config.numAttrs         = overlaps && properties.major >= 9 ? 1 : 0;
        expect_success(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), "launch");
    }

    // Microseconds of what f launches
    template <class F>
    double time(F && f) {
        expect_success(cudaDeviceSynchronize(), "kernel");
        overlaps = true;
        cudaEventRecord(begin);
        f();
        cudaEventRecord(end);
        overlaps = false;
        expect_success(cudaEventSynchronize(end), "kernel");
        float ms = 0.0f;
        cudaEventElapsedTime(&ms, begin, end);
        return 1e3 * ms;
    }
};

} // namespace cuda
} // namespace mixedkv
