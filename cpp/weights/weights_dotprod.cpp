// FEAT_DotProd: 8 rows by 4 columns. Four products of bytes with signs are added to 32 bits in one instruction.

#include "bodies.h"

#include "lanes_dotprod.h"

namespace mixedkv {

bool cpu_has_dotprod(); // attention/cpu.cpp

const weights_kernels * weights_dotprod() {
    static const weights_kernels kernels = {
        "dotprod", false, 1, cpu_has_dotprod, no_work_bytes, quantised_bytes, pack_quantised, run_body<dotprod>
    };
    return &kernels;
}

} // namespace mixedkv
