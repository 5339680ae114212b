// Decode on AVX2 over rows of a scale and integers (integers.h), with Q and the weights in 16 bits. Sums are exact in
// 32 bits; scales are applied to them in F32. AVX-VNNI multiplies and adds in one instruction what takes two without
// it.
//
// Scores: 16 keys are transposed so that each is a column of pairs of elements. Output: pairs of keys share a dword, as
// do their weights times the scales of V. Nibbles of q4_0 stay unsigned: what is 8 too much is known from Q, or from
// the weights. (Bytes, by maddubs, would take Q and the weights in two parts: as many products, and sums in 16 bits.)

#pragma once

#include "attention/integers/integer_decode.h"
#include "attention/simd/vector_avx2.h"

namespace mixedkv {
namespace {

struct avx2_integers {
    using L = avx2;

    using value_scales                  = key_scales;
    static constexpr bool in_bytes      = false;
    static constexpr int  keys_together = 2;

    // Four rows of Q, one block of 32 elements: pairs 4 i, 4 i + 2 and 4 i + 1, 4 i + 3 for i = 0..7
    struct quad {
        int32_t ints[16][4];
        int32_t sum[4]; // of the integers
        float   scale[4];
    };

    using columns_of_block = __m256i[16][2]; // the pairs of a quad; keys 0..7, 8..15

    template <row_type type>
    static constexpr bool unsigned_nibbles() {
        if constexpr (integer_rows<type>::nibbles) {
            return integer_rows<type>::even;
        }
        return false;
    }

    // Sums. GCC 12 keeps arrays of it in registers, and not those of __m256i, which it takes for other integers.
    using ints8 = int32_t __attribute__((vector_size(32)));

    // a + x . y for pairs of 16-bit integers
    static ints8 dot(ints8 a, __m256i x, __m256i y) {
#ifdef __AVXVNNI__
        return ints8(_mm256_dpwssd_avx_epi32(__m256i(a), x, y));
#else
        return ints8(_mm256_add_epi32(__m256i(a), _mm256_madd_epi16(x, y)));
#endif
    }

    // 64 weights, as weight_unit::apply leaves them
    static void keep_weights(const __m256i * packed, int32_t (&to)[32]) { std::memcpy(to, packed, sizeof(to)); }

