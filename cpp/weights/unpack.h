// Rows of a type, unpacked. A vector has a lane for each row, and four elements of it in the lane: the sums of a block
// end in one lane a row, and nothing is summed across lanes.
//
// V is the instruction set. V::lines() reads 16 bytes of each row, which become 4 vectors; V::lines_of_eights() does so
// where eight rows are interleaved. `out` takes what a struct of the type holds, block after block:
// scale(block, half, x), least(block, x), values(block, group, x), then done(block).

#pragma once

#include "bodies.h"

#include <cstddef>

namespace mixedkv {
namespace {

constexpr int groups = WEIGHTS_BLOCK / 4; // of four elements

template <class Ints>
MIXEDKV_INLINE Ints low_nibbles(Ints x) {
    return x & 0x0f0f0f0f;
}

template <class Ints>
MIXEDKV_INLINE Ints high_nibbles(Ints x) {
    if constexpr (sizeof(Ints) == 16) { // NEON shifts bytes
        using bytes = uint8_t __attribute__((vector_size(16)));
        return Ints(bytes(x) >> 4);
    } else {
        return x >> 4 & 0x0f0f0f0f;
    }
}

// Bit b of each byte of a lane, as the fifth of an element
template <class Ints>
MIXEDKV_INLINE Ints fifth_bit(Ints bytes, int b) {
    return (b < 4 ? bytes << (4 - b) : bytes >> (b - 4)) & 0x10101010;
}

// Bits 2 i and 2 i + 1 of each byte of a lane, as the fifth and sixth of an element
template <class Ints>
MIXEDKV_INLINE Ints upper_bits(Ints bytes, int i) {
    return (i < 2 ? bytes << (4 - 2 * i) : bytes >> (2 * i - 4)) & 0x30303030;
}

// Group g of a block: low nibbles are groups 0 to 3, high nibbles 4 to 7.
template <class Ints>
MIXEDKV_INLINE Ints nibbles_of(const Ints lines[4], int g) {
    return g < 4 ? low_nibbles(lines[g % 4]) : high_nibbles(lines[g % 4]);
}

template <class V, class Out>
MIXEDKV_INLINE void put_nibbles(const typename V::ints lines[4], Out & out) {
#pragma GCC         unroll 8
    for (int g = 0; g < groups; g++) {
        out.values(0, g, nibbles_of(lines, g));
    }
    out.done(0);
}

template <class V, class Out>
MIXEDKV_INLINE void put_mxfp4(typename V::ints exponents, const typename V::ints lines[4], Out & out) {
    const typename V::ints least = 0x00200000 << (exponents & 1); // of exponents 0 and 1, below the normal numbers
    const typename V::ints small = typename V::ints(exponents < 2);
    out.scale(0, 0, V::as_floats((least & small) | (((exponents - 1) << 23) & ~small)));
#pragma GCC unroll 8
    for (int g = 0; g < groups; g++) {
        out.values(0, g, V::look_up(mxfp4_values, nibbles_of(lines, g)));
    }
    out.done(0);
}

template <class V, class Out>
MIXEDKV_INLINE void unpack_nibbles(const char * const * rows, size_t at, Out & out) {
    typename V::ints lines[4];
    V::lines(rows, at, lines);
    put_nibbles<V>(lines, out);
}

// With a dword of fifth bits: bit i is that of element i.
template <class V, class Out>
MIXEDKV_INLINE void unpack_fives(typename V::ints fifth, const char * const * rows, size_t at, Out & out) {
    typename V::ints lines[4];
    V::lines(rows, at, lines);
#pragma GCC unroll 8
    for (int g = 0; g < groups; g++) {
        out.values(0, g, nibbles_of(lines, g) | V::fifths(fifth, g));
    }
    out.done(0);
}

template <class V, class Out>
MIXEDKV_INLINE void unpack_scale(const char * const * rows, size_t at, Out & out) {
    out.scale(0, 0, V::from_f16(V::dwords(rows, at) & 0xffff));
}

template <class V, class Out>
MIXEDKV_INLINE void put_scale_and_least(typename V::ints both, Out & out) {
    out.scale(0, 0, V::from_f16(both & 0xffff));
    out.least(0, V::from_f16(both >> 16));
}

template <class V, class Out>
MIXEDKV_INLINE void unpack(const row_q4_0 *, const char * const * rows, size_t at, Out & out) {
    unpack_scale<V>(rows, at, out);
    unpack_nibbles<V>(rows, at + offsetof(row_q4_0, nibbles), out);
}

template <class V, class Out>
MIXEDKV_INLINE void unpack(const row_q4_1 *, const char * const * rows, size_t at, Out & out) {
    put_scale_and_least<V>(V::dwords(rows, at), out);
    unpack_nibbles<V>(rows, at + offsetof(row_q4_1, nibbles), out);
}

template <class V, class Out>
MIXEDKV_INLINE void unpack(const row_q5_0 *, const char * const * rows, size_t at, Out & out) {
    typename V::ints first, second;
    V::two_dwords(rows, at, first, second);
    out.scale(0, 0, V::from_f16(first & 0xffff));
    unpack_fives<V>(first >> 16 | second << 16, rows, at + offsetof(row_q5_0, nibbles), out);
}

template <class V, class Out>
MIXEDKV_INLINE void unpack(const row_q5_1 *, const char * const * rows, size_t at, Out & out) {
    typename V::ints both, fifth;
    V::two_dwords(rows, at, both, fifth);
    put_scale_and_least<V>(both, out);
    unpack_fives<V>(fifth, rows, at + offsetof(row_q5_1, nibbles), out);
}

template <class V, class Out>
MIXEDKV_INLINE void unpack(const row_q8_0 *, const char * const * rows, size_t at, Out & out) {
    unpack_scale<V>(rows, at, out);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        typename V::ints lines[4];
        V::lines(rows, at + offsetof(row_q8_0, values) + 16 * half, lines);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            out.values(0, 4 * half + i, V::whole_bytes(lines[i]));
        }
    }
    out.done(0);
}

