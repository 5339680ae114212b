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

inline float half_at(const void * p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    return half_to_float(h);
}

} // namespace
} // namespace mixedkv
