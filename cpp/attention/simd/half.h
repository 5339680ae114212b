// IEEE half precision in plain integer arithmetic.

#pragma once

#include <cstdint>
#include <cstring>

namespace mixedkv {
namespace {

inline float half_to_float(uint16_t h) {
    const uint32_t sign      = uint32_t(h & 0x8000) << 16;
    const uint32_t magnitude = h & 0x7fff;
    uint32_t       bits;
    float          out;
    if (magnitude >= 0x7c00) { // infinity or NaN
        bits = 0x7f800000u | magnitude << 13;
    } else if (magnitude >= 0x0400) {
        bits = (magnitude << 13) + (112u << 23);
    } else { // subnormal: an integer times 2^-24
        out = float(magnitude) * 0x1p-24f;
        std::memcpy(&bits, &out, 4);
    }
    bits |= sign;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Rounded to the nearest, ties to even
inline uint16_t float_to_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) {
        return sign | 0x7e00; // NaN
    }
    if (bits >= 0x477ff000) { // 65520
        return sign | 0x7c00;
    }
    if (bits >= 0x38800000) { // 2^-14
        return uint16_t(sign | (bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13);
    }
    float magnitude; // a sum with 1/2 has steps of 2^-24
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return uint16_t(sign | (bits - 0x3f000000));
}

inline float half_at(const void * p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    return half_to_float(h);
}

} // namespace
} // namespace mixedkv
