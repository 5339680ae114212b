// Prefill on AVX-512 VNNI over rows of a scale and integers: keys and values are unpacked to 16 bits, so that one
// instruction multiplies two elements of 16 keys, or two keys of 16 elements.

#pragma once

#include "attention/integers/integer_prefill.h"
#include "vnni_decode.h"

namespace mixedkv {
namespace {

struct vnni_prefill {
    using L      = avx512;
    using decode = vnni;
    using ints16 = vnni::ints16;

    static ints16 dot(ints16 sum, __m512i x, __m512i y) { return vnni::dot_pairs(sum, x, y); }

    static constexpr int  most_rows = 12; // of 6 x 64 sums of scores, 12 x 32 of values
    static constexpr bool pads_rows = false;

    template <int R>
    static void keep_weights(const __m512i * packed, int r, int32_t (*ints)[32]) {
        vnni::keep_weights(packed, ints[r]);
    }

    // Of a row, behind the F32 queries: pairs of integers, then a scale for each block of 32
    static int32_t * integers_of(const attention_args & a, const item_memory & m, int row) {
        char * p = static_cast<char *>(m.q) + m.rows_padded * round_up(a.d_k, 128) * 4;
        return reinterpret_cast<int32_t *>(p) + int64_t(row) * (a.d_k / 32) * 17;
    }

    // Rows first .. first + 3, with the integers that decode has
    static void pack_rows(const attention_args & a, const item_memory & m, int first) {
        const int n_blocks = a.d_k / 32;
        for (int row = first; row < first + 4; row++) {
            const float * q     = static_cast<const float *>(m.q) + row * round_up(a.d_k, 16);
            int32_t *     pairs = integers_of(a, m, row);
            float *       scale = reinterpret_cast<float *>(pairs + 16 * n_blocks);
            for (int b = 0; b < n_blocks; b++, q += 32, pairs += 16) {
                __m512i n[2];
                scale[b] = vnni::round_block(q, n);
                for (int i = 0; i < 2; i++) {
                    _mm256_storeu_si256(reinterpret_cast<__m256i *>(pairs + 8 * i), _mm512_cvtepi32_epi16(n[i]));
                }
            }
        }
    }

    // Block b of 16 keys, the group-th, as pairs of elements: [block, pair, group] vectors of the keys
    template <row_type type>
    static void unpack_keys(const char * p, int64_t row, int, int b, int group, float * panel) {
        const __m512i first  = _mm512_set1_epi32(0x80018000); // bytes 0 and 1 of a dword as 16-bit integers
        const __m512i second = _mm512_set1_epi32(0x80038002);
        const __m512i places = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
        const __m512i at[2]  = { _mm512_or_si512(first, _mm512_and_si512(places, _mm512_set1_epi32(0x00ff00ff))),
                                 _mm512_or_si512(second, _mm512_and_si512(places, _mm512_set1_epi32(0x00ff00ff))) };
        const __m512i offset = _mm512_set1_epi16(integer_rows<type>::offset);
        __m512i *     to     = reinterpret_cast<__m512i *>(panel) + 64 * b + group;
        vnni::columns_of_block x;
        vnni::columns<type>(p, row, x);
        for (int i = 0; i < 8; i++) {
            for (int half = 0; half < 2; half++) {
                _mm512_store_si512(to + 4 * (2 * i + half),
                                   _mm512_sub_epi16(_mm512_shuffle_epi8(x[i], at[half]), offset));
            }
        }
    }

