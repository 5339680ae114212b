// NEON with FEAT_DotProd, which adds four products of bytes with signs to 32 bits in one instruction.

#pragma once

#include "lanes_neon.h"

namespace mixedkv {
namespace {

struct dotprod : neon {
    template <class Row>
    struct sum {
        int32x4_t whole;

        void begin(int32_t start) { whole = vdupq_n_s32(traits<Row>.bits == 8 ? 0 : start); }
        ints end() const { return ints(whole); }
    };

    static int8x16_t load_half(const column_block & column, int half) { return vld1q_s8(column.halves[half] + 2); }

    // A column's elements are read 16 at a time. Four of them are a lane, whose number is part of the instruction.
    template <class Sum>
    MIXEDKV_INLINE static void add_group(Sum & to, int, ints values, const column_block & column, int group) {
        const int8x16_t w = signed_bytes(values), x = load_half(column, group / 4);
        switch (group % 4) {
        case 0:
            to.whole = vdotq_laneq_s32(to.whole, w, x, 0);
            break;
        case 1:
            to.whole = vdotq_laneq_s32(to.whole, w, x, 1);
            break;
        case 2:
            to.whole = vdotq_laneq_s32(to.whole, w, x, 2);
            break;
        case 3:
            to.whole = vdotq_laneq_s32(to.whole, w, x, 3);
            break;
        }
    }
};

} // namespace
} // namespace mixedkv
