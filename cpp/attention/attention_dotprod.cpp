#include "kernel.h"

#include "arm/dot_products.h"
#include "vector_kernels.h"

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
    static constexpr attention_kernels kernels = kernels_of<neon>("dotprod", cpu_has_dotprod, true, run);
    return &kernels;
}

} // namespace mixedkv
