// Decode and prefill on AVX-512 VNNI with Q and the weights in 8 bits (attention_args::rounding), where vnni_decode.h
// and vnni_prefill.h have 16: half the products, four elements or four keys at a time.
//
// Scores: columns of K as vnni_decode.h has them, times signed bytes of Q. Output: a dword has an element of four keys,
// signed, times the weights of these keys, unsigned; where a scale of V is negative, its integers are.

#pragma once

#include "vnni_prefill.h"

namespace mixedkv {
namespace {

struct vnni_bytes {
    // Scales of a block of keys by up to 4 blocks of elements, without their signs
    struct value_scales {
        alignas(64) float size[4][key_block];
        uint64_t negative[4]; // keys, a bit each

        value_scales() = default;
        explicit value_scales(const key_scales & scales) {
            for (int b = 0; b < 4; b++) {
                const uint16_t * half = scales.half[b];
                for (int i = 0; i < key_block; i += 16) {
                    _mm512_store_ps(size[b] + i, avx512::abs(avx512::load_half(half + i)));
                }
                negative[b] = _mm512_movepi16_mask(_mm512_loadu_si512(half)) |
                              uint64_t(_mm512_movepi16_mask(_mm512_loadu_si512(half + 32))) << 32;
            }
        }
    };

    using L      = avx512;
    using decode = vnni_bytes;
    using ints16 = vnni::ints16;

    static constexpr bool in_bytes      = true;
    static constexpr int  keys_together = 4;
    static constexpr int  most_rows     = 12;
    static constexpr bool pads_rows     = false;

    // Four rows of Q, one block of 32 elements
    struct quad {
        int32_t ints[8][4]; // 4 elements, row
        int32_t sum[4];     // of the integers
        float   scale[4];
    };

    using columns_of_block = vnni::columns_of_block;

    static void pack_block(const float * q, int row, quad & out) {
        __m512i             n[2];
        alignas(16) int32_t fours[8];
        out.scale[row] = vnni::round_block(q, n, 127.0f);
        out.sum[row]   = _mm512_reduce_add_epi32(_mm512_add_epi32(n[0], n[1]));
        for (int i = 0; i < 2; i++) {
            _mm_store_si128(reinterpret_cast<__m128i *>(fours + 4 * i), _mm512_cvtepi32_epi8(n[i]));
        }
        for (int i = 0; i < 8; i++) {
            out.ints[i][row] = fours[i];
        }
    }

    template <row_type type>
    static void columns(const char * p, int64_t row, columns_of_block & x) {
        vnni::columns<type>(p, row, x);
    }

    // s[row][16 keys] += the scores of one block of elements
    template <row_type type>
    static void score_block(const columns_of_block & x, const uint16_t * scales_f16, const quad & q, int rows,
                            float * s) {
        const __m512 scales = avx512::load_half(scales_f16);
        ints16       sums[4];
        unrolled<4>([&](auto r) __attribute__((always_inline)) {
            sums[r] = ints16(_mm512_set1_epi32(-integer_rows<type>::offset * q.sum[r]));
        });
        for (int i = 0; i < 8; i++) {
            unrolled<4>([&](auto r) __attribute__((always_inline)) {
                sums[r] = vnni::dot_fours(sums[r], x[i], _mm512_set1_epi32(q.ints[i][r]));
            });
        }
        for (int r = 0; r < rows; r++, s += key_block) {
            const __m512 by = _mm512_mul_ps(scales, _mm512_set1_ps(q.scale[r]));
            _mm512_store_ps(s, _mm512_fmadd_ps(by, _mm512_cvtepi32_ps(__m512i(sums[r])), _mm512_load_ps(s)));
        }
    }

    // Where round_weights leaves the weights of keys 4 i .. 4 i + 3
    static constexpr int dword_of(int i) { return i % 4 * 4 + i / 4; }

