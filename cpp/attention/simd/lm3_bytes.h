// A block of lm3 as bytes, for both x86 vector layers.

#pragma once

#include "attention/row_types.h"

#include <immintrin.h>

namespace mixedkv {
namespace {

// Levels by a nibble that has other bits besides an index: below the upper three bits of a byte, above all others
struct lm3_nibbles {
    static constexpr int8_t third[16]  = { -86, -86, -54, -54, -30, -30, -10, -10, 10, 10, 30, 30, 54, 54, 86, 86 };
    static constexpr int8_t fourth[16] = { LM3_LEVELS_3, LM3_LEVELS_3 };
    static constexpr int8_t second[16] = { LM3_LEVELS_2, LM3_LEVELS_2, LM3_LEVELS_2, LM3_LEVELS_2 };
    static constexpr int8_t first[16]  = { -32, -32, -32, -32, -32, -32, -32, -32, 32, 32, 32, 32, 32, 32, 32, 32 };
};

// Levels of elements 0 to 15, 16 to 31, 32 to 47 and 48 to 63
inline void lm3_bytes(const char * block, __m128i * out) {
    using tables     = lm3_nibbles;
    const auto table = [](const int8_t * at) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(at)); };

    const __m128i nibble = _mm_set1_epi8(15);
    const __m128i bytes  = _mm_loadu_si128(reinterpret_cast<const __m128i *>(block + 2));
    const __m128i low    = _mm_and_si128(bytes, nibble);
    const __m128i high   = _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble);

    const __m128i five = _mm_blendv_epi8(_mm_shuffle_epi8(table(lm3_values::of_5), low),
                                         _mm_shuffle_epi8(table(lm3_values::of_5 + 16), low), _mm_slli_epi16(bytes, 3));
    out[0]             = _mm_blend_epi16(five, _mm_shuffle_epi8(table(lm3_values::of_4), low), 0xf0);
    out[1]             = _mm_blend_epi16(_mm_shuffle_epi8(table(tables::third), high),
                                         _mm_shuffle_epi8(table(tables::fourth), high), 0xf0);

    int32_t pairs;
    std::memcpy(&pairs, block + 18, 4);
    const __m128i two = _mm_srlv_epi32(_mm_set1_epi32(pairs), _mm_setr_epi32(0, 2, 4, 6));
    out[2]            = _mm_shuffle_epi8(table(tables::second), _mm_and_si128(two, _mm_set1_epi8(3)));
    out[3]            = _mm_srli_si128(_mm_shuffle_epi8(table(tables::first), high), 8);
}

} // namespace
} // namespace mixedkv
