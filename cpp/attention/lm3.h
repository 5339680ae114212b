// The row type lm3, 2.75 bits an element, for values in a basis of their own: by falling variance, each in units of its
// standard deviation (docs/decisions/048). A block is an F16 scale and 64 elements of 5 to 0 bits. In C, for ggml, as
// lm4.h.

#pragma once

#include "lm4.h"

#define LM3_TYPE     37 // as a ggml_type: upstream had the number for a type that is gone
#define LM3_ELEMENTS 64
#define LM3_BYTES    22

// Levels of least squared error for Gaussian elements, of 1 to 5 bits
#define LM3_LEVELS_1 -32, 32
#define LM3_LEVELS_2 -60, -18, 18, 60
#define LM3_LEVELS_3 -86, -54, -30, -10, 10, 30, 54, 86
#define LM3_LEVELS_4 -109, -82, -64, -50, -37, -26, -15, -5, 5, 15, 26, 37, 50, 64, 82, 109
#define LM3_LEVELS_5                                                                                                  \
    -127, -103, -89, -77, -67, -59, -51, -44, -38, -32, -27, -21, -16, -12, -7, -2, 2, 7, 12, 16, 21, 27, 32, 38, 44, \
        51, 59, 67, 77, 89, 103, 127

// Behind the scale lie 20 bytes of indices into these, the first named in the lowest bits of each byte:
//   byte i of  0 to  7   element i (5 bits), element 16 + i (3)
//   byte i of  8 to 15   element i (4 bits), element 16 + i (3), element 40 + i (1)
//   byte i of 16 to 19   elements 16 + i, 20 + i, 24 + i and 28 + i (2 bits each)
// Elements 56 to 63 are zero.

#ifdef __cplusplus
extern "C" {
#endif

// As those of lm4; n: a multiple of LM3_ELEMENTS
LM4_API void lm3_from_float(const float * x, void * row, int64_t n);
LM4_API void lm3_to_float(const void * row, float * x, int64_t n);

#ifdef __cplusplus
}

#include "simd/half.h"

// A block in F32, for the conversion above and for all bodies: of internal linkage, as what bodies share
namespace mixedkv {
namespace {

struct lm3_values {
    static constexpr int8_t of_1[2]  = { LM3_LEVELS_1 };
    static constexpr int8_t of_2[4]  = { LM3_LEVELS_2 };
    static constexpr int8_t of_3[8]  = { LM3_LEVELS_3 };
    static constexpr int8_t of_4[16] = { LM3_LEVELS_4 };
    static constexpr int8_t of_5[32] = { LM3_LEVELS_5 };
};

inline void unpack_lm3(const void * block, float * out) {
    using values       = lm3_values;
    const float  d     = half_at(block);
    const auto * bytes = static_cast<const uint8_t *>(block) + 2;
    for (int i = 0; i < 8; i++) {
        out[i]      = d * values::of_5[bytes[i] & 31];
        out[8 + i]  = d * values::of_4[bytes[8 + i] & 15];
        out[16 + i] = d * values::of_3[bytes[i] >> 5];
        out[24 + i] = d * values::of_3[bytes[8 + i] >> 4 & 7];
        out[48 + i] = d * values::of_1[bytes[8 + i] >> 7];
        out[56 + i] = 0.0f;
    }
    for (int i = 0; i < 16; i++) {
        out[32 + i] = d * values::of_2[bytes[16 + i % 4] >> i / 4 * 2 & 3];
    }
}

} // namespace
} // namespace mixedkv
#endif