// The scales and least values of Q4_K and Q5_K, in 6 bits: their products with a half are exact.
template <class V>
struct six_bits {
    typename V::floats scale, least;
    typename V::ints   scales[2], leasts[2];

    MIXEDKV_INLINE six_bits(const char * const * rows, size_t at) {
        typename V::ints lines[4];
        V::lines(rows, at, lines);
        scale     = V::from_f16(lines[0] & 0xffff);
        least     = -V::from_f16(lines[0] >> 16);
        scales[0] = lines[1] & 0x3f3f3f3f;
        scales[1] = low_nibbles(lines[3]) | (lines[1] >> 2 & 0x30303030);
        leasts[0] = lines[2] & 0x3f3f3f3f;
        leasts[1] = high_nibbles(lines[3]) | (lines[2] >> 2 & 0x30303030);
    }

    template <class Out>
    MIXEDKV_INLINE void put(int block, Out & out) const {
        out.scale(block, 0, scale * V::to_floats(scales[block / 4] >> block % 4 * 8 & 0xff));
        out.least(block, least * V::to_floats(leasts[block / 4] >> block % 4 * 8 & 0xff));
    }
};

// Those of eight rows together: a block's factors lie side by side.
template <class V>
struct six_bits_of_eights {
    typename V::floats   scale, least;
    const char * const * rows;
    size_t               at;

    MIXEDKV_INLINE six_bits_of_eights(const char * const * rows_, size_t at_) :
        scale(V::f16_of_eights(rows_, at_ + offsetof(rows_q4_k_x8, scale))),
        least(-V::f16_of_eights(rows_, at_ + offsetof(rows_q4_k_x8, least))), rows(rows_),
        at(at_ + offsetof(rows_q4_k_x8, factors)) {}

    template <class Out>
    MIXEDKV_INLINE void put(int block, Out & out) const {
        uint64_t scales[V::lanes / 8], leasts[V::lanes / 8];
#pragma GCC unroll 2
        for (int i = 0; i < V::lanes / 8; i++) {
            uint32_t x[3];
            std::memcpy(x, rows[8 * i] + at + 12 * block, sizeof(x));
            scales[i] = (x[0] & 0x3f3f3f3f) | uint64_t(low_nibbles(x[2]) | (x[0] >> 2 & 0x30303030)) << 32;
            leasts[i] = (x[1] & 0x3f3f3f3f) | uint64_t(high_nibbles(x[2]) | (x[1] >> 2 & 0x30303030)) << 32;
        }
        out.scale(block, 0, scale * V::to_floats(V::bytes_of_eights(scales)));
        out.least(block, least * V::to_floats(V::bytes_of_eights(leasts)));
    }
};