    template <int R>
    [[gnu::noinline]] static void score_rows(const int32_t * const * pairs, const float * const * q_scales,
                                             const __m512i * keys, int n_blocks, const float (*scales)[key_block],
                                             float * s) {
        for (int b = 0; b < n_blocks; b++, keys += 64) {
            ints16 sums[4 * R];
            unrolled<4 * R>([&](auto i) __attribute__((always_inline)) { sums[i] = ints16{}; });
            for (int i = 0; i < 16; i++) {
                const __m512i k0 = keys[4 * i], k1 = keys[4 * i + 1], k2 = keys[4 * i + 2], k3 = keys[4 * i + 3];
                unrolled<R>([&](auto r) __attribute__((always_inline)) {
                    const __m512i q = _mm512_set1_epi32(pairs[r][16 * b + i]);
                    sums[4 * r]     = dot(sums[4 * r], k0, q);
                    sums[4 * r + 1] = dot(sums[4 * r + 1], k1, q);
                    sums[4 * r + 2] = dot(sums[4 * r + 2], k2, q);
                    sums[4 * r + 3] = dot(sums[4 * r + 3], k3, q);
                });
            }
            unrolled<4 * R>([&](auto i) __attribute__((always_inline)) {
                float *      to = s + i / 4 * key_block + 16 * (i % 4);
                const __m512 by =
                    _mm512_mul_ps(_mm512_load_ps(scales[b] + 16 * (i % 4)), _mm512_set1_ps(q_scales[i / 4][b]));
                const __m512 y = b == 0 ? _mm512_setzero_ps() : _mm512_load_ps(to);
                _mm512_store_ps(to, _mm512_fmadd_ps(by, _mm512_cvtepi32_ps(__m512i(sums[i])), y));
            });
        }
    }

    // s[R][key_block] of the rows from `row` on
    template <row_type type, int R>
    static void score(const attention_args & a, const item_memory & m, int row, const float * panel,
                      const float (*scales)[key_block], float * s) {
        const int       n_blocks = a.d_k / 32;
        const int32_t * pairs[R];
        const float *   q_scales[R];
        for (int r = 0; r < R; r++) {
            pairs[r]    = integers_of(a, m, row + r);
            q_scales[r] = reinterpret_cast<const float *>(pairs[r] + 16 * n_blocks);
        }
        constexpr int at_once = R < 6 ? R : 6;
        static_assert(R % at_once == 0);
        for (int r = 0; r < R; r += at_once) {
            score_rows<at_once>(pairs + r, q_scales + r, reinterpret_cast<const __m512i *>(panel), n_blocks, scales,
                                s + r * key_block);
        }
    }

    // Block b of n keys as pairs of keys: [block, pair, half] vectors of 16 elements
    template <row_type type>
    static void unpack_values(const char * p, int64_t row, int n, int b, const key_scales &, float * panel) {
        __m512i * to = reinterpret_cast<__m512i *>(panel) + 64 * b;
        for (int i = 0; 2 * i < n; i++, to += 2) {
            __m512i first, second;
            vnni::pair<type>(p + 2 * i * row, 2 * i + 1 < n ? row : 0, first, second); // past the last, weight 0
            _mm512_store_si512(to, first);
            _mm512_store_si512(to + 1, second);
        }
    }

    // acc[R][32] += weights times block b of n keys
    template <row_type, int R>
    [[gnu::noinline]] static void add_values(const float * panel, int n, int b, const int32_t (*ints)[32],
                                             const float * scales, float * acc, int64_t ld) {
        const __m512i * values = reinterpret_cast<const __m512i *>(panel) + 64 * b;
        ints16          sums[2 * R];
        unrolled<2 * R>([&](auto i) __attribute__((always_inline)) { sums[i] = ints16{}; });
        for (int i = 0; 2 * i < n; i++, values += 2) {
            const __m512i first = values[0], second = values[1];
            const int     at = vnni::dword_of(i);
            unrolled<R>([&](auto r) __attribute__((always_inline)) {
                const __m512i weights = _mm512_set1_epi32(ints[r][at]);
                sums[2 * r]           = dot(sums[2 * r], first, weights);
                sums[2 * r + 1]       = dot(sums[2 * r + 1], second, weights);
            });
        }
        vnni::add_sums<R>(sums, scales, acc, ld);
    }
};

} // namespace
} // namespace mixedkv
