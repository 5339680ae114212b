// Prefill on ARM with FEAT_I8MM over rows of a scale and integers: the integers that decode multiplies
// (dot_products.h), eight of two rows by eight of two keys, or of two elements, in an instruction. That is twice as
// many products; sums are exact, and scales are applied in the same order, so a query has the same bits in both.

#pragma once

#include "dot_products.h"

namespace mixedkv {
namespace {

template <bool bytes>
struct matrix_products : key_columns<neon, matrix_products<bytes>, dot_products<bytes>> {
    using decode       = dot_products<bytes>;
    using L            = neon;
    using quad         = typename decode::quad;
    using value_scales = typename decode::value_scales;

    static constexpr int parts = decode::parts;

    using columns_of_block = int8x16_t[4][8]; // eight elements each of two keys

    // Values of 64 keys, one block of 32 elements: of eight keys two elements each
    struct values_of_block {
        uint8x16_t x[key_block / 8][16];
        uint8x16_t offset[key_block / 16];
    };

    // Two vectors of two rows each: of 2 x 2 numbers, rows from `a`
    static int32x4_t multiply(int32x4_t sum, uint8x16_t a, uint8x16_t b) {
        if constexpr (bytes) {
            return vreinterpretq_s32_u32(vmmlaq_u32(vreinterpretq_u32_s32(sum), a, b));
        } else {
            return vmmlaq_s32(sum, vreinterpretq_s8_u8(a), vreinterpretq_s8_u8(b));
        }
    }

    static uint32x4_t words(uint8x16_t x) { return vreinterpretq_u32_u8(x); }
    static uint64x2_t pairs(uint8x16_t x) { return vreinterpretq_u64_u8(x); }
    static uint64x2_t pairs(int32x4_t x) { return vreinterpretq_u64_s32(x); }
    static int32x4_t  ints(uint64x2_t x) { return vreinterpretq_s32_u64(x); }

    template <row_type type>
    static void columns(const char * p, int64_t row, columns_of_block & x) {
        typename decode::columns_of_block fours;
        decode::template columns<type>(p, row, fours);
        for (int i = 0; i < 4; i++) {
            for (int g = 0; g < 4; g++) {
                const int32x4_t a = vreinterpretq_s32_s8(fours[2 * i][g]),
                                b = vreinterpretq_s32_s8(fours[2 * i + 1][g]);
                x[i][2 * g]       = vreinterpretq_s8_s32(vzip1q_s32(a, b));
                x[i][2 * g + 1]   = vreinterpretq_s8_s32(vzip2q_s32(a, b));
            }
        }
    }

    // s[row][16 keys] += the scores of one block of elements
    template <row_type type, int R>
    static void score_rows(const columns_of_block & x, const float * scales, const quad & q, float * s) {
        static_assert(R == 4);
        int32x4_t sums[16]; // of rows 0 and 1 with two keys, then of rows 2 and 3
        int32x4_t start[2];
        for (int pair = 0; pair < 2; pair++) {
            start[pair] = vcombine_s32(vdup_n_s32(decode::template score_of_offset<type>(q, 2 * pair)),
                                       vdup_n_s32(decode::template score_of_offset<type>(q, 2 * pair + 1)));
        }
        unrolled<16>([&](auto i) __attribute__((always_inline)) { sums[i] = bytes ? start[i / 8] : vdupq_n_s32(0); });
        for (int part = 0; part < parts; part++) {
            if (part > 0) {
                unrolled<16>([&](auto i) __attribute__((always_inline)) {
                    sums[i] = vaddq_s32(vshlq_n_s32(sums[i], 8), start[i / 8]);
                });
            }
#pragma GCC unroll 1 // as in dot_products
            for (int i = 0; i < 4; i++) {
                const int32x4_t a = vld1q_s32(q.ints[part][2 * i]), b = vld1q_s32(q.ints[part][2 * i + 1]);
                const int8x16_t first  = vreinterpretq_s8_s32(vzip1q_s32(a, b));
                const int8x16_t second = vreinterpretq_s8_s32(vzip2q_s32(a, b));
                unrolled<8>([&](auto k) __attribute__((always_inline)) {
                    const int8x16_t keys = x[i][k];
                    sums[k]              = vmmlaq_s32(sums[k], first, keys);
                    sums[8 + k]          = vmmlaq_s32(sums[8 + k], second, keys);
                });
            }
        }
        unrolled<8>([&](auto i) __attribute__((always_inline)) {
            constexpr int    row = i / 4 * 2, key = i % 4 * 4;
            const uint64x2_t a = pairs(sums[2 * i]), b = pairs(sums[2 * i + 1]);
            const auto       d = L::load(scales + key);
            decode::add_scores(ints(vzip1q_u64(a, b)), d, q, row, s + row * key_block + key);
            decode::add_scores(ints(vzip2q_u64(a, b)), d, q, row + 1, s + (row + 1) * key_block + key);
        });
    }

