#include "kernel.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include "sparse/page_choice.h"
#include "sparse/sketcher.h"
#include "x86/avx2_decode.h"
#include "x86/avx2_prefill.h"

namespace mixedkv {
namespace {

void run(const attention_item & w) {
    if (w.decode && avx2_decode::fits(*w.args)) {
        return avx2_decode::run(w);
    }
    if (!w.decode && integer_prefill<avx2_prefill>::fits(*w.args)) {
        return integer_prefill<avx2_prefill>::run(w);
    }
    tile<avx2>::run(w);
}

} // namespace

const attention_kernels * attention_avx2() {
    static constexpr attention_kernels kernels = {
        "avx2", cpu_has_avx2, run, sums_of<avx2>::merge, rotate, page_choice<avx2>::run, sketcher<avx2>::run
    };
    return &kernels;
}

} // namespace mixedkv

#else

namespace mixedkv {

const attention_kernels * attention_avx2() {
    return nullptr;
}

} // namespace mixedkv

#endif
