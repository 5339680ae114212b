// Rows of a type into a panel. A vector has a lane for each row, and four elements of it in the lane: the sums of a
// block end in one lane a row, and nothing is summed across lanes.
//
// V is the instruction set. V::lines() reads 16 bytes of each row, which become 4 vectors.

#pragma once

#include "bodies.h"

#include <cstddef>

namespace mixedkv {
namespace {

constexpr int groups = WEIGHTS_BLOCK / 4; // of four elements

// A block of N times V::lanes rows
template <class V, class Row, int N> struct panel_block {
    typename V::ints   values[groups][N]; // bytes
    typename V::floats scale[Row::scales][N];
    typename V::floats least[N];
};

// Where the functions below put vector `at` of a panel
template <class V, class Row, int N> struct panel_part {
    panel_block<V, Row, N> * blocks;
    int                      at;

    typename V::ints &   values(int block, int group) const { return blocks[block].values[group][at]; }
    typename V::floats & scale(int block, int half = 0) const { return blocks[block].scale[half][at]; }
    typename V::floats & least(int block) const { return blocks[block].least[at]; }
};

// The fifth bits of four elements, from the lowest bits of a lane
template <class Ints> inline __attribute__((always_inline)) Ints spread(Ints bits) {
    return ((bits & 15) * 0x00204081 & 0x01010101) << 4;
}

// Low nibbles are groups 0 to 3, high nibbles 4 to 7.
template <class V, class Out>
inline __attribute__((always_inline)) void open_nibbles(const char * const * rows, size_t at, const Out & out) {
    typename V::ints lines[4];
    V::lines(rows, at, lines);
    for (int i = 0; i < 4; i++) {
        out.values(0, i)     = lines[i] & 0x0f0f0f0f;
        out.values(0, i + 4) = lines[i] >> 4 & 0x0f0f0f0f;
    }
}

template <class V, class Out>
inline __attribute__((always_inline)) void open_fifth(typename V::ints fifth, const Out & out) {
    for (int g = 0; g < groups; g++) {
        out.values(0, g) |= spread(fifth >> 4 * g);
    }
}

template <class V, class Out>
inline __attribute__((always_inline)) void open(const row_q4_0 *, const char * const * rows, size_t at,
                                                const Out & out) {
    open_nibbles<V>(rows, at + offsetof(row_q4_0, nibbles), out);
    out.scale(0) = V::from_halves(V::dwords(rows, at) & 0xffff);
}

template <class V, class Out>
inline __attribute__((always_inline)) void open(const row_q4_1 *, const char * const * rows, size_t at,
                                                const Out & out) {
    open_nibbles<V>(rows, at + offsetof(row_q4_1, nibbles), out);
    const typename V::ints both = V::dwords(rows, at);
    out.scale(0)                = V::from_halves(both & 0xffff);
    out.least(0)                = V::from_halves(both >> 16);
}

template <class V, class Out>
inline __attribute__((always_inline)) void open(const row_q5_0 *, const char * const * rows, size_t at,
                                                const Out & out) {
    open_nibbles<V>(rows, at + offsetof(row_q5_0, nibbles), out);
    open_fifth<V>(V::dwords(rows, at + offsetof(row_q5_0, fifth)), out);
    out.scale(0) = V::from_halves(V::dwords(rows, at) & 0xffff);
}

template <class V, class Out>
inline __attribute__((always_inline)) void open(const row_q5_1 *, const char * const * rows, size_t at,
                                                const Out & out) {
    open_nibbles<V>(rows, at + offsetof(row_q5_1, nibbles), out);
    open_fifth<V>(V::dwords(rows, at + offsetof(row_q5_1, fifth)), out);
    const typename V::ints both = V::dwords(rows, at);
    out.scale(0)                = V::from_halves(both & 0xffff);
    out.least(0)                = V::from_halves(both >> 16);
}

template <class V, class Out>
inline __attribute__((always_inline)) void open(const row_q8_0 *, const char * const * rows, size_t at,
                                                const Out & out) {
    for (int half = 0; half < 2; half++) {
        typename V::ints lines[4];
        V::lines(rows, at + offsetof(row_q8_0, values) + 16 * half, lines);
        for (int i = 0; i < 4; i++) {
            out.values(0, 4 * half + i) = V::whole_bytes(lines[i]);
        }
    }
    out.scale(0) = V::from_halves(V::dwords(rows, at) & 0xffff);
}

// The scales and least values of Q4_K and Q5_K: products of 11 and 6 bits, so exact
template <class V, class Out>
inline __attribute__((always_inline)) void open_factors(const char * const * rows, size_t at, const Out & out) {
    typename V::ints lines[4];
    V::lines(rows, at, lines);
    const typename V::floats scale     = V::from_halves(lines[0] & 0xffff);
    const typename V::floats least     = -V::from_halves(lines[0] >> 16);
    const typename V::ints   scales[2] = { lines[1] & 0x3f3f3f3f,
                                           (lines[3] & 0x0f0f0f0f) | (lines[1] >> 2 & 0x30303030) };
    const typename V::ints   leasts[2] = { lines[2] & 0x3f3f3f3f,
                                           (lines[3] >> 4 & 0x0f0f0f0f) | (lines[2] >> 2 & 0x30303030) };
    for (int b = 0; b < 8; b++) {
        out.scale(b) = scale * V::to_floats(scales[b / 4] >> b % 4 * 8 & 0xff);
        out.least(b) = least * V::to_floats(leasts[b / 4] >> b % 4 * 8 & 0xff);
    }
}

template <class V, class Out>
inline __attribute__((always_inline)) void open_pairs(const char * const * rows, size_t at, const Out & out) {
    for (int b = 0; b < 8; b += 2) {
        for (int half = 0; half < 2; half++) {
            typename V::ints lines[4];
            V::lines(rows, at + 16 * b + 16 * half, lines);
            for (int i = 0; i < 4; i++) {
                out.values(b, 4 * half + i)     = lines[i] & 0x0f0f0f0f;
                out.values(b + 1, 4 * half + i) = lines[i] >> 4 & 0x0f0f0f0f;
            }
        }
    }
}

template <class V, class Out>
inline __attribute__((always_inline)) void open(const row_q4_k *, const char * const * rows, size_t at,
                                                const Out & out) {
    open_factors<V>(rows, at, out);
    open_pairs<V>(rows, at + offsetof(row_q4_k, nibbles), out);
}

template <class V, class Out>
inline __attribute__((always_inline)) void open(const row_q5_k *, const char * const * rows, size_t at,
                                                const Out & out) {
    open_factors<V>(rows, at, out);
    open_pairs<V>(rows, at + offsetof(row_q5_k, nibbles), out);
    for (int half = 0; half < 2; half++) {
        typename V::ints lines[4];
        V::lines(rows, at + offsetof(row_q5_k, fifth) + 16 * half, lines);
        for (int b = 0; b < 8; b++) {
            for (int i = 0; i < 4; i++) {
                out.values(b, 4 * half + i) |= (lines[i] >> b & 0x01010101) << 4;
            }
        }
    }
}

// Of each 128 elements 32 low and 32 high nibbles follow one another twice; four times two bits lie beside them.
template <class V, class Out>
inline __attribute__((always_inline)) void open(const row_q6_k *, const char * const * rows, size_t at,
                                                const Out & out) {
    typename V::ints factors[4];
    V::lines(rows, at + offsetof(row_q6_k, factors), factors);
    const typename V::floats scale = V::from_halves(V::dwords(rows, at + offsetof(row_q6_k, scale) - 2) >> 16);
    for (int b = 0; b < 8; b++) {
        for (int half = 0; half < 2; half++) {
            out.scale(b, half) = scale * V::to_floats(V::signed_byte(factors[b / 2], b % 2 * 2 + half));
        }
    }
    for (int part = 0; part < 4; part++) { // 64 nibbles of 16 bytes each, half a block
        const int        b = part / 2 * 4, half = part % 2;
        typename V::ints upper[4], first[4], second[4];
        V::lines(rows, at + offsetof(row_q6_k, upper) + part * 16, upper);
        V::lines(rows, at + offsetof(row_q6_k, nibbles) + part / 2 * 64 + half * 16, first);
        V::lines(rows, at + offsetof(row_q6_k, nibbles) + part / 2 * 64 + half * 16 + 32, second);
        for (int i = 0; i < 4; i++) {
            const int g          = 4 * half + i;
            out.values(b, g)     = (first[i] & 0x0f0f0f0f) | (upper[i] << 4 & 0x30303030);
            out.values(b + 1, g) = (second[i] & 0x0f0f0f0f) | (upper[i] << 2 & 0x30303030);
            out.values(b + 2, g) = (first[i] >> 4 & 0x0f0f0f0f) | (upper[i] & 0x30303030);
            out.values(b + 3, g) = (second[i] >> 4 & 0x0f0f0f0f) | (upper[i] >> 2 & 0x30303030);
        }
    }
}

} // namespace
} // namespace mixedkv
