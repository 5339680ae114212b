// The integers of tc3 as nibbles and of q5_0 as bytes, which x86 bodies make of a block of keys before they multiply.

#pragma once

#include "attention/row_types.h"

#include <immintrin.h>

namespace mixedkv {
namespace {

// As unpack_tc3 does it, of a whole block: 26 bytes to 32
inline void unpack_block_tc3(const char * block, char * out) {
    const auto load = [](const char * p) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p)); };

    // A half in a lane: fields, its path and the other one's; both paths and the fields
    const __m256i x = _mm256_inserti128_si256(_mm256_castsi128_si256(load(block + 2)), load(block + 10), 1);
    const __m256i fields =
        _mm256_shuffle_epi8(x, _mm256_setr_epi8(0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7, 8, 9, 10, 11, 8, 9, 10,
                                                11, 12, 13, 14, 15, 12, 13, 14, 15));
    const __m256i path = _mm256_shuffle_epi8(x, _mm256_setr_epi8(8, 9, 10, 11, 8, 9, 10, 11, 8, 9, 10, 11, 8, 9, 10, 11,
                                                                 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7));
    const __m256i q    = _mm256_sllv_epi32(path, _mm256_setr_epi32(1, 1, 0, 0, 1, 1, 0, 0));
    const __m256i odd  = _mm256_set1_epi32(int32_t(0xaaaaaaaa));
    const __m256i sets = _mm256_xor_si256(q, _mm256_and_si256(_mm256_slli_epi32(q, 2), odd));
    const __m256i low  = _mm256_srlv_epi32(sets, _mm256_setr_epi32(0, 2, 0, 2, 0, 2, 0, 2));
    const __m256i high = _mm256_sllv_epi32(fields, _mm256_setr_epi32(2, 0, 2, 0, 2, 0, 2, 0));
    const __m256i set  = _mm256_set1_epi32(0x33333333);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(out),
                        _mm256_or_si256(_mm256_and_si256(set, low), _mm256_andnot_si256(set, high)));
}

#ifdef __AVX512VBMI__
// The same of two blocks: 52 bytes to 64
inline void unpack_two_blocks_tc3(const char * blocks, char * out) {
    alignas(64) static constexpr uint8_t field_bytes[64] = { 2,  3,  4,  5,  2,  3,  4,  5,  6,  7,  8,  9,  6,
                                                             7,  8,  9,  18, 19, 20, 21, 18, 19, 20, 21, 22, 23,
                                                             24, 25, 22, 23, 24, 25, 28, 29, 30, 31, 28, 29, 30,
                                                             31, 32, 33, 34, 35, 32, 33, 34, 35, 44, 45, 46, 47,
                                                             44, 45, 46, 47, 48, 49, 50, 51, 48, 49, 50, 51 };
    alignas(64) static constexpr uint8_t path_bytes[64]  = { 10, 11, 12, 13, 10, 11, 12, 13, 10, 11, 12, 13, 10,
                                                             11, 12, 13, 14, 15, 16, 17, 14, 15, 16, 17, 14, 15,
                                                             16, 17, 14, 15, 16, 17, 36, 37, 38, 39, 36, 37, 38,
                                                             39, 36, 37, 38, 39, 36, 37, 38, 39, 40, 41, 42, 43,
                                                             40, 41, 42, 43, 40, 41, 42, 43, 40, 41, 42, 43 };

    const __m512i x        = _mm512_maskz_loadu_epi8((uint64_t(1) << 2 * TC3_BYTES) - 1, blocks);
    const __m512i fields   = _mm512_permutexvar_epi8(_mm512_load_si512(field_bytes), x);
    const __m512i path     = _mm512_permutexvar_epi8(_mm512_load_si512(path_bytes), x);
    const __m512i q        = _mm512_sllv_epi32(path, _mm512_set4_epi32(0, 0, 1, 1));
    const __m512i odd      = _mm512_set1_epi32(int32_t(0xaaaaaaaa));
    const __m512i sets     = _mm512_ternarylogic_epi32(q, _mm512_slli_epi32(q, 2), odd, 0x78); // q ^ (second & odd)
    const __m512i low      = _mm512_srlv_epi32(sets, _mm512_set4_epi32(2, 0, 2, 0));
    const __m512i high     = _mm512_sllv_epi32(fields, _mm512_set4_epi32(0, 2, 0, 2));
    const __m512i set      = _mm512_set1_epi32(0x33333333);
    const __m512i unpacked = _mm512_ternarylogic_epi32(set, low, high, 0xca); // where `set` is 1 low, elsewhere high
    _mm512_storeu_si512(out, unpacked);
}
#endif

// n times 32 elements
inline void unpack_row(type_constant<unpacked_tc3>, const char * row, int n, char * out) {
    int b = 0;
#ifdef __AVX512VBMI__
    for (; b + 3 < n; b += 4, row += 2 * TC3_BYTES) {
        unpack_two_blocks_tc3(row, out + 16 * b);
    }
#endif
    for (; b < n; b += 2, row += TC3_BYTES) {
        unpack_block_tc3(row, out + 16 * b);
    }
}

// Nibbles whose fifth bits come before them; less 16 is what lacks one
inline __m256i unpack_block_q5_0(const char * block) {
    const __m256i byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit  = _mm256_set1_epi64x(int64_t(0x8040201008040201));
    int32_t       high;
    std::memcpy(&high, block + 2, 4);
    const __m256i has  = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(high), byte), bit);
    const __m256i less = _mm256_andnot_si256(_mm256_cmpeq_epi8(has, bit), _mm256_set1_epi8(-16));
    const __m128i x    = _mm_loadu_si128(reinterpret_cast<const __m128i *>(block + 6));
    const __m256i both = _mm256_set_m128i(_mm_srli_epi16(x, 4), x);
    return _mm256_or_si256(_mm256_and_si256(both, _mm256_set1_epi8(15)), less);
}

inline void unpack_row(type_constant<unpacked_q5_0>, const char * row, int n, char * out) {
    for (int b = 0; b < n; b++) {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out) + b,
                            unpack_block_q5_0(row + b * block_bytes(row_type::q5_0)));
    }
}

} // namespace
} // namespace mixedkv
