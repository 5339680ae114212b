#include "kernel.h"

#include "vector_kernels.h"
#include "x86/avx2_bytes.h"

namespace mixedkv {

const attention_kernels * attention_avx2() {
    static constexpr attention_kernels kernels = kernels_of<avx2>("avx2", cpu_has_avx2, true, run_avx2);
    return &kernels;
}

} // namespace mixedkv
