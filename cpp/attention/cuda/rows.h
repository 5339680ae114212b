// How kernels take rows of K and V apart, for tensor cores, as the rows lie in shared memory.
//
// A unit is 32 elements of a row. Tensor cores take the elements of a unit in any order, if both sides have the same.
// So each type has the order in which it dequantises fastest:
//
//   K    Lane t of four unpacks 8 elements of a unit as 4 words of two F16 values; value j of word i is element_k(t, i,
//   j).
//        Integers stay integers: the scale of a unit is multiplied with the sum of products in F32, so scores are exact
//        but for the rounding of Q to F16.
//   V    Lane g of eight dequantises 4 elements of two keys at a time; word i has both keys' element_v(g, i), with the
//   scale.
//
//
// For kernels that dequantise whole rows first, dequantise_runs gives 4 elements from first_run(t) on and 4 from
// second_run(t) on, in words 0 and 1, and 2 and 3, with the scale.
//
// Rows begin at multiples of 4 bytes, of 16 in F16. A unit's place in its row is known when the kernel is compiled, so
// a lane knows which words are aligned.

#pragma once

#include "attention/lm4.h"
#include "attention/tc3.h"
#include "device.h"

namespace mixedkv {
namespace cuda {

// A word of a row, of which `begin` bytes from a multiple of four are known to the compiler
template <int begin>
MIXEDKV_DEVICE uint32_t load_word(const char * p) {
    if constexpr (begin % 4 == 0) {
        return *reinterpret_cast<const uint32_t *>(p + begin);
    } else {
        return load_u16(p + begin) | load_u16(p + begin + 2) << 16;
    }
}

constexpr uint32_t half_1024 = 0x64006400; // an integer n < 1024 in the low bits makes 1024 + n of it

// Nibbles at bits 0, 4, 8, 12 of each half of x, less 8, in F16
MIXEDKV_DEVICE void unpack_nibbles(uint32_t x, uint32_t (&y)[4]) {
    constexpr uint32_t sixteenth = 0x2c002c00, minus_72 = 0xd480d480, half_1032 = 0x64086408;
    y[0] = subtract_f16x2(and_or(x, 0x000f000f, half_1024), half_1032);
    y[1] = multiply_add_f16x2(and_or(x, 0x00f000f0, half_1024), sixteenth, minus_72); // 1024 + 16 n
    y[2] = subtract_f16x2(and_or(x >> 8, 0x000f000f, half_1024), half_1032);
    y[3] = multiply_add_f16x2(and_or(x >> 8, 0x00f000f0, half_1024), sixteenth, minus_72);
}

struct f16_rows {
    static constexpr int  unit_bytes = 64;
    static constexpr bool has_scale  = false;

    MIXEDKV_SHARED(int) element_k(int t, int i, int j) { return 8 * t + 2 * i + j; }
    MIXEDKV_SHARED(int) element_v(int g, int i) { return 4 * g + i; }

    template <int unit>
    MIXEDKV_DEVICE void unpack_k(const char * row, int t, uint32_t (&y)[4]) {
        const words<4> x = load_words<4>(row + unit * unit_bytes + 16 * t);
        for (int i = 0; i < 4; i++) {
            y[i] = x.at[i];
        }
    }

    MIXEDKV_SHARED(int) first_run(int t) { return 8 * t; }
    MIXEDKV_SHARED(int) second_run(int t) { return 8 * t + 4; }

    template <int unit>
    MIXEDKV_DEVICE void dequantise_runs(const char * row, int t, uint32_t (&y)[4]) {
        unpack_k<unit>(row, t, y);
    }

    template <int unit>
    MIXEDKV_DEVICE void dequantise_v(const char * a, const char * b, int g, uint32_t (&y)[4]) {
        const words<2> wa = load_words<2>(a + unit * unit_bytes + 8 * g);
        const words<2> wb = load_words<2>(b + unit * unit_bytes + 8 * g);
        for (int i = 0; i < 2; i++) {
            y[2 * i]     = permute_bytes(wa.at[i], wb.at[i], 0x5410);
            y[2 * i + 1] = permute_bytes(wa.at[i], wb.at[i], 0x7632);
        }
    }
};

// Blocks of so many units with an F16 scale in front
template <int bytes, int units = 1>
struct scaled_rows {
    static constexpr int  unit_bytes = bytes / units;
    static constexpr bool has_scale  = true;

    template <int unit>
    MIXEDKV_DEVICE float scale(const char * row) {
        return load_half(row + unit / units * bytes);
    }

