// The row of a GEGLU node, gelu(x) times g, with the bits of ggml's own; NaN stays NaN. ggml has a table of GELU for
// numbers in F16. Here several entries are fetched at a time, where the processor that is compiled for can do that.

#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__F16C__))
#define GEGLU_ROW

#include <immintrin.h>

#ifdef __AVX512F__
enum { GEGLU_LANES = 16 };

static inline void geglu_lanes(const uint16_t * table, float * y, const float * x, const float * g) {
    const __m512    v      = _mm512_loadu_ps(x);
    const __mmask16 below  = _mm512_cmp_ps_mask(v, _mm512_set1_ps(-10.0f), _CMP_LE_OQ); // gelu is 0
    const __mmask16 inside = _mm512_cmp_ps_mask(_mm512_abs_ps(v), _mm512_set1_ps(10.0f), _CMP_LT_OQ);
    const __m512i   at     = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    const __m512i   found  = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), inside, at, table, 2);
    const __m512    gelu   = _mm512_mask_mov_ps(v, inside, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(found)));
    _mm512_storeu_ps(y, _mm512_maskz_mul_ps((__mmask16)~below, gelu, _mm512_loadu_ps(g)));
}
#else
enum { GEGLU_LANES = 8 };

static inline void geglu_lanes(const uint16_t * table, float * y, const float * x, const float * g) {
    const __m256  v      = _mm256_loadu_ps(x);
    const __m256  below  = _mm256_cmp_ps(v, _mm256_set1_ps(-10.0f), _CMP_LE_OQ); // gelu is 0
    const __m256  size   = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v);
    const __m256  inside = _mm256_cmp_ps(size, _mm256_set1_ps(10.0f), _CMP_LT_OQ);
    const __m256i at     = _mm256_cvtepu16_epi32(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    const __m256i found  = _mm256_and_si256(
        _mm256_mask_i32gather_epi32(_mm256_setzero_si256(), (const int *)table, at, _mm256_castps_si256(inside), 2),
        _mm256_set1_epi32(0xffff));
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(found, found), 0x08);
    const __m256  gelu   = _mm256_blendv_ps(v, _mm256_cvtph_ps(_mm256_castsi256_si128(halves)), inside);
    _mm256_storeu_ps(y, _mm256_andnot_ps(below, _mm256_mul_ps(gelu, _mm256_loadu_ps(g))));
}
#endif

// Reads two bytes behind an entry of the table. The last entry that is fetched is that of -10, number 0xc900.
static inline void geglu_row(const uint16_t * table, int64_t n, float * y, const float * x, const float * g) {
    int64_t i = 0;
    for (; i + GEGLU_LANES <= n; i += GEGLU_LANES) {
        geglu_lanes(table, y + i, x + i, g + i);
    }
    if (i < n) {
        const size_t rest = (size_t)(n - i) * sizeof(float);
        float        some[3][GEGLU_LANES];
        memset(some, 0, sizeof(some));
        memcpy(some[0], x + i, rest);
        memcpy(some[1], g + i, rest);
        geglu_lanes(table, some[2], some[0], some[1]);
        memcpy(y + i, some[2], rest);
    }
}
#endif