    // Weights times the scales of every per-th block of elements, in units of a 255th of the largest product. A weight
    // of zero has no say: the scale of a key that is not seen may be anything. Not inlined, so
    // that decode and prefill run the same code.
    template <int per>
    [[gnu::noinline]] static void round_weights(const float * s, const value_scales & of, int32_t * const (&out)[4],
                                                float (&units)[4]) {
        __m512    p[4], y[4][4], most[4];
        __mmask16 used[4];
        for (int i = 0; i < 4; i++) {
            p[i]    = _mm512_loadu_ps(s + 16 * i);
            used[i] = _mm512_cmp_ps_mask(p[i], _mm512_setzero_ps(), _CMP_NEQ_UQ);
        }
        for (int b = 0; b < 4; b++) {
            if (b % per) {
                most[b] = most[b - 1];
                continue;
            }
            for (int i = 0; i < 4; i++) {
                y[b][i] = _mm512_maskz_mul_ps(used[i], p[i], _mm512_load_ps(of.size[b] + 16 * i));
            }
            most[b] = _mm512_max_ps(_mm512_max_ps(y[b][0], y[b][1]), _mm512_max_ps(y[b][2], y[b][3]));
        }
        alignas(16) float top[4], inverse[4];
        avx512::highest_of_four(most, top);
        const __m128   tops = _mm_load_ps(top);
        const __mmask8 live = _mm_cmp_ps_mask(tops, _mm_set1_ps(0x1p-100f), _CMP_GT_OQ);
        _mm_storeu_ps(units, _mm_mul_ps(tops, _mm_set1_ps(1.0f / 255.0f)));
        _mm_store_ps(inverse, _mm_maskz_div_ps(live, _mm_set1_ps(255.0f), tops));
        for (int b = 0; b < 4; b += per) {
            const __m512 by = _mm512_set1_ps(inverse[b]);
            __m512i      n[4];
            for (int i = 0; i < 4; i++) {
                n[i] = _mm512_cvtps_epi32(_mm512_mul_ps(y[b][i], by));
            }
            _mm512_store_si512(out[b],
                               _mm512_packus_epi16(_mm512_packs_epi32(n[0], n[1]), _mm512_packs_epi32(n[2], n[3])));
        }
    }

    // Elements 0..15 and 16..31 of a block of n <= 4 keys, each as a dword of four keys
    template <row_type type>
    static void four(const char * p, int64_t row, int n, uint64_t negative, __m512i & first, __m512i & second) {
        using rows            = integer_rows<type>;
        const __m512i   zero  = _mm512_setzero_si512();
        const __m512i   order = _mm512_loadu_si512(byte_order);
        const __mmask64 sign  = (negative & 15) * 0x1111111111111111;
        const auto      load  = [&](int at) {
            if (n >= 4) {
                return load_lanes(p + at, row);
            }
            __m512i x = _mm512_castsi128_si512(load_16(p + at)); // past the last key, weight 0
            x         = _mm512_mask_broadcast_i32x4(x, 0x00f0, load_16(p + at + (n > 1 ? row : 0)));
            return _mm512_mask_broadcast_i32x4(x, 0x0f00, load_16(p + at + (n > 2 ? 2 * row : 0)));
        };
        if constexpr (rows::nibbles) {
            const __m512i x      = _mm512_permutexvar_epi8(order, load(0));
            const __m512i nibble = _mm512_set1_epi8(15);
            const __m512i values = in_lanes(rows::at);
            first                = _mm512_shuffle_epi8(values, _mm512_and_si512(x, nibble));
            second               = _mm512_shuffle_epi8(values, _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble));
        } else {
            first  = _mm512_permutexvar_epi8(order, load(0));
            second = _mm512_permutexvar_epi8(order, load(16));
        }
        first  = _mm512_mask_subs_epi8(first, sign, zero, first);
        second = _mm512_mask_subs_epi8(second, sign, zero, second);
    }

