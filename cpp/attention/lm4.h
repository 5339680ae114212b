// The row type lm4, 4.25 bits an element: a block is an F16 scale and 64 nibbles, which are indices into a table of
// levels. In C, for ggml: there it is a type beside its own (vendor/patches), and lm4.cpp is compiled into it.

#pragma once

#include <stddef.h>
#include <stdint.h>

#define LM4_TYPE     38 // as a ggml_type: upstream had the number for a type that is gone
#define LM4_ELEMENTS 64
#define LM4_BYTES    34

// Levels of least squared error for rotated rows, which are near Gaussian, when each block has the best of the scales
// that lm4_from_float tries. The largest element of a block is near the first level, whatever its sign.
#define LM4_LEVELS -127, -97, -77, -60, -46, -33, -21, -10, 1, 13, 24, 37, 50, 66, 84, 109

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__) && !defined(_WIN32)
#define LM4_API __attribute__((visibility("default")))
#elif defined(_WIN32) && defined(LM4_BUILD)
#define LM4_API __declspec(dllexport)
#else
#define LM4_API
#endif

// n: elements, a multiple of LM4_ELEMENTS. The same bits on every machine with the same rounding of products.
LM4_API void lm4_from_float(const float * x, void * row, int64_t n);
LM4_API void lm4_to_float(const void * row, float * x, int64_t n);

// The rest is what ggml asks of a type: *sum = row . y, y in F32; one row, whatever the strides
LM4_API void lm4_dot(int n, float * sum, size_t, const void * row, size_t, const void * y, size_t, int);

#ifdef __cplusplus
}

#include "simd/half.h"

// A block in F32, for the conversion above and for all bodies: of internal linkage, as what bodies share
namespace mixedkv {
namespace {

struct lm4_values {
    static constexpr int8_t at[16] = { LM4_LEVELS };
};

// 32 elements: 16 of the low nibbles, then 16 of the high ones
template <class Values>
void look_up_nibbles(float d, const void * nibbles, float * out) {
    const auto * bytes = static_cast<const uint8_t *>(nibbles);
    for (int i = 0; i < 16; i++) {
        out[i]      = d * Values::at[bytes[i] & 15];
        out[i + 16] = d * Values::at[bytes[i] >> 4];
    }
}

inline void dequantise_lm4(const void * block, float * out) {
    const auto * p = static_cast<const uint8_t *>(block);
    look_up_nibbles<lm4_values>(half_at(p), p + 2, out);
    look_up_nibbles<lm4_values>(half_at(p), p + 18, out + 32);
}

} // namespace
} // namespace mixedkv
#endif
