// Prefill on AVX2 over rows of a scale and integers: keys are unpacked as decode has them, values to 16 bits.

#pragma once

#include "attention/integers/integer_prefill.h"
#include "attention/integers/key_columns.h"
#include "avx2_decode.h"

namespace mixedkv {
namespace {

struct avx2_prefill : key_columns<avx2, avx2_integers> {
    using decode = avx2_integers;

    template <int R>
    static void keep_weights(const __m256i * packed, int r, int32_t (*ints)[32]) {
        avx2_integers::keep_weights(packed, ints[r]);
    }

    // Block b of n keys as pairs of keys: [block, pair, part] two vectors of 8 elements
    template <row_type type>
    static void unpack_values(const char * p, int64_t row, int n, int b, const key_scales &, float * panel) {
        __m256i * to = reinterpret_cast<__m256i *>(panel) + 128 * b;
        for (int i = 0; 2 * i < n; i++) {
            for (int part = 0; part < 2; part++, to += 2) {
                avx2_integers::pair<type>(p + 2 * i * row, 2 * i + 1 < n ? row : 0, part, to[0], to[1]);
            }
        }
    }

    // acc[R][32] += weights times block b of n keys
    template <row_type type, int R>
    static void add_values(const float * panel, int n, int b, const int32_t (*ints)[32], const float * scales,
                           float * acc, int64_t ld) {
        int32_t start[R];
        for (int r = 0; r < R; r++) {
            start[r] = avx2_integers::unsigned_nibbles<type>() ? -8 * avx2_integers::sum_pairs(ints[r], 32) : 0;
        }
        for (int part = 0; part < 2; part++) {
            const __m256i *      values = reinterpret_cast<const __m256i *>(panel) + 128 * b + 2 * part;
            avx2_integers::ints8 sums[R][2];
            for (int r = 0; r < R; r++) {
                sums[r][0] = sums[r][1] = avx2_integers::ints8(_mm256_set1_epi32(start[r]));
            }
            for (int i = 0; 2 * i < n; i++, values += 4) {
                const __m256i first = values[0], second = values[1];
                for (int r = 0; r < R; r++) {
                    const __m256i weights = _mm256_set1_epi32(ints[r][i]);
                    sums[r][0]            = avx2_integers::dot(sums[r][0], first, weights);
                    sums[r][1]            = avx2_integers::dot(sums[r][1], second, weights);
                }
            }
            for (int r = 0; r < R; r++) {
                for (int i = 0; i < 2; i++) {
                    float * y = acc + r * ld + avx2_integers::place<type>(part, i);
                    L::store(y, L::fma(L::set(scales[r]), _mm256_cvtepi32_ps(__m256i(sums[r][i])), L::load(y)));
                }
            }
        }
    }
};

} // namespace
} // namespace mixedkv
