// What report.py compiles: the kernels that most models take.

namespace mixedkv {
namespace cuda {
struct grid_size {
    int x, y, z;
};
} // namespace cuda
} // namespace mixedkv

#include "attention/cuda/launch.h"

using namespace mixedkv::cuda;

struct any_device {
    template <class Kernel, class... Args>
    void launch(grid_size grid, int threads, size_t bytes, Kernel kernel, Args... args) {
        kernel<<<dim3(grid.x, grid.y, grid.z), threads, bytes>>>(args...);
    }
};

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
