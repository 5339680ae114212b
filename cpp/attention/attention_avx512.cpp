#include "kernel.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

#include "page_choice.h"
#include "sketcher.h"
#include "x86/vnni_decode.h"
#include "x86/vnni_prefill.h"

namespace mixedkv {
namespace {

void run(const attention_item & w) {
    if (w.few && vnni_decode::fits(*w.args)) {
        return vnni_decode::run(w);
    }
    if (!w.few && integer_prefill<vnni_prefill>::fits(*w.args)) {
        return integer_prefill<vnni_prefill>::run(w);
    }
    tile<avx512>::run(w);
}

} // namespace

const attention_kernels * attention_avx512() {
    static constexpr attention_kernels kernels = {
        "avx512", cpu_has_avx512, run, sums_of<avx512>::merge, rotate, page_choice<avx512>::run, sketcher<avx512>::run
    };
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
