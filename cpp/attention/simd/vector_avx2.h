// Vector layer of tile.h for AVX2, FMA and F16C.

#pragma once

#include "attention/row_types.h"

#include "attention/x86/unpack_rows.h"

#include <immintrin.h>

namespace mixedkv {
namespace {

struct avx2 : plain_blocks {
    using V                     = __m256;
    static constexpr int  width = 8;
    static constexpr int  rows = 6; // of a product tile: 6 x 2 accumulators, 2 columns and a broadcast fit 16 registers
    static constexpr int  cols = 2;
    static constexpr int  dot_keys         = 2; // times 4 rows: 8 accumulators
    static constexpr bool updates_together = false;

    static V    zero() { return _mm256_setzero_ps(); }
    static V    set(float x) { return _mm256_set1_ps(x); }
    static V    load(const float * p) { return _mm256_loadu_ps(p); }
    static void store(float * p, V v) { _mm256_storeu_ps(p, v); }
    static V    load_half(const void * p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i *>(p))); }
    static V    add(V a, V b) { return _mm256_add_ps(a, b); }
    static V    sub(V a, V b) { return _mm256_sub_ps(a, b); }
    static V    mul(V a, V b) { return _mm256_mul_ps(a, b); }
    static V    div(V a, V b) { return _mm256_div_ps(a, b); }
    static V    fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
    static V    max(V a, V b) { return _mm256_max_ps(a, b); }
    static V    min(V a, V b) { return _mm256_min_ps(a, b); } // b where a is NaN
    static V    abs(V a) { return _mm256_andnot_ps(set(-0.0f), a); }

