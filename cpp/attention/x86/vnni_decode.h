// Decode on AVX-512 VNNI over rows of a scale and integers (integers.h): their integers are multiplied as they are,
// with Q and the weights as 16-bit integers. Sums are exact in 32 bits; scales are applied to them in F32.
//
// Scores: 16 keys are transposed so that each is a column of dwords (4 elements). Bytes are multiplied unsigned by
// signed: K gets an offset, whose share of the sum is known from Q alone, and Q comes in two signed bytes (high * 256 +
// low). Output: pairs of keys share a dword, as do their weights times the scales of V, by 16-bit products.

#pragma once

#include "attention/integers/integer_decode.h"
#include "attention/simd/vector_avx512.h"

namespace mixedkv {
namespace {

struct vnni {
    using L = avx512;

    using value_scales                  = key_scales;
    static constexpr bool in_bytes      = false;
    static constexpr int  keys_together = 2;

    // Sums. GCC 12 keeps arrays of it in registers, and not those of __m512i, which it takes for other integers.
    using ints16 = int32_t __attribute__((vector_size(64)));

    // sum + x . y for pairs of 16-bit integers; for fours of bytes, of which y's have signs
    static ints16 dot_pairs(ints16 sum, __m512i x, __m512i y) {
        return ints16(_mm512_dpwssd_epi32(__m512i(sum), x, y));
    }
    static ints16 dot_fours(ints16 sum, __m512i x, __m512i y) {
        return ints16(_mm512_dpbusd_epi32(__m512i(sum), x, y));
    }

    // 64 weights, as weight_unit::apply leaves them
    static void keep_weights(const __m512i * packed, int32_t (&to)[32]) { std::memcpy(to, packed, sizeof(to)); }

    // Four rows of Q, one block of 32 elements
    struct quad {
        int32_t ints[8][4][2]; // 4 elements, row, high and low bytes
        int32_t sum[4];        // of the integers
        float   scale[4];
    };

    using columns_of_block = __m512i[8];

