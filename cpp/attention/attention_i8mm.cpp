// Decode is that of dotprod, compiled here as prefill is.

#include "kernel.h"

#include "arm/matrix_products.h"
#include "vector_kernels.h"

namespace mixedkv {
namespace {

void run(const attention_item & w) {
    if (w.args->rounding == 8) {
        return run_integers<dot_products<true>, matrix_products<true>>(w);
    }
    run_integers<dot_products<false>, matrix_products<false>>(w);
}

} // namespace

const attention_kernels * attention_i8mm() {
    static constexpr attention_kernels kernels = kernels_of<neon>("i8mm", cpu_has_i8mm, true, run);
    return &kernels;
}

} // namespace mixedkv
