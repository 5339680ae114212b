// AMX for prefill of all types and for decode over q8_0 and q4_0 rows; AVX-512 for the rest.

#include "kernel.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__GFNI__)

#include "page_choice.h"
#include "sketcher.h"
#include "x86/amx_decode.h"
#include "x86/amx_prefill.h"

namespace mixedkv {
namespace {

void run(const attention_item & w) {
    if (!w.few && amx_prefill::fits(*w.args)) {
        return amx_prefill::run(w);
    }
    if (w.few && amx_decode::fits(*w.args)) {
        return amx_decode::run(w);
    }
    tile<avx512>::run(w);
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
