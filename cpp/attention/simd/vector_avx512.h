// Vector layer of tile.h for AVX-512.

#pragma once

#include "attention/row_types.h"

#include "attention/x86/unpack_rows.h"

#include <immintrin.h>

namespace mixedkv {
namespace {

struct avx512 : plain_blocks {
    using V                     = __m512;
    static constexpr int  width = 16;
    static constexpr int  rows = 6; // of a product tile: 6 x 4 accumulators, 4 columns and a broadcast fit 32 registers
    static constexpr int  cols = 4;
    static constexpr int  dot_keys         = 4; // times 4 rows: 16 accumulators
    static constexpr bool updates_together = true;

    static V    zero() { return _mm512_setzero_ps(); }
    static V    set(float x) { return _mm512_set1_ps(x); }
    static V    load(const float * p) { return _mm512_loadu_ps(p); }
    static void store(float * p, V v) { _mm512_storeu_ps(p, v); }
    static V load_half(const void * p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i *>(p))); }
    static V add(V a, V b) { return _mm512_add_ps(a, b); }
    static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
    static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
    static V div(V a, V b) { return _mm512_div_ps(a, b); }
    static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
    static V max(V a, V b) { return _mm512_max_ps(a, b); }
    static V min(V a, V b) { return _mm512_min_ps(a, b); } // b where a is NaN
    static V abs(V a) { return _mm512_abs_ps(a); }
    static V where(uint32_t bits, V a) { return _mm512_maskz_mov_ps(__mmask16(bits), a); } // zero elsewhere
    static V at_least(V a, float x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, set(x), _CMP_NLT_UQ), a); }
    static uint32_t nonzero(V a) { return _mm512_cmp_ps_mask(a, zero(), _CMP_NEQ_UQ); }
    // By lanes of a's first 4, b's first 4
    static __m512i  to_int16(V a, V b) { return _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b)); }
    // Halves are added up to the last: four at once have the same bits
    static float    sum(V v) {
        const __m128 x = fold_sum(v);
        const __m128 y = _mm_add_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
    }
    static void sum_of_four(const V * v, float * out) {
        const __m128 x[4] = { fold_sum(v[0]), fold_sum(v[1]), fold_sum(v[2]), fold_sum(v[3]) };
        const __m128 ab   = _mm_add_ps(_mm_movelh_ps(x[0], x[1]), _mm_movehl_ps(x[1], x[0]));
        const __m128 cd   = _mm_add_ps(_mm_movelh_ps(x[2], x[3]), _mm_movehl_ps(x[3], x[2]));
        _mm_storeu_ps(out, _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd)));
    }
    static __m128 fold_sum(V v) {
        const __m256 x = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
        return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    }
    static float highest(V v) { return _mm512_reduce_max_ps(v); }
    static void  highest_of_four(const V * v, float * out) {
        fold_four(
            v, out, max, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); },
            [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
    }
    // The sums of 4 vectors
    static void sums(const V * v, float * out) {
        fold_four(
            v, out, add, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); },
            [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
    }
    // Four vectors to a number each, by an operation on vectors, on halves and on quarters
    template <class Whole, class Half, class Quarter>
    static void fold_four(const V * v, float * out, Whole whole, Half half, Quarter quarter) {
        const V      ab   = whole(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
        const V      cd   = whole(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
        const V      abcd = whole(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee)); // in each lane
        const __m256 two  = half(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
        _mm_storeu_ps(out, quarter(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
    }
    // 16 sums of 4 neighbours
    static void sum_fours(const float * in, float * out) {
        const V a = load(in), b = load(in + 16), c = load(in + 32), d = load(in + 48);
        const V ab    = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        const V cd    = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        const V fours = add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee)); // of each vector one
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        store(out, _mm512_permutexvar_ps(order, fours));
    }
    // See sketch.h. Of two neighbouring bits that are masked the upper ones stand for 4 times as much, so they have
    // sums of their own. Inlined, GCC 12 runs out of registers.
    template <int R>
    [[gnu::noinline]] static void sum_strip(const uint8_t * bits, int groups, const int32_t (*ints)[4][4],
                                            float * sums) {
        __m512i sum[2][R];
        for (int r = 0; r < R; r++) {
            sum[0][r] = sum[1][r] = _mm512_setzero_si512();
        }
        const __m512i masks[2] = { _mm512_set1_epi8(3), _mm512_set1_epi8(12) };
        for (int g = 0; g < groups; g++, bits += 64) {
            __m512i x = _mm512_loadu_si512(bits);
            for (int s = 0; s < 4; s++) {
                const __m512i two = _mm512_and_si512(x, masks[s % 2]);
                for (int r = 0; r < R; r++) {
                    sum[s % 2][r] = _mm512_dpbusd_epi32(sum[s % 2][r], two, _mm512_set1_epi32(ints[g][s][r]));
                }
                x = s == 1 ? _mm512_srli_epi16(x, 4) : x;
            }
        }
        for (int r = 0; r < R; r++) {
            store(sums + 16 * r, _mm512_cvtepi32_ps(_mm512_add_epi32(sum[0][r], _mm512_srai_epi32(sum[1][r], 2))));
        }
    }
    // 2^x to 3%, from -126 to 127: the integer that a float is, is its logarithm where the fraction is taken as linear
    static V rough_exp2(V x) {
        const V y = fma(max(x, set(-126.0f)), set(0x1p23f), set(rough_exp2_bias));
        return _mm512_castsi512_ps(_mm512_cvtps_epi32(y));
    }
    static float scale_of(const void * block) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_loadu_si16(block))); }

    // 2^x with a relative error below 2e-7; 0 below -125.5, since a denormal result takes the CPU 150 cycles.
    static V exp2(V x) {
        const __mmask16 live = _mm512_cmp_ps_mask(x, set(-125.5f), _CMP_GE_OQ);
        const V         n    = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const V         f    = _mm512_sub_ps(x, n);
        V               p    = _mm512_fmadd_ps(f, set(0.0013276470f), set(0.0096755410f));
        p                    = _mm512_fmadd_ps(p, f, set(0.0555071346f));
        p                    = _mm512_fmadd_ps(p, f, set(0.2402212024f));
        p                    = _mm512_fmadd_ps(p, f, set(0.6931469440f));
        p                    = _mm512_fmadd_ps(p, f, set(1.0f));
        return _mm512_maskz_scalef_ps(live, p, n);
    }

    static void dequantise(type_constant<row_type::q8_0>, const char * block, float * out) {
        const V d = set(scale_of(block));
        for (int i = 0; i < 2; i++) {
            const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i *>(block + 2) + i);
            store(out + 16 * i, mul(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x))));
        }
    }

    // 32 elements; the 16 values are looked up in a register: the index is the low nibble of each dword.
    template <class Values>
    static void look_up(float scale, const char * nibbles, float * out) {
        const __m128i bytes  = _mm_loadu_si128(reinterpret_cast<const __m128i *>(Values::at));
        const V       values = mul(set(scale), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
        const __m512i n      = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(nibbles)));
        store(out, _mm512_permutexvar_ps(n, values));
        store(out + 16, _mm512_permutexvar_ps(_mm512_srli_epi32(n, 4), values));
    }
    static void dequantise(type_constant<row_type::q4_0>, const char * p, float * out) {
        look_up<q4_0_values>(scale_of(p), p + 2, out);
    }
    static void dequantise(type_constant<row_type::lm4>, const char * p, float * out) {
        look_up<lm4_values>(scale_of(p), p + 2, out);
        look_up<lm4_values>(scale_of(p), p + 18, out + 32);
    }
    static void dequantise(type_constant<row_type::tc3>, const char * p, float * out) {
        char unpacked[32];
        unpack_block_tc3(p, unpacked);
        look_up<tc3_values>(scale_of(p), unpacked, out);
        look_up<tc3_values>(scale_of(p), unpacked + 16, out + 32);
    }

    // As that of plain_blocks: a bit of `high` is the fifth of its element
    static void dequantise_fives(float d, uint32_t high, const char * nibbles, float * out) {
        const __m512i x      = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(nibbles)));
        const auto    values = [&](__m512i n, uint32_t fifth) {
            n = _mm512_mask_or_epi32(n, __mmask16(fifth), n, _mm512_set1_epi32(16));
            return fma(_mm512_cvtepi32_ps(n), set(d), set(-16.0f * d));
        };
        store(out, values(_mm512_and_si512(x, _mm512_set1_epi32(15)), high));
        store(out + 16, values(_mm512_srli_epi32(x, 4), high >> 16));
    }
    static void dequantise(type_constant<row_type::q5_0>, const char * p, float * out) {
        dequantise_fives(half_at(p), bits(p + 2), p + 6, out);
    }

    // out[j * out_stride + i] = in[i * in_stride + j] for 16 x 16
    static void transpose(const float * in, int64_t in_stride, float * out, int64_t out_stride) {
        V r[16], t[16];
        for (int i = 0; i < 16; i++) {
            r[i] = load(in + i * in_stride);
        }
        for (int i = 0; i < 16; i += 2) {
            t[i]     = _mm512_unpacklo_ps(r[i], r[i + 1]);
            t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
        }
        for (int i = 0; i < 16; i += 4) { // r[i + c]: column c of each 4 x 4 in rows i .. i + 3
            r[i]     = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
            r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
            r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
            r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
        }
        for (int c = 0; c < 4; c++) { // the same for 128-bit lanes
            const V a = _mm512_shuffle_f32x4(r[c], r[c + 4], 0x44);
            const V b = _mm512_shuffle_f32x4(r[c], r[c + 4], 0xee);
            const V d = _mm512_shuffle_f32x4(r[c + 8], r[c + 12], 0x44);
            const V e = _mm512_shuffle_f32x4(r[c + 8], r[c + 12], 0xee);
            store(out + c * out_stride, _mm512_shuffle_f32x4(a, d, 0x88));
            store(out + (c + 4) * out_stride, _mm512_shuffle_f32x4(a, d, 0xdd));
            store(out + (c + 8) * out_stride, _mm512_shuffle_f32x4(b, e, 0x88));
            store(out + (c + 12) * out_stride, _mm512_shuffle_f32x4(b, e, 0xdd));
        }
    }
};

} // namespace
} // namespace mixedkv