    template <int unit>
    MIXEDKV_DEVICE void multiply_by_scales(const char * a, const char * b, uint32_t (&y)[4]) {
        const uint32_t scales = load_u16(a + unit / units * bytes) | load_u16(b + unit / units * bytes) << 16;
        for (int i = 0; i < 4; i++) {
            y[i] = multiply_f16x2(y[i], scales);
        }
    }
};

struct q8_0_rows : scaled_rows<34> {
    MIXEDKV_SHARED(int) element_k(int t, int i, int j) { return 8 * t + 2 * i + j; }
    MIXEDKV_SHARED(int) element_v(int g, int i) { return 4 * g + i; }
    MIXEDKV_SHARED(int) first_run(int t) { return 8 * t; }
    MIXEDKV_SHARED(int) second_run(int t) { return 8 * t + 4; }

    template <int unit>
    MIXEDKV_DEVICE void dequantise_runs(const char * row, int t, uint32_t (&y)[4]) {
        unpack_k<unit>(row, t, y);
        multiply_by_scales<unit>(row, row, y);
    }

    // Bytes 0 and 1, and 2 and 3, signed, in F16
    MIXEDKV_DEVICE void unpack_bytes(uint32_t x, uint32_t & low, uint32_t & high) {
        constexpr uint32_t half_1152 = 0x64806480;
        x ^= 0x80808080;
        low  = subtract_f16x2(permute_bytes(x, half_1024, 0x5150), half_1152);
        high = subtract_f16x2(permute_bytes(x, half_1024, 0x5352), half_1152);
    }

    template <int unit>
    MIXEDKV_DEVICE void unpack_k(const char * row, int t, uint32_t (&y)[4]) {
        constexpr int begin = unit * unit_bytes + 2;
        unpack_bytes(load_word<begin>(row + 8 * t), y[0], y[1]);
        unpack_bytes(load_word<begin + 4>(row + 8 * t), y[2], y[3]);
    }

    template <int unit>
    MIXEDKV_DEVICE void dequantise_v(const char * a, const char * b, int g, uint32_t (&y)[4]) {
        constexpr int  begin = unit * unit_bytes + 2;
        const uint32_t wa = load_word<begin>(a + 4 * g), wb = load_word<begin>(b + 4 * g);
        unpack_bytes(permute_bytes(wa, wb, 0x5140), y[0], y[1]);
        unpack_bytes(permute_bytes(wa, wb, 0x7362), y[2], y[3]);
        multiply_by_scales<unit>(a, b, y);
    }
};

// Element 16 h + i of a unit is nibble h of byte i.
template <int bytes, int units = 1>
struct nibble_rows : scaled_rows<bytes, units> {
    MIXEDKV_SHARED(int) nibble(int byte, int i) { return byte + i / 2 + 16 * (i % 2); } // from `byte` on
    MIXEDKV_SHARED(int) element_k(int t, int i, int j) { return nibble(4 * t, i + 4 * j); }
    MIXEDKV_SHARED(int) element_v(int g, int i) { return nibble(2 * g, i); }
    MIXEDKV_SHARED(int) first_run(int t) { return 4 * t; }
    MIXEDKV_SHARED(int) second_run(int t) { return 4 * t + 16; }

    // From the words of unpack_k, in which nibble i and i + 4 lie together
    MIXEDKV_DEVICE void put_in_runs(uint32_t (&y)[4]) {
        const uint32_t x[4] = { y[0], y[1], y[2], y[3] };
        for (int high = 0; high < 2; high++) {
            y[2 * high]     = permute_bytes(x[high], x[high + 2], 0x5410);
            y[2 * high + 1] = permute_bytes(x[high], x[high + 2], 0x7632);
        }
    }
};

struct q4_0_rows : nibble_rows<18> {
    template <int unit>
    MIXEDKV_DEVICE void unpack_k(const char * row, int t, uint32_t (&y)[4]) {
        unpack_nibbles(load_word<unit * unit_bytes + 2>(row + 4 * t), y);
    }

    template <int unit>
    MIXEDKV_DEVICE void dequantise_v(const char * a, const char * b, int g, uint32_t (&y)[4]) {
        constexpr int begin = unit * unit_bytes + 2;
        unpack_nibbles(load_u16(a + begin + 2 * g) | load_u16(b + begin + 2 * g) << 16, y);
        multiply_by_scales<unit>(a, b, y);
    }

