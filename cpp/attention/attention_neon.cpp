#include "kernel.h"

#include "simd/vector_neon.h"
#include "sparse/page_choice.h"
#include "sparse/sketcher.h"
#include "tile.h"

namespace mixedkv {

const attention_kernels * attention_neon() {
    static constexpr attention_kernels kernels = { "neon",          cpu_has_neon,           false,
                                                   tile<neon>::run, sums_of<neon>::merge,   rotate,
                                                   least_error_any, page_choice<neon>::run, sketcher<neon>::run };
    return &kernels;
}

} // namespace mixedkv
