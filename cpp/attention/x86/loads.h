// Loads that x86 bodies share, and the scales of rows of integers.

#pragma once

#include "attention/integers/integer_types.h"

#include <immintrin.h>

namespace mixedkv {
namespace {

inline __m128i load_16(const char * p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
}

inline __m256i load_32(const char * p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
}

#ifdef __AVX512F__
// 16 bytes of each of 4 rows, one to a lane
inline __m512i load_lanes(const char * p, int64_t row) {
    __m512i x = _mm512_castsi128_si512(load_16(p));
    x         = _mm512_mask_broadcast_i32x4(x, 0x00f0, load_16(p + row));
    x         = _mm512_mask_broadcast_i32x4(x, 0x0f00, load_16(p + 2 * row));
    return _mm512_mask_broadcast_i32x4(x, 0xf000, load_16(p + 3 * row));
}

// Bytes of a table in every 128-bit lane, and what nibbles stand for there
inline __m512i in_lanes(const int8_t * table, int plus = 0) {
    const __m128i x = _mm_add_epi8(load_16(reinterpret_cast<const char *>(table)), _mm_set1_epi8(char(plus)));
    return _mm512_broadcast_i32x4(x);
}
#endif

// The scales of up to 4 blocks of 32 elements as F16 in the lower 64 bits; absent blocks repeat the last one
template <row_type type>
static __m128i four_scales(const char * p, int n_blocks) {
    constexpr int b1 = scale_at(type, 1), b2 = scale_at(type, 2), b3 = scale_at(type, 3);
#ifdef __AVX512VBMI__
    constexpr bool is_tc3 = type == row_type::tc3;
    if ((is_tc3 || integer_rows<type>::nibbles) && n_blocks == 4) { // within 52 bytes, or the first 64 of 68 or 72
        const __m512i at =
            _mm512_castsi128_si512(_mm_setr_epi8(0, 1, b1, b1 + 1, b2, b2 + 1, b3, b3 + 1, 0, 0, 0, 0, 0, 0, 0, 0));
        const __mmask64 there = is_tc3 ? (uint64_t(1) << 2 * TC3_BYTES) - 1 : ~uint64_t(0);
        return _mm512_castsi512_si128(_mm512_permutexvar_epi8(at, _mm512_maskz_loadu_epi8(there, p)));
    }
#endif
    const auto at = [&](int i) {
        const int last = scale_at(type, n_blocks - 1);
        uint16_t  h;
        std::memcpy(&h, p + (i < last ? i : last), 2);
        return uint64_t(h);
    };
    return _mm_cvtsi64_si128(int64_t(at(0) | at(b1) << 16 | at(b2) << 32 | at(b3) << 48));
}

// half[block][key] of 4 keys from `key` on: the scales of up to 4 blocks; absent ones repeat the last one
template <row_type type>
void transpose_scales(const char * p, int64_t row, int n_blocks, uint16_t (*half)[key_block], int key) {
    __m128i four[4];
    for (int i = 0; i < 4; i++) {
        four[i] = four_scales<type>(p + i * row, n_blocks);
    }
    const __m128i ab = _mm_unpacklo_epi16(four[0], four[1]);
    const __m128i cd = _mm_unpacklo_epi16(four[2], four[3]);
    const __m128i lo = _mm_unpacklo_epi32(ab, cd); // 4 keys of block 0, of block 1
    const __m128i hi = _mm_unpackhi_epi32(ab, cd);
    _mm_storel_epi64(reinterpret_cast<__m128i *>(half[0] + key), lo);
    _mm_storeh_pd(reinterpret_cast<double *>(half[1] + key), _mm_castsi128_pd(lo));
    _mm_storel_epi64(reinterpret_cast<__m128i *>(half[2] + key), hi);
    _mm_storeh_pd(reinterpret_cast<double *>(half[3] + key), _mm_castsi128_pd(hi));
}

} // namespace
} // namespace mixedkv
