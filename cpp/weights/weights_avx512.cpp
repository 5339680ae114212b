// AVX-512 with VNNI: 32 rows by 6 columns. Bytes without a sign are multiplied with those that have one, and four
// products added to 32 bits, in one instruction. Single columns with rows in 16 bits are multiplied in F32.

#include "bodies.h"

#include "lanes_avx512.h"

#include <cmath>

namespace mixedkv {

bool cpu_has_avx512(); // attention/cpu.cpp

namespace {

// --- rows in 16 bits

struct f16 {
    static __m512 load(const uint16_t * p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    }
    static __m512 rounded(__m512 x) { return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
};

struct bf16 {
    static __m512 load(const uint16_t * p) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
    static __m512 rounded(__m512 x) { // to the nearest, ties to even; NaN is NaN, whatever its lower bits are
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i odd  = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i up   = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        const __m512  near = _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(int(0xffff0000))));
        return _mm512_mask_mov_ps(near, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_ps(NAN));
    }
};

template <class F>
void with_half_type(int type, F && f) {
    type == WEIGHTS_F16 ? f(f16()) : f(bf16());
}

size_t f16_bytes(int, int64_t n_elements, int64_t n_columns) {
    return size_t(n_elements * n_columns) * sizeof(float);
}

// To F32, one column after the other
void pack_f16(const weights_columns & columns, const float * x, int64_t column, int64_t first, int64_t n) {
    float * out = static_cast<float *>(columns.packed) + column * columns.n_elements + first * WEIGHTS_BLOCK;
    with_half_type(columns.type, [&](auto half) {
        for (int64_t i = 0; i < n * WEIGHTS_BLOCK; i += 16) {
            _mm512_storeu_ps(out + i, half.rounded(_mm512_loadu_ps(x + i)));
        }
    });
}

// A row is read once for all columns, and lines of the next ones are fetched meanwhile.
template <class Half>
void multiply_row(const weights_product & p, const uint16_t * row, int64_t r) {
    constexpr int ahead = 4096 / sizeof(uint16_t);
    for (int64_t c = 0; c < p.n_columns; c++) {
        const float * column  = static_cast<const float *>(p.columns) + c * p.n_elements;
        __m512        sums[2] = { _mm512_setzero_ps(), _mm512_setzero_ps() };
        for (int64_t i = 0; i < p.n_elements; i += 32) {
            __builtin_prefetch(row + i + ahead, 0, 2);
            sums[0] = _mm512_fmadd_ps(Half::load(row + i), _mm512_loadu_ps(column + i), sums[0]);
            sums[1] = _mm512_fmadd_ps(Half::load(row + i + 16), _mm512_loadu_ps(column + i + 16), sums[1]);
        }
        float * out = reinterpret_cast<float *>(reinterpret_cast<char *>(p.out) + c * p.out_bytes);
        out[r]      = _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1]));
    }
}

void run_f16(const weights_product & p, void *, int64_t row_0, int64_t row_1) {
    with_half_type(p.type, [&](auto half) {
        for (int64_t r = row_0; r < row_1; r++) {
            const char * row = static_cast<const char *>(p.rows) + r * p.row_bytes;
            multiply_row<decltype(half)>(p, reinterpret_cast<const uint16_t *>(row), r);
        }
    });
}

} // namespace

const weights_kernels * weights_avx512_f16() {
    static const weights_kernels kernels = { "avx512",      true,      1,        cpu_has_avx512,
                                             no_work_bytes, f16_bytes, pack_f16, run_f16 };
    return &kernels;
}

const weights_kernels * weights_avx512() {
    static const weights_kernels kernels = { "avx512",       false,           8,
                                             cpu_has_avx512, no_work_bytes,   quantised_bytes,
                                             pack_quantised, run_body<avx512> };
    return &kernels;
}

} // namespace mixedkv
