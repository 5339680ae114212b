// ARM's intrinsics on another processor: those of SIMDe (Debian's libsimde-dev), and what its version 0.7.4 lacks.

#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <cmath>
#include <simde/arm/neon.h>

inline int32x4_t vcvtnq_s32_f32(float32x4_t a) {
    int32x4_t res = vdupq_n_s32(0);
    for (int i = 0; i < 4; i++) { // saturating, and 0 for NaN
        const double x = std::nearbyint(double(a[i]));
        res[i] = std::isnan(x) ? 0 : x > 2147483647.0 ? 2147483647 : x < -2147483648.0 ? -2147483647 - 1 : int32_t(x);
    }
    return res;
}

inline float32x4_t vdivq_f32(float32x4_t a, float32x4_t b) {
    float32x4_t res = a;
    for (int i = 0; i < 4; i++) {
        res[i] = a[i] / b[i];
    }
    return res;
}

inline uint8x16_t vqmovun_high_s16(uint8x8_t low, int16x8_t a) {
    return vcombine_u8(low, vqmovun_s16(a));
}

inline int8x16_t vrshrn_high_n_s16(int8x8_t low, int16x8_t a, int n) {
    int8_t out[8];
    for (int i = 0; i < 8; i++) {
        out[i] = int8_t((int32_t(a[i]) + (1 << (n - 1))) >> n);
    }
    return vcombine_s8(low, vld1_s8(out));
}

// sum + a b', of which a and b have two rows of eight
template <class Sum, class Bytes>
inline Sum multiply_two_rows(Sum sum, Bytes a, Bytes b) {
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < 2; j++) {
            for (int k = 0; k < 8; k++) {
                sum[2 * i + j] += a[8 * i + k] * b[8 * j + k];
            }
        }
    }
    return sum;
}

inline int32x4_t vmmlaq_s32(int32x4_t sum, int8x16_t a, int8x16_t b) {
    return multiply_two_rows(sum, a, b);
}

inline uint32x4_t vmmlaq_u32(uint32x4_t sum, uint8x16_t a, uint8x16_t b) {
    return multiply_two_rows(sum, a, b);
}
