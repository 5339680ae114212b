// AVX-VNNI: as AVX2, with four products of bytes added to 32 bits in one instruction.

#include "bodies.h"

#include "lanes_avx2.h"

namespace mixedkv {

bool cpu_has_avxvnni(); // attention/cpu.cpp

namespace {

struct avxvnni : avx2 {
    static ints whole_bytes(ints x) { return x ^ 0x80808080; } // with the bias

    template <class Row>
    struct sum {
        __m256i whole;

        void begin(int32_t start) { whole = _mm256_set1_epi32(start); }
        void add(int, ints values, int32_t elements) {
            whole = _mm256_dpbusd_avx_epi32(whole, __m256i(values), _mm256_set1_epi32(elements));
        }
        ints end() const { return ints(whole); }
    };
};

} // namespace

const weights_kernels * weights_avxvnni() {
    static const weights_kernels kernels = {
        "avxvnni", false, 8, cpu_has_avxvnni, no_work_bytes, quantised_bytes, pack_quantised, run_body<avxvnni>
    };
    return &kernels;
}

} // namespace mixedkv
