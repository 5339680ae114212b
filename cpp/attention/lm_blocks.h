// Blocks of lm4 and lm3 in F32, for ggml's conversions and for all bodies. As what bodies share it has internal
// linkage: each instruction set compiles its own.

#pragma once

#include "lm3.h"
#include "lm4.h"

#include "simd/half.h"

namespace mixedkv {
namespace {

struct lm4_values {
    static constexpr int8_t at[16] = { LM4_LEVELS };
};

struct lm3_values {
    static constexpr int8_t of_1[2]  = { LM3_LEVELS_1 };
    static constexpr int8_t of_2[4]  = { LM3_LEVELS_2 };
    static constexpr int8_t of_3[8]  = { LM3_LEVELS_3 };
    static constexpr int8_t of_4[16] = { LM3_LEVELS_4 };
    static constexpr int8_t of_5[32] = { LM3_LEVELS_5 };
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

inline void unpack_lm4(const void * block, float * out) {
    const auto * p = static_cast<const uint8_t *>(block);
    look_up_nibbles<lm4_values>(half_at(p), p + 2, out);
    look_up_nibbles<lm4_values>(half_at(p), p + 18, out + 32);
}

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
