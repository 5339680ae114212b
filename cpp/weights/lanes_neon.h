// Four rows in the lanes of a vector of NEON (aarch64). What multiplies them differs: weights_neon.cpp,
// weights_dotprod.cpp, weights_i8mm.cpp.

#pragma once

#include "panel.h"

#include <arm_neon.h>

namespace mixedkv {
namespace {

struct neon : by_dwords {
    using ints                           = uint32_t __attribute__((vector_size(16)));
    using floats                         = float32x4_t;
    static constexpr int  lanes          = 4;
    static constexpr int  vectors        = 2;
    static constexpr int  columns        = 4;
    static constexpr int  decode_columns = 4; // for which no panel is made
    static constexpr bool unpacks_many   = false;
    static constexpr int  panel_blocks   = 32; // 11 KB
    static constexpr bool panel_has_bias = false;

    static floats load(const float * p) { return vld1q_f32(p); }
    static void   store(float * p, floats x) { vst1q_f32(p, x); }
    static floats set(float x) { return vdupq_n_f32(x); }
    static floats fma(floats a, floats b, floats c) { return vfmaq_f32(c, a, b); }
    static floats to_floats(ints x) { return vcvtq_f32_s32(int32x4_t(x)); }
    static floats as_floats(ints bits) { return vreinterpretq_f32_u32(uint32x4_t(bits)); }

    static uint8x16_t bytes(ints x) { return vreinterpretq_u8_u32(uint32x4_t(x)); }
    static int8x16_t  signed_bytes(ints x) { return vreinterpretq_s8_u32(uint32x4_t(x)); }
    static ints       from_bytes(uint8x16_t x) { return ints(vreinterpretq_u32_u8(x)); }

    static uint32x4_t load_line(const char * p) {
        return vreinterpretq_u32_u8(vld1q_u8(reinterpret_cast<const uint8_t *>(p)));
    }

    // Two dwords of each: a's and b's in turns
    static uint64x2_t low_pairs(uint32x4_t a, uint32x4_t b) { return vreinterpretq_u64_u32(vzip1q_u32(a, b)); }
    static uint64x2_t high_pairs(uint32x4_t a, uint32x4_t b) { return vreinterpretq_u64_u32(vzip2q_u32(a, b)); }

    // Dword i of 16 bytes of all rows into vector i
    static void lines(const char * const * rows, size_t at, ints out[4]) {
        const uint32x4_t x0 = load_line(rows[0] + at), x1 = load_line(rows[1] + at);
        const uint32x4_t x2 = load_line(rows[2] + at), x3 = load_line(rows[3] + at);
        const uint64x2_t a = low_pairs(x0, x1), b = high_pairs(x0, x1);
        const uint64x2_t c = low_pairs(x2, x3), d = high_pairs(x2, x3);
        out[0] = ints(vreinterpretq_u32_u64(vzip1q_u64(a, c)));
        out[1] = ints(vreinterpretq_u32_u64(vzip2q_u64(a, c)));
        out[2] = ints(vreinterpretq_u32_u64(vzip1q_u64(b, d)));
        out[3] = ints(vreinterpretq_u32_u64(vzip2q_u64(b, d)));
    }

    // Each byte of x, from 0 to 15, as the entry of a table
    static ints look_up(const uint8_t table[16], ints x) { return from_bytes(vqtbl1q_u8(vld1q_u8(table), bytes(x))); }

    static ints dwords(const char * const * rows, size_t at) {
        return ints{ uint32_t(dword_at(rows[0] + at)), uint32_t(dword_at(rows[1] + at)),
                     uint32_t(dword_at(rows[2] + at)), uint32_t(dword_at(rows[3] + at)) };
    }

    static void two_dwords(const char * const * rows, size_t at, ints & first, ints & second) {
        uint64x2_t pairs[2];
        for (int i = 0; i < 2; i++) {
            uint64_t a, b;
            std::memcpy(&a, rows[2 * i] + at, 8);
            std::memcpy(&b, rows[2 * i + 1] + at, 8);
            pairs[i] = vcombine_u64(vcreate_u64(a), vcreate_u64(b));
        }
        first  = ints(vuzp1q_u32(vreinterpretq_u32_u64(pairs[0]), vreinterpretq_u32_u64(pairs[1])));
        second = ints(vuzp2q_u32(vreinterpretq_u32_u64(pairs[0]), vreinterpretq_u32_u64(pairs[1])));
    }

    // Bits 4 g to 4 g + 3 of a lane, each as the fifth of a byte
    static ints fifths(ints bits, int g) {
        const ints byte = ints{ 0, 0x04040404, 0x08080808, 0x0c0c0c0c } + uint32_t(g / 2 * 0x01010101);
        const ints one  = ints{} + (g % 2 ? 0x80402010u : 0x08040201u);
        const ints has  = from_bytes(vtstq_u8(vqtbl1q_u8(bytes(bits), bytes(byte)), bytes(one)));
        return has & 0x10101010;
    }

    // Of lanes below 2^16
    static floats from_f16(ints x) { return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(uint32x4_t(x)))); }

    static ints signed_byte(ints x, int i) {
        using signed_ints = int32_t __attribute__((vector_size(16)));
        return ints(signed_ints(x << (24 - 8 * i)) >> 24);
    }

    static ints whole_bytes(ints x) { return x; } // keep their sign

    // Products of bytes with a sign need no bias, which is taken once from a panel instead of from each product.
    template <class Row>
    static ints without_bias(ints x) {
        constexpr int bias = traits<Row>.bits == 8 ? 0 : traits<Row>.bias;
        return bias ? from_bytes(vsubq_u8(bytes(x), vdupq_n_u8(bias))) : x;
    }
};

} // namespace
} // namespace mixedkv