template <class V, class Out>
MIXEDKV_INLINE void unpack(const rows_q4_0_x8 *, const char * const * rows, size_t at, Out & out) {
    out.scale(0, 0, V::f16_of_eights(rows, at));
    typename V::ints lines[4];
    V::lines_of_eights(rows, at + offsetof(rows_q4_0_x8, nibbles), lines);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        lines[i] ^= 0x88888888; // with the bias
    }
    put_nibbles<V>(lines, out);
}

template <class V, class Out>
MIXEDKV_INLINE void unpack(const row_mxfp4 *, const char * const * rows, size_t at, Out & out) {
    typename V::ints lines[4];
    V::lines(rows, at + offsetof(row_mxfp4, nibbles), lines);
    put_mxfp4<V>(V::dwords(rows, at) & 0xff, lines, out);
}

template <class V, class Out>
MIXEDKV_INLINE void unpack(const rows_mxfp4_x8 *, const char * const * rows, size_t at, Out & out) {
    uint64_t exponents[V::lanes / 8];
#pragma GCC unroll 2
    for (int i = 0; i < V::lanes / 8; i++) {
        std::memcpy(exponents + i, rows[8 * i] + at, 8);
    }
    typename V::ints lines[4];
    V::lines_of_eights(rows, at + offsetof(rows_mxfp4_x8, nibbles), lines);
    put_mxfp4<V>(V::bytes_of_eights(exponents), lines, out);
}

MIXEDKV_INLINE size_t nibbles_at(const row_q4_k *, int b) {
    return offsetof(row_q4_k, nibbles) + 16 * b;
}

MIXEDKV_INLINE size_t nibbles_at(const rows_q4_k_x8 *, int b) {
    return offsetof(rows_q4_k_x8, nibbles) + 8 * 16 * b;
}

// V::lines(), or V::lines_of_eights()
template <class V, class Row>
MIXEDKV_INLINE void lines_of(const Row *, const char * const * rows, size_t at, typename V::ints out[4]) {
    if constexpr (traits<Row>.together == 8) {
        V::lines_of_eights(rows, at, out);
    } else {
        V::lines(rows, at, out);
    }
}

template <class V, class Row, class Factors, class Out>
MIXEDKV_INLINE void unpack_k4(const Row * row, const Factors & factors, const char * const * rows, size_t at,
                              Out & out) {
#pragma GCC         unroll 4
    for (int b = 0; b < 8; b += 2) {
        typename V::ints lines[2][4];
        lines_of<V>(row, rows, at + nibbles_at(row, b), lines[0]);
        lines_of<V>(row, rows, at + nibbles_at(row, b + 1), lines[1]);
        factors.put(b, out);
#pragma GCC unroll 8
        for (int g = 0; g < groups; g++) {
            out.values(b, g, low_nibbles(lines[g / 4][g % 4]));
        }
        out.done(b);
        factors.put(b + 1, out);
#pragma GCC unroll 8
        for (int g = 0; g < groups; g++) {
            out.values(b + 1, g, high_nibbles(lines[g / 4][g % 4]));
        }
        out.done(b + 1);
    }
}

template <class V, class Out>
MIXEDKV_INLINE void unpack(const row_q4_k * row, const char * const * rows, size_t at, Out & out) {
    unpack_k4<V>(row, six_bits<V>(rows, at), rows, at, out);
}

template <class V, class Out>
MIXEDKV_INLINE void unpack(const rows_q4_k_x8 * row, const char * const * rows, size_t at, Out & out) {
    unpack_k4<V>(row, six_bits_of_eights<V>(rows, at), rows, at, out);
}