    template <int R>
    static void keep_weights(const int16x8_t * packed, int r, int32_t (*ints)[32]) {
        decode::keep_weights(packed, ints[r]);
    }

    // Block b of n keys
    template <row_type type>
    static void unpack_values(const char * p, int64_t row, int n, int b, const value_scales & of, float * panel) {
        constexpr int     per      = block_elements(type) / 32;
        const uint8_t *   negative = decode::negative_of(of, b % 4 / per * per);
        values_of_block & v        = reinterpret_cast<values_of_block *>(panel)[b];
        for (int i = 0; i < key_block / 8; i++) {
            uint8x16_t fours[2][8];
            for (int half = 0; half < 2; half++) {
                const int key = 8 * i + 4 * half;
                if (key < n) {
                    decode::template keys_of_four<type>(p + key * row, row, n - key, negative + key, fours[half]);
                } else {
                    std::memset(fours[half], 0, sizeof(fours[half]));
                }
            }
            for (int e = 0; e < 8; e++) {
                const uint32x4_t a = words(fours[0][e]), b = words(fours[1][e]);
                v.x[i][2 * e]     = vreinterpretq_u8_u32(vzip1q_u32(a, b));
                v.x[i][2 * e + 1] = vreinterpretq_u8_u32(vzip2q_u32(a, b));
            }
        }
        decode::template take_offsets<type>(negative, v.offset);
    }

    // acc[R][32] += weights times block b of n keys
    template <row_type, int R, class Ints>
    static void add_values(const float * panel, int n, int b, const Ints * weights, const float * scales, float * acc,
                           int64_t ld) {
        add_products<R>(reinterpret_cast<const values_of_block *>(panel)[b], n, weights, scales, acc, ld);
    }

    // Rows in pairs; the last one of an odd number stands for two.
    template <int R, class Ints>
    [[gnu::noinline]] static void add_products(const values_of_block & v, int n, const Ints * weights,
                                               const float * scales, float * acc, int64_t ld) {
        constexpr int n_pairs = (R + 1) / 2;
        int32_t       offsets[R];
        for (int r = 0; r < R; r++) {
            offsets[r] = decode::sum_offsets(weights[r], v.offset);
        }
        for (int half = 0; half < 2; half++, acc += 16) {
            int32x4_t sums[8 * n_pairs];
            unrolled<8 * n_pairs>([&](auto i) __attribute__((always_inline)) { sums[i] = vdupq_n_s32(0); });
            for (int part = 0; part < parts; part++) {
                if (part > 0) {
                    unrolled<8 * n_pairs>([&](auto i)
                                              __attribute__((always_inline)) { sums[i] = vshlq_n_s32(sums[i], 8); });
                }
                for (int j = 0; 16 * j < n; j++) {
                    uint8x16_t rows[2][n_pairs]; // of keys 16 j .. 16 j + 7, and of the next 8
                    unrolled<n_pairs>([&](auto r) __attribute__((always_inline)) {
                        const uint64x2_t a = pairs(decode::weights_at(weights[2 * r], part, j));
                        const uint64x2_t b =
                            pairs(decode::weights_at(weights[2 * r + 1 < R ? 2 * r + 1 : 2 * r], part, j));
                        rows[0][r] = vreinterpretq_u8_u64(vzip1q_u64(a, b));
                        rows[1][r] = vreinterpretq_u8_u64(vzip2q_u64(a, b));
                    });
                    unrolled<2>([&](auto eight) __attribute__((always_inline)) {
                        const uint8x16_t * x = v.x[2 * j + eight] + 8 * half;
                        unrolled<8>([&](auto e) __attribute__((always_inline)) {
                            const uint8x16_t y = x[e];
                            unrolled<n_pairs>([&](auto r) __attribute__((always_inline)) {
                                sums[8 * r + e] = multiply(sums[8 * r + e], rows[eight][r], y);
                            });
                        });
                    });
                }
            }
            unrolled<4 * n_pairs>([&](auto i) __attribute__((always_inline)) {
                constexpr int    row = i / 4 * 2, at = i % 4 * 4;
                const uint64x2_t a = pairs(sums[2 * i]), b = pairs(sums[2 * i + 1]);
                decode::add_values_to(ints(vzip1q_u64(a, b)), offsets[row], scales[row], acc + row * ld + at);
                if constexpr (row + 1 < R) {
                    decode::add_values_to(ints(vzip2q_u64(a, b)), offsets[row + 1], scales[row + 1],
                                          acc + (row + 1) * ld + at);
                }
            });
        }
    }
};

} // namespace
} // namespace mixedkv