    static V where(uint32_t bits, V a) { // zero elsewhere
        const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        const __m256i here = _mm256_and_si256(_mm256_set1_epi32(int(bits)), each);
        return _mm256_and_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(here, each)), a);
    }
    static V at_least(V a, float x) { // zero elsewhere
        return _mm256_and_ps(_mm256_cmp_ps(a, set(x), _CMP_NLT_UQ), a);
    }
    static uint32_t nonzero(V a) { return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, zero(), _CMP_NEQ_UQ))); }
    static __m256i  to_int16(V a, V b) { // in order
        const __m256i x = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));
        return _mm256_permute4x64_epi64(x, 0xd8);
    }

    static float sum(V v) {
        __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        x        = _mm_add_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
    }
    // The sums of 4 vectors
    static void sums(const V * v, float * out) {
        const V abcd = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3])); // in each lane
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
    }
    // 16 sums of 4 neighbours
    static void sum_fours(const float * in, float * out) {
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        for (int i = 0; i < 2; i++, in += 32) {
            const V ab = _mm256_hadd_ps(load(in), load(in + 8)), cd = _mm256_hadd_ps(load(in + 16), load(in + 24));
            store(out + 8 * i, _mm256_permutevar8x32_ps(_mm256_hadd_ps(ab, cd), order));
        }
    }
    // See sketch.h. Sums of 16 bits hold what eight groups add to them: 3 * 127 * 64.
    template <int R>
    static void sum_strip(const uint8_t * bits, int groups, const int32_t (*ints)[4][4], float * sums) {
        const __m256i two = _mm256_set1_epi8(3);
        for (int half = 0; half < 2; half++) {
            __m256i sum[R];
            for (__m256i & x : sum) {
                x = _mm256_setzero_si256();
            }
            for (int first = 0; first < groups; first += 8) {
                __m256i short_sum[R];
                for (__m256i & x : short_sum) {
                    x = _mm256_setzero_si256();
                }
                for (int g = first; g < groups && g < first + 8; g++) {
                    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(bits + 64 * g + 32 * half));
                    for (int s = 0; s < 4; s++) {
                        const __m256i y = _mm256_and_si256(_mm256_srli_epi16(x, 2 * s), two);
                        for (int r = 0; r < R; r++) {
                            const __m256i q = _mm256_set1_epi32(ints[g][s][r]);
                            short_sum[r]    = _mm256_add_epi16(short_sum[r], _mm256_maddubs_epi16(y, q));
                        }
                    }
                }
                for (int r = 0; r < R; r++) {
                    sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(short_sum[r], _mm256_set1_epi16(1)));
                }
            }
            for (int r = 0; r < R; r++) {
                store(sums + 16 * r + 8 * half, _mm256_cvtepi32_ps(sum[r]));
            }
        }
    }
    // As that of avx512
    static V rough_exp2(V x) {
        const V y = fma(max(x, set(-126.0f)), set(0x1p23f), set(rough_exp2_bias));
        return _mm256_castsi256_ps(_mm256_cvtps_epi32(y));
    }
    static float highest(V v) {
        __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        x        = _mm_max_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
    }
    static float scale_of(const void * block) {
        uint16_t h;
        std::memcpy(&h, block, 2);
        return _cvtsh_ss(h);
    }

    // 2^x with a relative error below 2e-7; 0 below -126, 2^127 above 127, x if that is NaN.
    static V exp2(V x) {
        const V floor   = set(-126.0f);
        const V live    = _mm256_cmp_ps(x, floor, _CMP_NLT_UQ);
        x               = _mm256_max_ps(floor, _mm256_min_ps(set(127.0f), x)); // of NaN and a number, the second
        const V n       = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const V f       = _mm256_sub_ps(x, n);
        V       p       = _mm256_fmadd_ps(f, set(0.0013276470f), set(0.0096755410f));
        p               = _mm256_fmadd_ps(p, f, set(0.0555071346f));
        p               = _mm256_fmadd_ps(p, f, set(0.2402212024f));
        p               = _mm256_fmadd_ps(p, f, set(0.6931469440f));
        p               = _mm256_fmadd_ps(p, f, set(1.0f));
        const __m256i e = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
        return _mm256_and_ps(live, _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), e)));
    }

    // 16 integers times d
    static void scaled(__m128i x, V d, float * out) {
        store(out, mul(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x))));
        store(out + 8, mul(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))));
    }

    static void dequantise(type_constant<row_type::q8_0>, const char * block, float * out) {
        const V d = set(scale_of(block));
        for (int i = 0; i < 2; i++) {
            scaled(_mm_loadu_si128(reinterpret_cast<const __m128i *>(block + 2) + i), d, out + 16 * i);
        }
    }

    // 32 elements
    template <class Values>
    static void look_up(float scale, const char * nibbles, float * out) {
        const V       d      = set(scale);
        const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i *>(Values::at));
        const __m128i x      = _mm_loadu_si128(reinterpret_cast<const __m128i *>(nibbles));
        const __m128i nibble = _mm_set1_epi8(15);
        scaled(_mm_shuffle_epi8(values, _mm_and_si128(x, nibble)), d, out);
        scaled(_mm_shuffle_epi8(values, _mm_and_si128(_mm_srli_epi16(x, 4), nibble)), d, out + 16);
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

    static void dequantise(type_constant<row_type::q5_0>, const char * p, float * out) {
        const __m256i x = unpack_block_q5_0(p);
        scaled(_mm256_castsi256_si128(x), set(scale_of(p)), out);
        scaled(_mm256_extracti128_si256(x, 1), set(scale_of(p)), out + 16);
    }

    // out[j * out_stride + i] = in[i * in_stride + j] for 8 x 8
    static void transpose(const float * in, int64_t in_stride, float * out, int64_t out_stride) {
        V r[8], t[8];
        for (int i = 0; i < 8; i++) {
            r[i] = load(in + i * in_stride);
        }
        for (int i = 0; i < 8; i += 2) {
            t[i]     = _mm256_unpacklo_ps(r[i], r[i + 1]);
            t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
        }
        for (int i = 0; i < 8; i += 4) {
            r[i]     = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
            r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
            r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
            r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
        }
        for (int c = 0; c < 4; c++) {
            store(out + c * out_stride, _mm256_permute2f128_ps(r[c], r[c + 4], 0x20));
            store(out + (c + 4) * out_stride, _mm256_permute2f128_ps(r[c], r[c + 4], 0x31));
        }
    }
};

} // namespace
} // namespace mixedkv
