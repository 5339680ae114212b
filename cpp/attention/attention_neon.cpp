#include "kernel.h"

#include "simd/vector_neon.h"
#include "tile.h"
#include "vector_kernels.h"

namespace mixedkv {

const attention_kernels * attention_neon() {
    static constexpr attention_kernels kernels = kernels_of<neon>("neon", cpu_has_neon, false, tile<neon>::run);
    return &kernels;
}

} // namespace mixedkv
