#include "kernel.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include "simd/vector_avx2.h"
#include "tile.h"

namespace mixedkv {

const attention_kernels * attention_avx2() {
    static constexpr attention_kernels kernels = { "avx2", cpu_has_avx2, tile<avx2>::run, tile<avx2>::merge, rotate };
    return &kernels;
}

} // namespace mixedkv

#else

namespace mixedkv {

const attention_kernels * attention_avx2() {
    return nullptr;
}

} // namespace mixedkv

#endif
