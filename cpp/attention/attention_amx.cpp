// AMX for prefill, but in 8 bits over rows of integers: that, and decode, are as fast on AVX-512, and have the same
// bits there.

#include "kernel.h"

#if defined(__AMX_BF16__)

#include "sparse/page_choice.h"
#include "sparse/sketcher.h"
#include "x86/amx_prefill.h"
#include "x86/vnni_bytes.h"

namespace mixedkv {
namespace {

void run(const attention_item & w) {
    const bool in_bytes = w.args->rounding == 8 && integer_prefill<vnni_bytes>::fits(*w.args);
    if (w.decode || in_bytes || !amx_prefill::fits(*w.args)) {
        return attention_avx512()->run(w);
    }
    amx_prefill::run(w);
}

} // namespace

const attention_kernels * attention_amx() {
    static constexpr attention_kernels kernels = {
        "amx", cpu_has_amx, run, sums_of<avx512>::merge, rotate, page_choice<avx512>::run, sketcher<avx512>::run
    };
    return &kernels;
}

} // namespace mixedkv

#else

namespace mixedkv {

const attention_kernels * attention_amx() {
    return nullptr;
}

} // namespace mixedkv

#endif
