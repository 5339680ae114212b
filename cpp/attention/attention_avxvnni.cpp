// AVX2 with the products of AVX-VNNI in decode.

#include "kernel.h"

#include "vector_kernels.h"
#include "x86/avx2_bytes.h"

namespace mixedkv {

const attention_kernels * attention_avxvnni() {
    static constexpr attention_kernels kernels = kernels_of<avx2>("avxvnni", cpu_has_avxvnni, true, run_avx2);
    return &kernels;
}

} // namespace mixedkv
