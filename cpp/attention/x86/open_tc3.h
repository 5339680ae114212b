// Rows of tc3 with the nibbles of lm4, which x86 bodies make of a block of keys before they multiply (opened_tc3).

#pragma once

#include "attention/row_types.h"

#include <immintrin.h>

namespace mixedkv {
namespace {

// As open_tc3 does it, of a whole block: 26 bytes to 34
inline void open_block_tc3(const char * block, char * out) {
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
    std::memcpy(out, block, 2);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + 2),
                        _mm256_or_si256(_mm256_and_si256(set, low), _mm256_andnot_si256(set, high)));
}

inline void open_row_tc3(const char * row, int n_blocks, char * out) {
    for (int b = 0; b < n_blocks; b++) {
        open_block_tc3(row + b * TC3_BYTES, out + b * LM4_BYTES);
    }
}

} // namespace
} // namespace mixedkv
