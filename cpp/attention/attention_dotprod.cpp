#include "kernel.h"

#include "arm/dot_products.h"
#include "sparse/page_choice.h"
#include "sparse/sketcher.h"

namespace mixedkv {
namespace {

void run(const attention_item & w) {
    if (w.args->rounding == 8) {
        return run_integers<dot_products<true>, dot_products<true>>(w);
    }
    run_integers<dot_products<false>, dot_products<false>>(w);
}

} // namespace

const attention_kernels * attention_dotprod() {
    static constexpr attention_kernels kernels = { "dotprod",
                                                   cpu_has_dotprod,
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
