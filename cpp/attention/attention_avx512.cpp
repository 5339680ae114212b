#include "kernel.h"

#include "vector_kernels.h"
#include "x86/vnni_bytes.h"

namespace mixedkv {
namespace {

void run(const attention_item & w) {
    if (w.args->rounding == 8) {
        return run_integers<vnni_bytes, vnni_bytes>(w);
    }
    run_integers<vnni, vnni_prefill>(w);
}

} // namespace

const attention_kernels * attention_avx512() {
    static constexpr attention_kernels kernels =
        kernels_of<avx512>("avx512", cpu_has_avx512, true, run, least_error_avx512);
    return &kernels;
}

} // namespace mixedkv
