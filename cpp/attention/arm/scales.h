// The scales of rows of integers, on ARM.

#pragma once

#include "attention/integers/integer_types.h"

#include <arm_neon.h>

namespace mixedkv {
namespace {

// half[block][key] of 4 keys from `key` on: the scales of up to 4 blocks; absent ones repeat the last one
template <row_type type>
void transpose_scales(const char * p, int64_t row, int n_blocks, uint16_t (*half)[key_block], int key) {
    for (int b = 0; b < 4; b++) {
        const char * at   = p + scale_at(type, b < n_blocks ? b : n_blocks - 1);
        const auto   of   = [&](int i) { return reinterpret_cast<const uint16_t *>(at + i * row); };
        uint16x4_t   four = vld1_dup_u16(of(0));
        four              = vld1_lane_u16(of(1), four, 1);
        four              = vld1_lane_u16(of(2), four, 2);
        four              = vld1_lane_u16(of(3), four, 3);
        vst1_u16(half[b] + key, four);
    }
}

} // namespace
} // namespace mixedkv
