// Levels of lm3 from one table of 64 bytes, which has those of all widths.

#pragma once

#include "integers.h"

namespace mixedkv {
namespace {

// An element's index: bits of a byte behind the scale; it counts from `base` on in the table.
struct lm3_place {
    int byte, shift, mask, base;
};

constexpr lm3_place lm3_place_of(int element) {
    const int of_5 = 0, of_4 = 32, of_3 = 48, of_2 = 56, of_1 = 60, zero = 62;
    if (element < 16) {
        return { element, 0, element < 8 ? 31 : 15, element < 8 ? of_5 : of_4 };
    }
    if (element < 32) {
        return { element - 16, element < 24 ? 5 : 4, 7, of_3 };
    }
    if (element < 48) {
        return { 16 + element % 4, element % 16 / 4 * 2, 3, of_2 };
    }
    if (element < 56) {
        return { element - 40, 7, 1, of_1 };
    }
    return { 16, 0, 0, zero };
}

alignas(64) constexpr int8_t lm3_levels[64] = { LM3_LEVELS_5, LM3_LEVELS_4, LM3_LEVELS_3, LM3_LEVELS_2, LM3_LEVELS_1 };

// Half of the elements of two keys, whose 16 bytes (integers_at) lie side by side: for each byte of the result the one
// that has its index, and where. Bytes of a dword: elements i and 16 + i of the first key, of the second.
struct lm3_order {
    alignas(64) uint8_t from[64];
    alignas(64) uint8_t shift[64]; // in 8 bytes
    alignas(64) uint8_t mask[64];
    alignas(64) uint8_t base[64];
};

constexpr lm3_order lm3_order_of(int half) {
    lm3_order order{};
    for (int i = 0; i < 64; i++) {
        const lm3_place at = lm3_place_of(32 * half + i / 4 + i % 2 * 16);
        order.from[i]      = uint8_t(i % 4 / 2 * 16 + at.byte - 4 * half);
        order.shift[i]     = uint8_t(i % 8 * 8 + at.shift);
        order.mask[i]      = uint8_t(at.mask);
        order.base[i]      = uint8_t(at.base);
    }
    return order;
}

constexpr lm3_order lm3_orders[2] = { lm3_order_of(0), lm3_order_of(1) };

// What bits & mask stand for, in a table
inline __m512i lm3_look_up(__m512i bits, __m512i mask, __m512i base, __m512i levels) {
    constexpr int and_or = 0xea;
    return _mm512_permutexvar_epi8(_mm512_ternarylogic_epi32(bits, mask, base, and_or), levels);
}

} // namespace
} // namespace mixedkv
