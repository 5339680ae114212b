#include "kernel.h"

#include "sparse/page_choice.h"
#include "sparse/sketcher.h"
#include "x86/avx2_bytes.h"

namespace mixedkv {

const attention_kernels * attention_avx2() {
    static constexpr attention_kernels kernels = { "avx2",          cpu_has_avx2,           true,
                                                   run_avx2,        sums_of<avx2>::merge,   rotate,
                                                   least_error_any, page_choice<avx2>::run, sketcher<avx2>::run };
    return &kernels;
}

} // namespace mixedkv
