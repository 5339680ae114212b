#include "kernel.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

#include "tile.h"
#include "vector_avx512.h"

namespace mixedkv {

const attention_kernels * attention_avx512() {
    static constexpr attention_kernels kernels = { "avx512", cpu_has_avx512, tile<avx512>::run, tile<avx512>::merge,
                                                   rotate };
    return &kernels;
}

} // namespace mixedkv

#else

namespace mixedkv {

const attention_kernels * attention_avx512() {
    return nullptr;
}

} // namespace mixedkv

#endif