    // acc[R][32] += weights times one block of elements of fours of n keys; ints[r]: fours of weights
    template <row_type type, int R>
    static void add_block(const char * p, int64_t row, int n, const key_groups<4> & fours, uint64_t negative,
                          prefetcher & ahead, const int32_t (*ints)[16], const float * scales, float * acc,
                          int64_t ld) {
        ints16 sums[2 * R];
        unrolled<2 * R>([&](auto i) __attribute__((always_inline)) { sums[i] = ints16{}; });
        fours.for_each([&](int i) __attribute__((always_inline)) {
            ahead.step(1);
            __m512i first, second;
            four<type>(p + 4 * i * row, row, n - 4 * i, negative >> 4 * i, first, second);
            unrolled<R>([&](auto r) __attribute__((always_inline)) {
                const __m512i weights = _mm512_set1_epi32(ints[r][dword_of(i)]);
                sums[2 * r]           = vnni::dot_fours(sums[2 * r], weights, first);
                sums[2 * r + 1]       = vnni::dot_fours(sums[2 * r + 1], weights, second);
            });
        });
        vnni::add_sums<R>(sums, scales, acc, ld);
    }

    // Prefill: of a row, behind the F32 queries, a block of 32 elements
    struct row_block {
        int32_t ints[8];
        int32_t sum;
        float   scale;
    };

    static row_block * blocks_of(const attention_args & a, const item_memory & m, int row) {
        char * p = static_cast<char *>(m.q) + m.rows_padded * round_up(a.d_k, 128) * 4;
        return reinterpret_cast<row_block *>(p) + int64_t(row) * (a.d_k / 32);
    }

    // Rows first .. first + 3, with the integers that decode has
    static void pack_rows(const attention_args & a, const item_memory & m, int first) {
        for (int row = first; row < first + 4; row++) {
            const float * q  = static_cast<const float *>(m.q) + row * round_up(a.d_k, 16);
            row_block *   to = blocks_of(a, m, row);
            for (int b = 0; 32 * b < a.d_k; b++) {
                quad one;
                pack_block(q + 32 * b, 0, one);
                for (int i = 0; i < 8; i++) {
                    to[b].ints[i] = one.ints[i][0];
                }
                to[b].sum   = one.sum[0];
                to[b].scale = one.scale[0];
            }
        }
    }

    // Block b of 16 keys, the group-th: [block, 4 elements, group] vectors of the keys
    template <row_type type>
    static void unpack_keys(const char * p, int64_t row, int, int b, int group, float * panel) {
        __m512i *        to = reinterpret_cast<__m512i *>(panel) + 32 * b + group;
        columns_of_block x;
        columns<type>(p, row, x);
        for (int i = 0; i < 8; i++) {
            _mm512_store_si512(to + 4 * i, x[i]);
        }
    }

    template <row_type type, int R>
    [[gnu::noinline]] static void score_rows(const row_block * const * rows, const __m512i * keys, int n_blocks,
                                             const float (*scales)[key_block], float * s) {
        for (int b = 0; b < n_blocks; b++, keys += 32) {
            ints16 sums[4 * R];
            unrolled<4 * R>([&](auto i) __attribute__((always_inline)) {
                sums[i] = ints16(_mm512_set1_epi32(-integer_rows<type>::offset * rows[i / 4][b].sum));
            });
            for (int i = 0; i < 8; i++) {
                const __m512i k0 = keys[4 * i], k1 = keys[4 * i + 1], k2 = keys[4 * i + 2], k3 = keys[4 * i + 3];
                unrolled<R>([&](auto r) __attribute__((always_inline)) {
                    const __m512i q = _mm512_set1_epi32(rows[r][b].ints[i]);
                    sums[4 * r]     = vnni::dot_fours(sums[4 * r], k0, q);
                    sums[4 * r + 1] = vnni::dot_fours(sums[4 * r + 1], k1, q);
                    sums[4 * r + 2] = vnni::dot_fours(sums[4 * r + 2], k2, q);
                    sums[4 * r + 3] = vnni::dot_fours(sums[4 * r + 3], k3, q);
                });
            }
            unrolled<4 * R>([&](auto i) __attribute__((always_inline)) {
                float *      to = s + i / 4 * key_block + 16 * (i % 4);
                const __m512 by =
                    _mm512_mul_ps(_mm512_load_ps(scales[b] + 16 * (i % 4)), _mm512_set1_ps(rows[i / 4][b].scale));
                const __m512 y = b == 0 ? _mm512_setzero_ps() : _mm512_load_ps(to);
                _mm512_store_ps(to, _mm512_fmadd_ps(by, _mm512_cvtepi32_ps(__m512i(sums[i])), y));
            });
        }
    }

