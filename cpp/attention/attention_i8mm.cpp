// Decode is that of dotprod, compiled here as prefill is.

#include "kernel.h"

#include "arm/matrix_products.h"
#include "sparse/page_choice.h"
#include "sparse/sketcher.h"

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
    static constexpr attention_kernels kernels = { "i8mm",
                                                   cpu_has_i8mm,
                                                   true,
                                                   run,
                                                   sums_of<neon>::merge,
                                                   rotate,
                                                   least_error_any,
                                                   page_choice<neon>::run,
                                                   sketcher<neon>::run };
    return &kernels;
}

} // namespace mixedkv