    template <int unit>
    MIXEDKV_DEVICE void dequantise_runs(const char * row, int t, uint32_t (&y)[4]) {
        unpack_k<unit>(row, t, y);
        put_in_runs(y);
        multiply_by_scales<unit>(row, row, y);
    }
};

// As q4_0, with the fifth bits of all elements in a word between scale and nibbles
struct q5_0_rows : nibble_rows<22> {
    // Nibble i of each half of x, and a fifth bit of each, which is bit 4 of each half of `fifths`
    MIXEDKV_DEVICE uint32_t unpack_one(uint32_t x, int i, uint32_t fifths) {
        constexpr uint32_t half_1040 = 0x64106410;
        const uint32_t     nibbles   = and_or(x >> 4 * i, 0x000f000f, half_1024);
        return subtract_f16x2(and_or(fifths, 0x00100010, nibbles), half_1040);
    }

    template <int unit>
    MIXEDKV_DEVICE void unpack_k(const char * row, int t, uint32_t (&y)[4]) {
        const uint32_t x         = load_word<unit * unit_bytes + 6>(row + 4 * t);
        const uint32_t fifths    = load_word<unit * unit_bytes + 2>(row) >> 4 * t;
        // bits 0 and 2 go to 4 and 20, 1 and 3 to 5 and 21
        const uint32_t spread[2] = { (fifths & 15) * 0x00040010, (fifths >> 16 & 15) * 0x00040010 };
        for (int i = 0; i < 4; i++) {
            y[i] = unpack_one(x, i, spread[i % 2] >> i / 2);
        }
    }

    template <int unit>
    MIXEDKV_DEVICE void dequantise_v(const char * a, const char * b, int g, uint32_t (&y)[4]) {
        constexpr int  begin = unit * unit_bytes + 6;
        const uint32_t x     = load_u16(a + begin + 2 * g) | load_u16(b + begin + 2 * g) << 16;
        const uint32_t fa = load_word<begin - 4>(a) >> 2 * g, fb = load_word<begin - 4>(b) >> 2 * g;
        // of the elements of low nibbles, and of high ones
        const uint32_t fifths[2] = { permute_bytes(fa, fb, 0x5410), permute_bytes(fa, fb, 0x7632) };
        for (int i = 0; i < 4; i++) {
            y[i] = unpack_one(x, i, fifths[i % 2] << (4 - i / 2));
        }
        multiply_by_scales<unit>(a, b, y);
    }

    template <int unit>
    MIXEDKV_DEVICE void dequantise_runs(const char * row, int t, uint32_t (&y)[4]) {
        unpack_k<unit>(row, t, y);
        put_in_runs(y);
        multiply_by_scales<unit>(row, row, y);
    }
};

// Nibbles that are indices into 16 levels: which bytes they are says Layout.
template <class Layout>
struct level_rows : nibble_rows<Layout::block_bytes, 2> {
    using nibbles = nibble_rows<Layout::block_bytes, 2>;

    MIXEDKV_SHARED(int) element_k(int t, int i, int j) { return 4 * t + 2 * (i % 2) + j + 16 * (i / 2); }

    // Four levels from `first` on, plus 128, as bytes
    MIXEDKV_SHARED(uint32_t) table(int first) {
        uint32_t res = 0;
        for (int i = 0; i < 4; i++) {
            res |= uint32_t(Layout::levels[first + i] + 128) << 8 * i;
        }
        return res;
    }

    // Levels of the nibbles of each half of x, plus 128, as bytes. A selector has three bits, so they are looked up
    // among the lower eight and among the upper eight, and the fourth bit chooses.
    MIXEDKV_DEVICE void look_up(uint32_t x, uint32_t (&y)[2]) {
        constexpr uint32_t t[4]  = { table(0), table(4), table(8), table(12) };
        const uint32_t     upper = x ^ 0x88888888, which = and_or(x >> 1, 0x44444444, 0x32103210);
        for (int half = 0; half < 2; half++) {
            const int s = 16 * half;
            y[half] =
                look_up_bytes(look_up_bytes(t[0], t[1], x >> s), look_up_bytes(t[2], t[3], upper >> s), which >> s);
        }
    }

    // Two bytes of x, by the selector, less 128, in F16
    MIXEDKV_DEVICE uint32_t to_f16x2(uint32_t x, uint32_t selector) {
        constexpr uint32_t half_1152 = 0x64806480;
        return subtract_f16x2(permute_bytes(x, half_1024, selector), half_1152);
    }

