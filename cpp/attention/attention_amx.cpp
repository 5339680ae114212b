// AMX for prefill: tiles of bytes over rows of integers, of BF16 over those in F16. With Q and the weights in 8 bits
// prefill is as fast on AVX-512. Decode over rows of integers is that of AVX-512, and has the bits of prefill.

#include "kernel.h"

#include "vector_kernels.h"
#include "x86/amx_integers.h"
#include "x86/amx_prefill.h"

namespace mixedkv {
namespace {

bool is_float(const attention_segment & cold) {
    return cold.k.type == row_type::f16 || cold.v.type == row_type::f16;
}

void run(const attention_item & w) {
    if (w.args->rounding == 8 && (w.decode || integer_prefill<vnni_bytes>::fits(*w.args))) {
        return attention_avx512()->run(w);
    }
    if (w.decode) { // compiled here, as its prefill is: that softmax has the same bits
        return run_integers<vnni, vnni_prefill>(w);
    }
    if (integer_prefill<amx_integers>::fits(*w.args)) {
        return amx_integers::run(w);
    }
    if (is_float(w.args->segments[0]) && amx_prefill::fits(*w.args)) {
        return amx_prefill::run(w);
    }
    tile<avx512>::run(w);
}

} // namespace

const attention_kernels * attention_amx() {
    static constexpr attention_kernels kernels = kernels_of<avx512>("amx", cpu_has_amx, true, run, least_error_avx512);
    return &kernels;
}

} // namespace mixedkv
