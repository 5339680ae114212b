// The integers of tc3 as nibbles and of q5_0 as bytes, which ARM bodies make of a block of keys before they multiply.

#pragma once

#include "attention/row_types.h"

#include <arm_neon.h>

namespace mixedkv {
namespace {

// n times 32 elements, as all below
inline void unpack_row(type_constant<unpacked_tc3>, const char * row, int n, char * out) {
    for (int b = 0; b < n; b += 2, row += TC3_BYTES) {
        const auto * p = reinterpret_cast<const uint8_t *>(row);
        for (int half = 0; half < 2; half++) {
            uint32_t nibbles[4];
            unpack_tc3(p + (half ? 18 : 2), p + (half ? 14 : 10), nibbles);
            std::memcpy(out + 16 * (b + half), nibbles, sizeof(nibbles));
        }
    }
}

// Nibbles whose fifth bits come before them; less 16 is what lacks one
inline void unpack_row(type_constant<unpacked_q5_0>, const char * row, int n, char * out) {
    const uint8x16_t bit    = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    const uint8x16_t nibble = vdupq_n_u8(15);
    for (int b = 0; b < n; b++, row += block_bytes(row_type::q5_0)) {
        uint32_t high;
        std::memcpy(&high, row + 2, 4);
        const uint8x16_t all = vreinterpretq_u8_u32(vdupq_n_u32(high));
        const uint8x16_t x   = vld1q_u8(reinterpret_cast<const uint8_t *>(row + 6));
        for (int half = 0; half < 2; half++) {
            const uint64_t   bytes = half ? 0x0303030303030303 : 0x0101010101010101;
            const uint8x16_t byte =
                vcombine_u8(vcreate_u8(bytes - 0x0101010101010101), vcreate_u8(bytes)); // of `high`, of each element
            const uint8x16_t has  = vtstq_u8(vqtbl1q_u8(all, byte), bit);
            const uint8x16_t less = vbicq_u8(vdupq_n_u8(0xf0), has);
            vst1q_u8(reinterpret_cast<uint8_t *>(out) + 32 * b + 16 * half,
                     vorrq_u8(half ? vshrq_n_u8(x, 4) : vandq_u8(x, nibble), less));
        }
    }
}

} // namespace
} // namespace mixedkv
