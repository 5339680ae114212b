// The row type tc3, 3.25 bits an element, by trellis-coded quantisation (Marcellin and Fischer 1990). A block is an F16
// scale and 64 elements of three bits, each of which is one of 16 levels: a bit of an element, and those of the two
// before it, choose one of four sets of levels. A quantiser of three bits has 1.4 times the error. In C, for ggml, as
// lm4.h.

#pragma once

#include "lm4.h"

#define TC3_TYPE     36 // as a ggml_type: upstream had the number for a type that is gone
#define TC3_ELEMENTS 64
#define TC3_BYTES    26

// Levels of least squared error for rotated rows, which are near Gaussian, as tc3_from_float scales and chooses them
#define TC3_LEVELS -126, -92, -71, -54, -41, -28, -17, -5, 5, 17, 28, 41, 54, 71, 92, 126

// Behind the scale lie the fields of elements 0 to 31 (8 bytes), their path (4 bytes, the first the lowest), the path
// of elements 32 to 63, and their fields. Of a half: bit t of the path, t = 8 byte + position, and the field of two
// bits from bit (position & 6) on of byte (position & 1) * 4 + byte are of element 4 column + byte, where column is
// position with its two lower bits exchanged. The index of its level is
//   4 field + 2 (path[t] ^ path[t - 2]) + path[t - 1]        path[-1] = path[-2] = 0
// so that a few operations on words make of a half the nibbles of a half of lm4 (dequantise_tc3).

#ifdef __cplusplus
extern "C" {
#endif

// As those of lm4; n: a multiple of TC3_ELEMENTS
LM4_API void tc3_from_float(const float * x, void * row, int64_t n);
LM4_API void tc3_to_float(const void * row, float * x, int64_t n);
LM4_API void tc3_dot(int n, float * sum, size_t, const void * row, size_t, const void * y, size_t, int);

#ifdef __cplusplus
}

// A block in F32, for the conversion above and for all bodies: of internal linkage, as what bodies share
namespace mixedkv {
namespace {

struct tc3_values {
    static constexpr int8_t at[16] = { TC3_LEVELS };
};

// Indices of 32 elements as lm4 has them: 16 bytes, the low nibbles first
inline void unpack_tc3(const uint8_t * fields, const uint8_t * path, uint32_t (&nibbles)[4]) {
    uint32_t u[2], p;
    std::memcpy(u, fields, 8);
    std::memcpy(&p, path, 4);
    for (int odd = 0; odd < 2; odd++) {
        const uint32_t q     = odd ? p : p << 1;
        const uint32_t sets  = q ^ (q << 2 & 0xaaaaaaaa); // of every other element, two bits each
        nibbles[2 * odd]     = (sets & 0x33333333) | (u[odd] << 2 & 0xcccccccc);
        nibbles[2 * odd + 1] = (sets >> 2 & 0x33333333) | (u[odd] & 0xcccccccc);
    }
}

inline void dequantise_tc3(const void * block, float * out) {
    const auto * p = static_cast<const uint8_t *>(block);
    for (int half = 0; half < 2; half++) {
        uint32_t nibbles[4];
        unpack_tc3(p + (half ? 18 : 2), p + (half ? 14 : 10), nibbles);
        look_up_nibbles<tc3_values>(half_at(p), nibbles, out + 32 * half);
    }
}

} // namespace
} // namespace mixedkv
#endif
