// Numbers that look random and are the same in each process, near a normal distribution around 0.

#pragma once

#include <cstdint>

inline float noise(uint32_t & x) {
    float sum = 0.0f;
    for (int i = 0; i < 4; i++) {
        sum += float((x = x * 1664525u + 1013904223u) >> 8) * 0x1p-24f - 0.5f;
    }
    return sum;
}