template <class V, class Out>
MIXEDKV_INLINE void unpack(const row_q5_k *, const char * const * rows, size_t at, Out & out) {
    const six_bits<V> factors(rows, at);
    typename V::ints  fifth[2][4];
    V::lines(rows, at + offsetof(row_q5_k, fifth), fifth[0]);
    V::lines(rows, at + offsetof(row_q5_k, fifth) + 16, fifth[1]);
#pragma GCC unroll 4
    for (int b = 0; b < 8; b += 2) {
        typename V::ints lines[2][4];
        V::lines(rows, at + offsetof(row_q5_k, nibbles) + 16 * b, lines[0]);
        V::lines(rows, at + offsetof(row_q5_k, nibbles) + 16 * b + 16, lines[1]);
        factors.put(b, out);
#pragma GCC unroll 8
        for (int g = 0; g < groups; g++) {
            out.values(b, g, low_nibbles(lines[g / 4][g % 4]) | fifth_bit(fifth[g / 4][g % 4], b));
        }
        out.done(b);
        factors.put(b + 1, out);
#pragma GCC unroll 8
        for (int g = 0; g < groups; g++) {
            out.values(b + 1, g, high_nibbles(lines[g / 4][g % 4]) | fifth_bit(fifth[g / 4][g % 4], b + 1));
        }
        out.done(b + 1);
    }
}

// Of each 128 elements there are 64 bytes, whose low nibbles come first, and 32 with the upper two bits four times.
template <class V, class Out>
MIXEDKV_INLINE void unpack(const row_q6_k *, const char * const * rows, size_t at, Out & out) {
    typename V::ints factors[4];
    V::lines(rows, at + offsetof(row_q6_k, factors), factors);
    const typename V::floats scale = V::from_f16(V::dwords(rows, at + offsetof(row_q6_k, scale) - 2) >> 16);
#pragma GCC unroll 2
    for (int first = 0; first < 8; first += 4) {
        typename V::ints upper[2][4], nibbles[4][4];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            V::lines(rows, at + offsetof(row_q6_k, upper) + first * 8 + 16 * i, upper[i]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            V::lines(rows, at + offsetof(row_q6_k, nibbles) + first * 16 + 16 * i, nibbles[i]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const int b = first + i;
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                out.scale(b, half, scale * V::to_floats(V::signed_byte(factors[b / 2], b % 2 * 2 + half)));
            }
#pragma GCC unroll 8
            for (int g = 0; g < groups; g++) {
                const typename V::ints four = nibbles[i % 2 * 2 + g / 4][g % 4];
                out.values(b, g, (i < 2 ? low_nibbles(four) : high_nibbles(four)) | upper_bits(upper[g / 4][g % 4], i));
            }
            out.done(b);
        }
    }
}

// So many blocks in a row are whole lines. Their scales then come with them, where else each is read alone.
template <class Row>
constexpr int at_once = 1;
template <>
constexpr int at_once<row_q4_0> = 8;
template <>
constexpr int at_once<row_q4_1> = 4;

// Two blocks are nine dwords. The scale of the first lies in the first one, that of the second in the upper half of
// the fifth: the nibbles of the first block are two bytes off.
template <class V, class Out>
MIXEDKV_INLINE void unpack_many(const row_q4_0 *, const char * const * rows, size_t at, Out & out) {
    typename V::ints dwords[36];
#pragma GCC unroll 9
    for (int i = 0; i < 9; i++) {
        V::lines(rows, at + 16 * i, dwords + 4 * i);
    }
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; pair++) {
        const typename V::ints * x = dwords + 9 * pair;
        out.scale(2 * pair, 0, V::from_f16(x[0] & 0xffff));
#pragma GCC unroll 5
        for (int i = 0; i < 5; i++) {
            out.nibbles(2 * pair, 4 * i, x[i], i == 0);
        }
        out.done(2 * pair);
        out.scale(2 * pair + 1, 0, V::from_f16(x[4] >> 16));
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            out.nibbles(2 * pair + 1, 2 + 4 * i, x[5 + i], i == 0);
        }
        out.done(2 * pair + 1);
    }
}

template <class V, class Out>
MIXEDKV_INLINE void unpack_many(const row_q4_1 *, const char * const * rows, size_t at, Out & out) {
    typename V::ints dwords[20];
#pragma GCC unroll 5
    for (int i = 0; i < 5; i++) {
        V::lines(rows, at + 16 * i, dwords + 4 * i);
    }
#pragma GCC unroll 4
    for (int b = 0; b < 4; b++) {
        const typename V::ints * x = dwords + 5 * b;
        out.scale(b, 0, V::from_f16(x[0] & 0xffff));
        out.least(b, V::from_f16(x[0] >> 16));
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            out.nibbles(b, 2 + 4 * i, x[1 + i], i == 0);
        }
        out.done(b);
    }
}

} // namespace
} // namespace mixedkv