    // s[R][key_block] of the rows from `row` on
    template <row_type type, int R>
    static void score(const attention_args & a, const item_memory & m, int row, const float * panel,
                      const float (*scales)[key_block], float * s) {
        const row_block * rows[R];
        for (int r = 0; r < R; r++) {
            rows[r] = blocks_of(a, m, row + r);
        }
        constexpr int step = R < 6 ? R : 6;
        static_assert(R % step == 0);
        for (int r = 0; r < R; r += step) {
            score_rows<type, step>(rows + r, reinterpret_cast<const __m512i *>(panel), a.d_k / 32, scales,
                                   s + r * key_block);
        }
    }

    // Block b of n keys: [block, four keys, half] vectors of 16 elements
    template <row_type type>
    static void unpack_values(const char * p, int64_t row, int n, int b, const value_scales & of, float * panel) {
        constexpr int  per      = block_elements(type) / 32;
        const uint64_t negative = of.negative[b % 4 / per * per];
        __m512i *      to       = reinterpret_cast<__m512i *>(panel) + 32 * b;
        for (int i = 0; i < n; i += 4, to += 2) {
            __m512i first, second;
            four<type>(p + i * row, row, n - i, negative >> i, first, second);
            _mm512_store_si512(to, first);
            _mm512_store_si512(to + 1, second);
        }
    }

    // acc[R][32] += weights times block b of n keys
    template <row_type, int R>
    [[gnu::noinline]] static void add_values(const float * panel, int n, int b, const int32_t (*ints)[16],
                                             const float * scales, float * acc, int64_t ld) {
        const __m512i * values = reinterpret_cast<const __m512i *>(panel) + 32 * b;
        ints16          sums[2 * R];
        unrolled<2 * R>([&](auto i) __attribute__((always_inline)) { sums[i] = ints16{}; });
        for (int i = 0; 4 * i < n; i++, values += 2) {
            const __m512i first = values[0], second = values[1];
            const int     at = dword_of(i);
            unrolled<R>([&](auto r) __attribute__((always_inline)) {
                const __m512i weights = _mm512_set1_epi32(ints[r][at]);
                sums[2 * r]           = vnni::dot_fours(sums[2 * r], weights, first);
                sums[2 * r + 1]       = vnni::dot_fours(sums[2 * r + 1], weights, second);
            });
        }
        vnni::add_sums<R>(sums, scales, acc, ld);
    }

  private:
    // Byte k of 16 bytes of key k % 4: element by element, four keys together
    static constexpr uint8_t byte_order[64] = { 0,  16, 32, 48, 1,  17, 33, 49, 2,  18, 34, 50, 3,  19, 35, 51,
                                                4,  20, 36, 52, 5,  21, 37, 53, 6,  22, 38, 54, 7,  23, 39, 55,
                                                8,  24, 40, 56, 9,  25, 41, 57, 10, 26, 42, 58, 11, 27, 43, 59,
                                                12, 28, 44, 60, 13, 29, 45, 61, 14, 30, 46, 62, 15, 31, 47, 63 };
};

} // namespace
} // namespace mixedkv
