// AVX2 with the products of AVX-VNNI in decode.

#include "kernel.h"

#include "sparse/page_choice.h"
#include "sparse/sketcher.h"
#include "x86/avx2_bytes.h"

namespace mixedkv {

const attention_kernels * attention_avxvnni() {
    static constexpr attention_kernels kernels = { "avxvnni",       cpu_has_avxvnni,        true,
                                                   run_avx2,        sums_of<avx2>::merge,   rotate,
                                                   least_error_any, page_choice<avx2>::run, sketcher<avx2>::run };
    return &kernels;
}

} // namespace mixedkv
