// What report.py compiles: the kernels that most models take, and with REPORT_VARIANTS all shapes of prefill. As plain
// C++ it is a program that prints the threads and the bytes of shared memory of each shape, where four query heads
// share a KV head.

#ifdef __CUDACC__

namespace mixedkv {
namespace cuda {
struct grid_size {
    int x, y, z;
};
} // namespace cuda
} // namespace mixedkv

#include "attention/cuda/launch.h"
#include "prefill_variants.h"

using namespace mixedkv::cuda;

struct any_device {
    template <class Kernel, class... Args>
    void launch(grid_size grid, int threads, size_t bytes, Kernel kernel, Args... args) {
        kernel<<<dim3(grid.x, grid.y, grid.z), threads, bytes>>>(args...);
    }
};

template <int d>
void run_variants(any_device & device, const attention_problem & p, stored_type k, stored_type v) {
    prefill_variants<d>::for_each([&](auto shape) { run_prefill<any_device, d, decltype(shape)>(device, p, k, v); });
}

#ifdef REPORT_VARIANTS
template void run_variants<64>(any_device &, const attention_problem &, stored_type, stored_type);
template void run_variants<128>(any_device &, const attention_problem &, stored_type, stored_type);
template void run_variants<256>(any_device &, const attention_problem &, stored_type, stored_type);
#else
template void mixedkv::cuda::run_decode<any_device, q4_0_rows, q4_0_rows, 128>(any_device &, const attention_problem &);
template void mixedkv::cuda::run_decode<any_device, q8_0_rows, q8_0_rows, 128>(any_device &, const attention_problem &);
template void mixedkv::cuda::run_decode<any_device, q4_0_rows, q4_0_rows, 256>(any_device &, const attention_problem &);
template void mixedkv::cuda::run_decode<any_device, lm4_rows, lm4_rows, 128>(any_device &, const attention_problem &);
template void mixedkv::cuda::run_decode<any_device, q5_0_rows, tc3_rows, 128>(any_device &, const attention_problem &);
template void mixedkv::cuda::run_decode<any_device, tc3_rows, tc3_rows, 128>(any_device &, const attention_problem &);
template void mixedkv::cuda::run_decode<any_device, tc3_rows, tc3_rows, 256>(any_device &, const attention_problem &);
template void mixedkv::cuda::run_prefill<any_device, 128>(any_device &, const attention_problem &, stored_type,
                                                          stored_type);
template void mixedkv::cuda::run_merge<any_device, 128>(any_device &, const attention_problem &);
template void mixedkv::cuda::run_store<any_device, 128>(any_device &, const store_problem &, stored_type, stored_type);
template void mixedkv::cuda::run_get<any_device>(any_device &, const convert_problem &, stored_type);
#endif

#else

#include "prefill_variants.h"

#include <cstdio>
#include <cstring>
#include <typeinfo>

using namespace mixedkv::cuda;

template <int d>
void print_shapes() {
    prefill_variants<d>::for_each([&](auto shape) {
        using layout      = prefill_layout<d, decltype(shape)>;
        const char * name = std::strstr(typeid(shape).name(), "13prefill_shape"); // as kernels' names have it
        std::printf("14prefill_kernelILi%dENS0_%s %d %d\n", d, name, layout::threads, layout::bytes(4));
    });
}

int main() {
    print_shapes<64>();
    print_shapes<128>();
    print_shapes<256>();
    return 0;
}

#endif
