// AVX2: 16 rows by 4 columns.

#include "bodies.h"

#include "lanes_avx2.h"

namespace mixedkv {

bool cpu_has_avx2(); // attention/cpu.cpp

const weights_kernels * weights_avx2() {
    static const weights_kernels kernels = { "avx2",         false,         8,
                                             cpu_has_avx2,   no_work_bytes, quantised_bytes,
                                             pack_quantised, run_body<avx2> };
    return &kernels;
}

} // namespace mixedkv
