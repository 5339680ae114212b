// Levels of lm3 by shuffles of 16 bytes, half of 64 elements at a time, from the 16 bytes that have their bits
// (integers_at): those of 32 and more begin 4 bytes later.

#pragma once

#include "attention/simd/lm3_bytes.h"
#include "integers.h"

namespace mixedkv {
namespace {

struct lm3_avx2 {
    static __m256i look_up(const int8_t * table, __m256i indices) {
        const __m128i levels = load_16(reinterpret_cast<const char *>(table));
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(levels), indices);
    }

    static __m256i low(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
    static __m256i high(__m256i x) { return low(_mm256_srli_epi16(x, 4)); }

    // By the lower 5 bits of each byte; a shuffle makes bytes of an index with bit 7 zero.
    static __m256i five(__m256i x) {
        const __m256i n     = _mm256_and_si256(x, _mm256_set1_epi8(31));
        const __m256i lower = _mm256_add_epi8(n, _mm256_set1_epi8(0x70));
        const __m256i upper = _mm256_sub_epi8(n, _mm256_set1_epi8(16));
        return _mm256_or_si256(look_up(lm3_values::of_5, lower), look_up(lm3_values::of_5 + 16, upper));
    }

    // Elements 32 half + 4 i .. 4 i + 3 of keys whose bytes 4 j .. 4 j + 3 are in t[j]
    static __m256i column(const __m256i (&t)[4], int half, int i) {
        using tables = lm3_nibbles;
        if (half) {
            return i < 4   ? look_up(tables::second, low(_mm256_srli_epi16(t[3], 2 * i)))
                   : i < 6 ? look_up(tables::first, high(t[i - 3]))
                           : _mm256_setzero_si256();
        }
        return i < 2   ? five(t[i])
               : i < 4 ? look_up(lm3_values::of_4, low(t[i]))
               : i < 6 ? look_up(tables::third, high(t[i - 4]))
                       : look_up(tables::fourth, high(t[i - 4]));
    }

    // The same 8 bytes of two keys, those of a place side by side
    static __m256i beside(const char * p, int64_t row) {
        const auto at = [](const char * q) { return _mm_loadl_epi64(reinterpret_cast<const __m128i *>(q)); };
        return _mm256_castsi128_si256(_mm_unpacklo_epi8(at(p), at(p + row)));
    }

    static __m256i widen(__m256i x) { return _mm256_cvtepi8_epi16(_mm256_castsi256_si128(x)); }

    // Two times 8 of 64 elements of two keys side by side: those from place(quarter, 0) and place(quarter, 1) on
    template <int quarter>
    static void pair(const char * p, int64_t row, __m256i & first, __m256i & second) {
        using tables = lm3_nibbles;
        if constexpr (quarter == 0) {
            const __m256i x = beside(p, row);
            first           = widen(five(x));
            second          = widen(look_up(tables::third, high(x)));
        } else if constexpr (quarter == 1) {
            const __m256i x = beside(p + 8, row);
            first           = widen(look_up(lm3_values::of_4, low(x)));
            second          = widen(look_up(tables::fourth, high(x)));
        } else if constexpr (quarter == 2) {
            const auto    at = [](const char * q) { return _mm_loadu_si32(q); };
            const __m256i x  = _mm256_broadcastq_epi64(_mm_unpacklo_epi8(at(p + 12), at(p + row + 12)));
            const __m256i y  = look_up(tables::second, low(_mm256_srlv_epi64(x, _mm256_setr_epi64x(0, 2, 4, 6))));
            first            = widen(y);
            second           = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(y, 1));
        } else {
            first  = widen(look_up(tables::first, high(beside(p + 4, row))));
            second = _mm256_setzero_si256();
        }
    }
    // Within the half
    static constexpr int place(int quarter, int i) {
        constexpr int at[4][2] = { { 0, 16 }, { 8, 24 }, { 0, 8 }, { 16, 24 } };
        return at[quarter][i];
    }
};

} // namespace
} // namespace mixedkv