    template <int unit>
    MIXEDKV_DEVICE void unpack_k(const char * row, int t, uint32_t (&y)[4]) {
        uint32_t x[2];
        look_up(Layout::template load<unit>(row, t), x);
        for (int i = 0; i < 4; i++) {
            y[i] = to_f16x2(x[i % 2], i < 2 ? 0x5250 : 0x5351);
        }
    }

    template <int unit>
    MIXEDKV_DEVICE void dequantise_v(const char * a, const char * b, int g, uint32_t (&y)[4]) {
        uint32_t x[2];
        look_up(Layout::template load_two<unit>(a, b, g), x);
        const uint32_t first = permute_bytes(x[0], x[1], 0x5140), last = permute_bytes(x[0], x[1], 0x7362);
        for (int i = 0; i < 4; i++) {
            y[i] = to_f16x2(i < 2 ? first : last, i % 2 ? 0x5352 : 0x5150);
        }
        nibbles::template multiply_by_scales<unit>(a, b, y);
    }

    template <int unit>
    MIXEDKV_DEVICE void dequantise_runs(const char * row, int t, uint32_t (&y)[4]) {
        unpack_k<unit>(row, t, y);
        nibbles::template multiply_by_scales<unit>(row, row, y);
    }
};

// Two units behind their scale
struct lm4_layout {
    static constexpr int block_bytes = LM4_BYTES;
    static constexpr int levels[16]  = { LM4_LEVELS };

    // The t-th word of nibbles
    template <int unit>
    MIXEDKV_DEVICE uint32_t load(const char * row, int t) {
        return load_word<unit / 2 * block_bytes + unit % 2 * 16 + 2>(row + 4 * t);
    }

    // The g-th half word of a's, and b's
    template <int unit>
    MIXEDKV_DEVICE uint32_t load_two(const char * a, const char * b, int g) {
        constexpr int begin = unit / 2 * block_bytes + unit % 2 * 16 + 2;
        return load_u16(a + begin + 2 * g) | load_u16(b + begin + 2 * g) << 16;
    }
};

// As tc3.h has it: words of fields for elements in turn, and a path that makes the sets of both.
struct tc3_layout {
    static constexpr int block_bytes = TC3_BYTES;
    static constexpr int levels[16]  = { TC3_LEVELS };

    template <int unit>
    MIXEDKV_DEVICE uint32_t load(const char * row, int t) {
        constexpr int  block  = unit / 2 * block_bytes;
        const uint32_t path   = load_word<block + (unit % 2 ? 14 : 10)>(row) << (t < 2 ? 1 : 0);
        const uint32_t fields = load_word<block + (unit % 2 ? 18 : 2)>(row + t / 2 * 4) << (t % 2 ? 0 : 2);
        const uint32_t sets   = (path ^ (path << 2 & 0xaaaaaaaa)) >> (t % 2 ? 2 : 0);
        return (sets & 0x33333333) | (fields & 0xcccccccc);
    }

    template <int unit>
    MIXEDKV_DEVICE uint32_t load_two(const char * a, const char * b, int g) {
        return permute_bytes(load<unit>(a, g / 2), load<unit>(b, g / 2), g % 2 ? 0x7632 : 0x5410);
    }
};

using lm4_rows = level_rows<lm4_layout>;
using tc3_rows = level_rows<tc3_layout>;

// Of a row, as it is stored
enum class stored_type { f16, q8_0, q5_0, q4_0, lm4, tc3 };

// Elements of a block: heads are multiples of it
MIXEDKV_SHARED(int) block_elements(stored_type type) {
    return type == stored_type::lm4 || type == stored_type::tc3 ? 64 : 32;
}

// Calls f(rows of the type), of heads of d: the rows that kernels take apart.
#pragma nv_exec_check_disable // f is of the host there, of the device here
template <int d, class F>
MIXEDKV_SHARED(void)
with_rows(stored_type type, F && f) {
    if constexpr (d % 64 == 0) {
        if (type == stored_type::lm4) {
            return f(lm4_rows());
        }
        if (type == stored_type::tc3) {
            return f(tc3_rows());
        }
    }
    if (type == stored_type::f16) {
        f(f16_rows());
    } else if (type == stored_type::q8_0) {
        f(q8_0_rows());
    } else if (type == stored_type::q5_0) {
        f(q5_0_rows());
    } else {
        f(q4_0_rows());
    }
}

template <class Rows>
MIXEDKV_SHARED(int)
row_bytes(int d) {
    return d / 32 * Rows::unit_bytes; // of blocks of two units the half: heads have whole ones
}

} // namespace cuda
} // namespace mixedkv