    static int32_t sum(__m256i v) {
        __m128i x = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
        x         = _mm_add_epi32(x, _mm_unpackhi_epi64(x, x));
        return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 1)));
    }

    // Of all pairs in n dwords
    static int32_t sum_pairs(const int32_t * p, int n) {
        ints8 a{};
        for (int i = 0; i < n; i += 8) {
            a = dot(a, load_32(reinterpret_cast<const char *>(p + i)), _mm256_set1_epi16(1));
        }
        return sum(__m256i(a));
    }

    static void pack_block(const float * q, int row, quad & out) {
        __m256 largest = L::zero();
        for (int i = 0; i < 32; i += 8) {
            largest = L::max(largest, L::abs(L::load(q + i)));
        }
        const float         top    = L::highest(largest);
        const __m256        to_int = L::set(top > 0x1p-100f ? int16_limit / top : 0.0f);
        alignas(32) int32_t pairs[16];
        for (int i = 0; i < 32; i += 16) {
            __m256 x[2];
            for (int half = 0; half < 2; half++) {
                const __m256 y = L::mul(L::load(q + i + 8 * half), to_int);
                x[half]        = _mm256_and_ps(y, _mm256_cmp_ps(y, y, _CMP_ORD_Q)); // NaN would be INT_MIN
            }
            const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5, 2,
                                                   3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
            _mm256_store_si256(reinterpret_cast<__m256i *>(pairs + i / 2),
                               _mm256_shuffle_epi8(L::to_int16(x[0], x[1]), order));
        }
        for (int i = 0; i < 16; i++) {
            out.ints[i][row] = pairs[i];
        }
        out.scale[row] = top / int16_limit;
        out.sum[row]   = sum_pairs(pairs, 16);
    }

    // Elements 0, 2 and 1, 3 of 4 signed bytes each
    static void widen(__m256i bytes, __m256i & even, __m256i & odd) {
        even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
        odd  = _mm256_srai_epi16(bytes, 8);
    }

    // Bytes 4 i .. 4 i + 3 of 8 keys in t[i]
    static void transpose(const char * p, int64_t row, __m256i (&t)[4]) {
        __m256i r[4]; // keys i, 4 + i
        for (int i = 0; i < 4; i++) {
            const char * from = p + i * row;
            r[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(load_16(from)), load_16(from + 4 * row), 1);
        }
        const __m256i a = _mm256_unpacklo_epi32(r[0], r[1]), b = _mm256_unpackhi_epi32(r[0], r[1]);
        const __m256i c = _mm256_unpacklo_epi32(r[2], r[3]), d = _mm256_unpackhi_epi32(r[2], r[3]);
        t[0] = _mm256_unpacklo_epi64(a, c);
        t[1] = _mm256_unpackhi_epi64(a, c);
        t[2] = _mm256_unpacklo_epi64(b, d);
        t[3] = _mm256_unpackhi_epi64(b, d);
    }

    template <row_type type>
    static void columns(const char * p, int64_t row, columns_of_block & x) {
        using rows           = integer_rows<type>;
        const __m256i nibble = _mm256_set1_epi16(unsigned_nibbles<type>() ? 0x000f : 0x0f0f);
        __m256i       t[4];
        for (int group = 0; group < 2; group++, p += 8 * row) {
            for (int part = 0; part < (rows::nibbles ? 1 : 2); part++) {
                transpose(p + 16 * part, row, t);
                for (int i = 0; i < 4; i++) {
                    const int at = 2 * i + 8 * part;
                    if constexpr (unsigned_nibbles<type>()) {
                        x[at][group]     = _mm256_and_si256(t[i], nibble);
                        x[at + 1][group] = _mm256_and_si256(_mm256_srli_epi16(t[i], 8), nibble);
                        x[at + 8][group] = _mm256_and_si256(_mm256_srli_epi16(t[i], 4), nibble);
                        x[at + 9][group] = _mm256_srli_epi16(t[i], 12);
                    } else if constexpr (rows::nibbles) {
                        const __m256i low  = _mm256_and_si256(t[i], nibble);
                        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(t[i], 4), nibble);
                        widen(_mm256_shuffle_epi8(table<type>(), low), x[at][group], x[at + 1][group]);
                        widen(_mm256_shuffle_epi8(table<type>(), high), x[at + 8][group], x[at + 9][group]);
                    } else {
                        widen(t[i], x[at][group], x[at + 1][group]);
                    }
                }
            }
        }
    }

    template <row_type type>
    static __m256i table() {
        return _mm256_broadcastsi128_si256(load_16(reinterpret_cast<const char *>(integer_rows<type>::at)));
    }

    // s[row][16 keys] += the scores of one block of elements
    template <row_type type>
    static void score_block(const columns_of_block & x, const uint16_t * scales_f16, const quad & q, int rows,
                            float * s) {
        alignas(32) float scales[16];
        L::store(scales, L::load_half(scales_f16));
        L::store(scales + 8, L::load_half(scales_f16 + 8));
        with_rows(rows, [&](auto R) { score_rows<type, R>(x, scales, q, s); });
    }
    template <row_type type, int R>
    static void score_rows(const columns_of_block & x, const float * scales, const quad & q, float * s) {
        ints8 sums[R][2];
        for (int r = 0; r < R; r++) {
            sums[r][0] = sums[r][1] = ints8(_mm256_set1_epi32(unsigned_nibbles<type>() ? -8 * q.sum[r] : 0));
        }
        for (int i = 0; i < 16; i++) {
            for (int r = 0; r < R; r++) {
                const __m256i y = _mm256_set1_epi32(q.ints[i][r]);
                sums[r][0]      = dot(sums[r][0], x[i][0], y);
                sums[r][1]      = dot(sums[r][1], x[i][1], y);
            }
        }
        for (int half = 0; half < 2; half++) {
            const __m256 d = L::load(scales + 8 * half);
            for (int r = 0; r < R; r++) {
                float * to = s + r * key_block + 8 * half;
                L::store(
                    to, L::fma(L::mul(d, L::set(q.scale[r])), _mm256_cvtepi32_ps(__m256i(sums[r][half])), L::load(to)));
            }
        }
    }

    // 16 elements of two keys side by side: of nibbles 8 from 8 half on and 8 from 16 + 8 half on, else from 16 half on
    template <row_type type>
    static void pair(const char * p, int64_t row, int half, __m256i & first, __m256i & second) {
        if constexpr (integer_rows<type>::nibbles) {
            const auto    at = [&](int64_t i) { return _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p + i)); };
            const __m128i x  = _mm_unpacklo_epi8(at(8 * half), at(row + 8 * half));
            if constexpr (unsigned_nibbles<type>()) {
                const __m256i y = _mm256_cvtepu8_epi16(x);
                first           = _mm256_and_si256(y, _mm256_set1_epi16(15));
                second          = _mm256_srli_epi16(y, 4);
            } else {
                const __m128i values = load_16(reinterpret_cast<const char *>(integer_rows<type>::at));
                const __m128i nibble = _mm_set1_epi8(15);
                first                = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(values, _mm_and_si128(x, nibble)));
                second = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(values, _mm_and_si128(_mm_srli_epi16(x, 4), nibble)));
            }
        } else {
            const __m128i a = load_16(p + 16 * half), b = load_16(p + row + 16 * half);
            first  = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
            second = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b));
        }
    }

    // Where the elements of a pair lie in the block
    template <row_type type>
    static constexpr int place(int part, int i) {
        return integer_rows<type>::nibbles ? 8 * part + 16 * i : 16 * part + 8 * i;
    }

    // One of the two parts of a block
    template <row_type type, int R, int part>
    static void add_part(const char * p, int64_t row, int n, const key_pairs & pairs, prefetcher & ahead,
                         const int32_t (*ints)[32], const int32_t * start, const float * scales, float * acc,
                         int64_t ld) {
        ints8 sums[R][2];
        for (int r = 0; r < R; r++) {
            sums[r][0] = sums[r][1] = ints8(_mm256_set1_epi32(unsigned_nibbles<type>() ? start[r] : 0));
        }
        pairs.for_each([&](int i) {
            ahead.step((i & 3) == part % 2 * 2);
            const char *  at   = p + 2 * i * row;
            const int64_t next = 2 * i + 1 < n ? row : 0; // past the last, weight 0
            __m256i       first, second;
            pair<type>(at, next, part, first, second);
            for (int r = 0; r < R; r++) {
                const __m256i weights = _mm256_set1_epi32(ints[r][i]);
                sums[r][0]            = dot(sums[r][0], first, weights);
                sums[r][1]            = dot(sums[r][1], second, weights);
            }
        });
        for (int r = 0; r < R; r++) {
            for (int i = 0; i < 2; i++) {
                float * y = acc + r * ld + place<type>(part, i);
                L::store(y, L::fma(L::set(scales[r]), _mm256_cvtepi32_ps(__m256i(sums[r][i])), L::load(y)));
            }
        }
    }

    // acc[R][32] += weights times one block of elements of pairs of n keys; ints[r]: pairs of weights
    template <row_type type, int R>
    static void add_block(const char * p, int64_t row, int n, const key_pairs & pairs, prefetcher & ahead,
                          const int32_t (*ints)[32], const float * scales, float * acc, int64_t ld) {
        int32_t start[R];
        for (int r = 0; r < R; r++) {
            start[r] = unsigned_nibbles<type>() ? -8 * sum_pairs(ints[r], 32) : 0;
        }
        add_part<type, R, 0>(p, row, n, pairs, ahead, ints, start, scales, acc, ld);
        add_part<type, R, 1>(p, row, n, pairs, ahead, ints, start, scales, acc, ld);
    }
};

using avx2_decode = integer_decode<avx2_integers>;

} // namespace
} // namespace mixedkv