    // 32 elements of Q as integers up to `limit`; their scale is returned
    static float round_block(const float * q, __m512i (&n)[2], float limit = int16_limit) {
        const __m512 half[2] = { _mm512_loadu_ps(q), _mm512_loadu_ps(q + 16) };
        const float  largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(half[0]), _mm512_abs_ps(half[1])));
        const __m512 to_int  = _mm512_set1_ps(largest > 0x1p-100f ? limit / largest : 0.0f);
        for (int i = 0; i < 2; i++) {
            const __m512 x = _mm512_mul_ps(half[i], to_int);
            n[i]           = _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), x); // else INT_MIN
        }
        return largest / limit;
    }

    static void pack_block(const float * q, int row, quad & out) {
        __m512i ints[2];
        out.scale[row] = round_block(q, ints);
        out.sum[row]   = 0;
        for (int i = 0; i < 2; i++) {
            alignas(16) int32_t high[4], low[4];
            const __m512i       n = ints[i];
            const __m512i       h = _mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(128)), 8);
            _mm_store_si128(reinterpret_cast<__m128i *>(high), _mm512_cvtepi32_epi8(h));
            _mm_store_si128(reinterpret_cast<__m128i *>(low), _mm512_cvtepi32_epi8(n));
            for (int j = 0; j < 4; j++) {
                out.ints[4 * i + j][row][0] = high[j];
                out.ints[4 * i + j][row][1] = low[j];
            }
            out.sum[row] += _mm512_reduce_add_epi32(n);
        }
    }

    // Bytes 4 i .. 4 i + 3 of 16 keys in t[i]
    static void transpose(const char * p, int64_t row, __m512i (&t)[4]) {
        __m512i r[4]; // keys i, 4 + i, 8 + i, 12 + i
        for (int i = 0; i < 4; i++) {
            r[i] = load_lanes(p + i * row, 4 * row);
        }
        const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
        const __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
        t[0] = _mm512_unpacklo_epi64(a, c);
        t[1] = _mm512_unpackhi_epi64(a, c);
        t[2] = _mm512_unpacklo_epi64(b, d);
        t[3] = _mm512_unpackhi_epi64(b, d);
    }

    // Elements 4 i .. 4 i + 3 of a block of 16 keys, plus the offset, as unsigned bytes in x[i]; p: to their
    // integers
    template <row_type type>
    static void columns(const char * p, int64_t row, columns_of_block & x) {
        using rows = integer_rows<type>;
        __m512i t[4];
        for (int part = 0; part < (rows::nibbles ? 1 : 2); part++) {
            transpose(p + 16 * part, row, t);
            for (int i = 0; i < 4; i++) {
                if constexpr (rows::nibbles) {
                    const __m512i nibble = _mm512_set1_epi8(15);
                    x[i]                 = _mm512_and_si512(t[i], nibble);
                    x[i + 4]             = _mm512_and_si512(_mm512_srli_epi16(t[i], 4), nibble);
                    if constexpr (!rows::even) {
                        const __m512i values = in_lanes(rows::at, rows::offset);
                        x[i]                 = _mm512_shuffle_epi8(values, x[i]);
                        x[i + 4]             = _mm512_shuffle_epi8(values, x[i + 4]);
                    }
                } else {
                    x[4 * part + i] = _mm512_xor_si512(t[i], _mm512_set1_epi8(-128));
                }
            }
        }
    }

    // s[row][16 keys] += the scores of one block of elements
    template <row_type type>
    static void score_block(const columns_of_block & x, const uint16_t * scales_f16, const quad & q, int rows,
                            float * s) {
        const __m512 scales = avx512::load_half(scales_f16);
        ints16       high[4], low[4];
        unrolled<4>([&](auto r) __attribute__((always_inline)) {
            high[r] = ints16{};
            low[r]  = ints16(_mm512_set1_epi32(-integer_rows<type>::offset * q.sum[r]));
        });
        for (int i = 0; i < 8; i++) {
            unrolled<4>([&](auto r) __attribute__((always_inline)) {
                high[r] = dot_fours(high[r], x[i], _mm512_set1_epi32(q.ints[i][r][0]));
                low[r]  = dot_fours(low[r], x[i], _mm512_set1_epi32(q.ints[i][r][1]));
            });
        }
        for (int r = 0; r < rows; r++, s += key_block) {
            const __m512i both = __m512i((high[r] << 8) + low[r]);
            const __m512  by   = _mm512_mul_ps(scales, _mm512_set1_ps(q.scale[r]));
            _mm512_store_ps(s, _mm512_fmadd_ps(by, _mm512_cvtepi32_ps(both), _mm512_load_ps(s)));
        }
    }

    // Where weight_unit::apply leaves the weights of keys 2 i, 2 i + 1
    static constexpr int dword_of(int i) { return (i & 0x11) | (i & 8) >> 2 | (i & 6) << 1; }

    // Elements 0..15 and 16..31 of a block of two keys, as 16-bit integers side by side
    template <row_type type>
    static void pair(const char * p, int64_t row, __m512i & first, __m512i & second) {
        using rows = integer_rows<type>;
        if constexpr (rows::nibbles) {
            const __m256i values = _mm256_cvtepi8_epi16(load_16(reinterpret_cast<const char *>(rows::at)));
            const __m512i table  = _mm512_broadcast_i64x4(values); // bit 4 of an index does nothing
            const __m512i a      = _mm512_cvtepu8_epi32(load_16(p));
            const __m512i b      = _mm512_cvtepu8_epi32(load_16(p + row));
            const __m512i x      = _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
            first                = _mm512_permutexvar_epi16(x, table);
            second               = _mm512_permutexvar_epi16(_mm512_srli_epi16(x, 4), table);
            return;
        }
        const auto both = [&](int i) {
            const __m512i a = _mm512_cvtepi8_epi32(load_16(p + i));
            const __m512i b = _mm512_cvtepi8_epi32(load_16(p + row + i));
            return _mm512_mask_blend_epi16(0xaaaaaaaa, a, _mm512_slli_epi32(b, 16));
        };
        first  = both(0);
        second = both(16);
    }

    // acc[R][32] += weights times one block of elements of pairs of n keys; ints[r]: pairs of weights
    template <row_type type, int R>
    static void add_block(const char * p, int64_t row, int n, const key_pairs & pairs, prefetcher & ahead,
                          const int32_t (*ints)[32], const float * scales, float * acc, int64_t ld) {
        ints16 sums[2 * R];
        unrolled<2 * R>([&](auto i) __attribute__((always_inline)) { sums[i] = ints16{}; });
        pairs.for_each([&](int i) __attribute__((always_inline)) {
            ahead.step(i & 1);
            __m512i first, second;
            pair<type>(p + 2 * i * row, 2 * i + 1 < n ? row : 0, first, second); // past the last, weight 0
            unrolled<R>([&](auto r) __attribute__((always_inline)) {
                const __m512i weights = _mm512_set1_epi32(ints[r][dword_of(i)]);
                sums[2 * r]           = dot_pairs(sums[2 * r], first, weights);
                sums[2 * r + 1]       = dot_pairs(sums[2 * r + 1], second, weights);
            });
        });
        add_sums<R>(sums, scales, acc, ld);
    }

    // acc[R][32] += scales times sums
    template <int R>
    [[gnu::always_inline]] static void add_sums(const ints16 * sums, const float * scales, float * acc, int64_t ld) {
        unrolled<2 * R>([&](auto i) __attribute__((always_inline)) {
            float *      y  = acc + i / 2 * ld + 16 * (i % 2);
            const __m512 by = _mm512_set1_ps(scales[i / 2]);
            _mm512_store_ps(y, _mm512_fmadd_ps(by, _mm512_cvtepi32_ps(__m512i(sums[i])), _mm512_load_ps(y)));
        });
    }
};

} // namespace
} // namespace mixedkv
