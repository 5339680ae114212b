// The layouts of rows in blocks, as ggml has them, and how code for one type is chosen at run time. Unpacking is in
// plain C++, which compilers vectorise well where values come from arithmetic; vector layers replace what they do
// better.

#pragma once

#include "kernel.h"
#include "lm4.h"
#include "tc3.h"

namespace mixedkv {
namespace {

template <row_type type>
struct type_constant {
    static constexpr row_type value = type;
};

// The integers of tc3 as nibbles and those of q5_0 as bytes, which bodies make of rows before they multiply
// (unpack_rows.h of x86/ and arm/), without scales. No segment has them.
constexpr row_type unpacked_tc3  = row_type(int(row_type::other) + 1);
constexpr row_type unpacked_q5_0 = row_type(int(row_type::other) + 2);

// Whose scales go with the integers
constexpr row_type stored_type(row_type t) {
    return t == unpacked_tc3 ? row_type::tc3 : t == unpacked_q5_0 ? row_type::q5_0 : t;
}

// Of 32 elements; 0: the type is multiplied as it is stored
constexpr int unpacked_bytes(row_type t) {
    return t == unpacked_tc3 ? 16 : t == unpacked_q5_0 ? 32 : 0;
}

// A block of 32 elements: F16 scale d first, then the high bits of 5, then either 32 integers or 16 bytes of nibbles,
// the low ones first. Of lm4 and tc3, two times 32 share a scale.
constexpr int block_elements(row_type t) {
    return t == row_type::lm4 || stored_type(t) == row_type::tc3 ? LM4_ELEMENTS : 32;
}

constexpr int block_bytes(row_type t) {
    switch (t) {
    case row_type::q8_0:
        return 34;
    case row_type::q4_0:
        return 18;
    case row_type::q5_0:
        return 22;
    case row_type::lm4:
        return LM4_BYTES;
    case row_type::tc3:
        return TC3_BYTES;
    default:
        return 0; // no blocks
    }
}

// Bytes to the scale of 32 elements, the b-th of a row, and to their integers where there is nothing besides
constexpr int scale_at(row_type t, int b) {
    return 32 * b / block_elements(t) * block_bytes(t);
}

constexpr int integers_at(row_type t, int b) {
    return unpacked_bytes(t) > 0 ? unpacked_bytes(t) * b : scale_at(t, b) + 2 + 32 * b % block_elements(t) / 2;
}

// Values of nibbles
struct q4_0_values {
    static constexpr int8_t at[16] = { -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7 };
};

// Calls f with the type as a constant; false: rows of the type have no blocks
template <class F>
bool with_block_type(row_type type, F f) {
    switch (type) {
    case row_type::q8_0:
        f(type_constant<row_type::q8_0>{});
        return true;
    case row_type::q4_0:
        f(type_constant<row_type::q4_0>{});
        return true;
    case row_type::q5_0:
        f(type_constant<row_type::q5_0>{});
        return true;
    case row_type::lm4:
        f(type_constant<row_type::lm4>{});
        return true;
    case row_type::tc3:
        f(type_constant<row_type::tc3>{});
        return true;
    default:
        return false;
    }
}

// Bytes of a head's row of d elements
inline int64_t bytes_of_row(const attention_rows & rows, int d) {
    int64_t bytes = rows.type == row_type::f16 ? 2 * d : int64_t(rows.head);
    with_block_type(rows.type,
                    [&](auto type) { bytes = d / block_elements(type.value) * int64_t(block_bytes(type.value)); });
    return bytes;
}

// Of 127 2^23, what makes the error of vector layers' rough_exp2() as large above as below
constexpr float rough_exp2_bias = 0x1p23f * (127.0f - 0.043f);

// A block in F32
struct plain_blocks {
    static void dequantise(type_constant<row_type::q8_0>, const char * p, float * out) {
        const float d = half_at(p);
        for (int i = 0; i < 32; i++) {
            out[i] = d * static_cast<int8_t>(p[2 + i]);
        }
    }

    static void dequantise(type_constant<row_type::q4_0>, const char * p, float * out) {
        look_up_nibbles<q4_0_values>(half_at(p), p + 2, out);
    }
    static void dequantise(type_constant<row_type::lm4>, const char * p, float * out) { dequantise_lm4(p, out); }
    static void dequantise(type_constant<row_type::tc3>, const char * p, float * out) { dequantise_tc3(p, out); }

    // d (n - 16) of nibbles whose fifth bits are in `high`
    static void dequantise_fives(float d, uint32_t high, const char * nibbles, float * out) {
        for (int i = 0; i < 16; i++) {
            const int byte = static_cast<uint8_t>(nibbles[i]);
            out[i]         = d * float((byte & 15) | int(high >> i & 1) << 4) + -16.0f * d;
            out[i + 16]    = d * float(byte >> 4 | int(high >> (i + 16) & 1) << 4) + -16.0f * d;
        }
    }
    static uint32_t bits(const char * p) {
        uint32_t x;
        std::memcpy(&x, p, 4);
        return x;
    }
    static void dequantise(type_constant<row_type::q5_0>, const char * p, float * out) {
        dequantise_fives(half_at(p), bits(p + 2), p + 6, out);
    }
};

// A head of a key's row in F32
inline void dequantise_row(const attention_rows & rows, int64_t key, int head, int d, float * out) {
    const char * p = key_row(rows, key, head);
    switch (rows.type) {
    case row_type::f16:
        for (int i = 0; i < d; i++) {
            out[i] = half_at(p + 2 * i);
        }
        break;
    case row_type::other:
        rows.to_float(p, out, d);
        break;
    default:
        with_block_type(rows.type, [&](auto type) {
            for (int i = 0; i < d; i += block_elements(type.value), p += block_bytes(type.value)) {
                plain_blocks::dequantise(type, p, out + i);
            }
        });
    }
}

} // namespace
} // namespace mixedkv
