// The types of rows that are a scale times integers, and what stands for the integers.

#pragma once

#include "attention/tile.h"

namespace mixedkv {
namespace {

constexpr float int16_limit = 32512; // 127 * 256: both bytes stay within [-128, 127]

// Types whose values are a scale times a byte: F16 scale, then 32 bytes, or nibbles or other bits that stand for them.
template <row_type type>
struct integer_rows;

template <>
struct integer_rows<row_type::q8_0> {
    static constexpr bool nibbles = false;
    static constexpr int  offset  = 128; // makes integers unsigned
};

template <>
struct integer_rows<row_type::q4_0> : q4_0_values {
    static constexpr bool nibbles = true;
    static constexpr bool even    = true; // a nibble less the offset is its value
    static constexpr int  offset  = 8;
};

template <>
struct integer_rows<row_type::lm4> : lm4_values {
    static constexpr bool nibbles = true;
    static constexpr bool even    = false;
    static constexpr int  offset  = 128;
};

template <>
struct integer_rows<row_type::tc3> {
    static constexpr bool nibbles = false; // until they are unpacked
};

template <>
struct integer_rows<row_type::q5_0> {
    static constexpr bool nibbles = false;
};

template <>
struct integer_rows<unpacked_q5_0> : integer_rows<row_type::q8_0> {};

template <>
struct integer_rows<unpacked_tc3> : tc3_values {
    static constexpr bool nibbles = true;
    static constexpr bool even    = false;
    static constexpr int  offset  = 128;
};

// Those of tc3 and q5_0 are unpacked first: see integer_decode.h
constexpr bool has_integers(row_type type) {
    return type == row_type::q8_0 || type == row_type::q4_0 || type == row_type::lm4;
}

// Calls f with the type as a constant if it has integers
template <class F>
bool with_integers(row_type type, F f) {
    return has_integers(type) && with_block_type(type, [&](auto constant) {
               if constexpr (has_integers(decltype(constant)::value)) {
                   f(constant);
               }
           });
}

constexpr int most_block_bytes = block_bytes(row_type::q8_0);

} // namespace
} // namespace mixedkv
