// Stores K and V of a micro-batch: scaled, rotated, in the type of the cold rows, and rounded to F16 for the ring. The
// same bits as on a CPU that rounds products by themselves (x86-64): of Q4_0 and Q5_0 those of least_error_body.h where
// there is a ring, and llama.cpp's where there is none. Numbers that F16 cannot hold become its largest.

#pragma once

#include "attention/least_error.h"
#include "problem.h"
#include "store_levels.h"

namespace mixedkv {
namespace cuda {

// K or V
struct store_rows {
    const char *    from       = nullptr; // F32 [n_tokens, n_head_kv, d]
    int64_t         from_token = 0;       // bytes
    int64_t         from_head  = 0;
    const float *   scale      = nullptr; // [n_head_kv, d], nullptr: 1
    int             rotation   = 0;
    char *          cold       = nullptr; // of all streams
    int64_t         cold_row   = 0;
    const int64_t * cold_rows  = nullptr; // [n_tokens], where a token's row goes
};

struct store_problem {
    int        n_tokens  = 0;
    int        n_head_kv = 0;
    store_rows k, v;
    uint16_t * f16 = nullptr; // [n_tokens, n_head_kv * (d_k + d_v)], K first; nullptr: there is no ring
};

// The element of the largest magnitude, with its sign; of equal magnitudes the first lane's
MIXEDKV_DEVICE float warp_extreme(float x) {
    int at = lane();
    for (int h = 1; h < warp_size; h *= 2) {
        const float other    = shuffle_xor(x, h);
        const int   other_at = int(shuffle_xor(uint32_t(at), h));
        if (fabsf(other) > fabsf(x) || (fabsf(other) == fabsf(x) && other_at < at)) {
            x  = other;
            at = other_at;
        }
    }
    return x;
}

// How a block is written: of each of its units of 32 elements one a lane
struct f16_writer {
    static constexpr int units = 1, block_bytes = 64;

    MIXEDKV_DEVICE void write(char * unit, const float * block) { store_half(unit + 2 * lane(), *block); }
};

struct q8_0_writer {
    static constexpr int units = 1, block_bytes = 34;

    MIXEDKV_DEVICE void write(char * unit, const float * block) {
        const float x    = *block;
        const float d    = warp_max(fabsf(x)) / 127.0f;
        const int   q    = int(roundf(x * (d != 0.0f ? 1.0f / d : 0.0f)));
        unit[2 + lane()] = char(q);
        if (lane() == 0) {
            store_half(unit, d);
        }
    }
};

MIXEDKV_DEVICE float sum_by_halves(float x) {
#pragma unroll
    for (int h = warp_size / 2; h > 0; h /= 2) {
        x = exact_sum(x, shuffle_xor(x, h));
    }
    return x;
}

// x / scale, rounded
template <class Integers>
MIXEDKV_DEVICE float to_block_integer(float x, float inverse) {
    const float y = exact_product(inverse, x);
    return rintf(y < float(Integers::high) ? y : float(Integers::high));
}

// Returns the lane's integer, from 0 on, and stores the scale of the block.
template <class Integers, bool least_error>
MIXEDKV_DEVICE int store_scale(char * unit, float x) {
    if constexpr (!least_error) {
        const float d = warp_extreme(x) / float(Integers::low);
        if (lane() == 0) {
            store_half(unit, d);
        }
        const int most = Integers::high - Integers::low;
        return min_of(most, int(x * (d != 0.0f ? 1.0f / d : 0.0f) + (0.5f - float(Integers::low))));
    }
    const float most = warp_max(max_of(x, 0.0f)), least = warp_max(max_of(-x, 0.0f));
    const float largest = most > least ? most : -least;
    const float xx      = sum_by_halves(exact_product(x, x));

    float       inverse = 0.0f, scale = exact_quotient(largest, float(Integers::low)), gain = 0.0f;
    const float tries[] = { Integers::first, Integers::second, Integers::third, Integers::fourth };
#pragma unroll
    for (const float integer : tries) {
        const float i = exact_quotient(integer, largest), q = to_block_integer<Integers>(x, i);
        const float xy = sum_by_halves(exact_product(q, x)), yy = sum_by_halves(q * q);
        const float g = exact_quotient(exact_product(xy, xy), yy);
        if (g > gain) {
            gain    = g;
            scale   = exact_quotient(xx, xy);
            inverse = i;
        }
    }
    if (lane() == 0) {
        store_half(unit, scale);
    }
    return int(to_block_integer<Integers>(x, inverse)) - Integers::low;
}

template <bool least_error>
struct q4_0_writer {
    static constexpr int units = 1, block_bytes = q4_0_integers::bytes;

    MIXEDKV_DEVICE void write(char * unit, const float * block) {
        write_nibbles(unit + 2, store_scale<q4_0_integers, least_error>(unit, *block));
    }
};

template <bool least_error>
struct q5_0_writer {
    static constexpr int units = 1, block_bytes = q5_0_integers::bytes;

    MIXEDKV_DEVICE void write(char * unit, const float * block) {
        const int q = store_scale<q5_0_integers, least_error>(unit, *block);
        write_nibbles(unit + 6, q);
        uint32_t fifths = uint32_t(q >> 4 & 1) << lane();
        for (int h = 1; h < warp_size; h *= 2) {
            fifths |= shuffle_xor(fifths, h);
        }
        if (lane() == 0) {
            store_u16(unit + 2, fifths);
            store_u16(unit + 4, fifths >> 16);
        }
    }
};

struct lm4_writer {
    static constexpr int units = 2, block_bytes = LM4_BYTES;

    MIXEDKV_DEVICE void write(char * to, const float * block) { store_lm4(to, block); }
};

struct tc3_writer {
    static constexpr int units = 2, block_bytes = TC3_BYTES;

    MIXEDKV_DEVICE void write(char * to, const float * block) { store_tc3(to, block); }
};

constexpr int store_warps = 4;

// One head of one token
template <class Writer, int n>
MIXEDKV_DEVICE void write_blocks(char * to, int head, const float (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n / Writer::units; i++) {
        Writer::write(to + (head * (n / Writer::units) + i) * Writer::block_bytes, x + i * Writer::units);
    }
}

template <int n>
MIXEDKV_DEVICE void write_head(stored_type type, bool least_error, char * to, int head, const float (&x)[n]) {
    if constexpr (n % 2 == 0) {
        if (type == stored_type::lm4) {
            return write_blocks<lm4_writer>(to, head, x);
        }
        if (type == stored_type::tc3) {
            return write_blocks<tc3_writer>(to, head, x);
        }
    }
    if (type == stored_type::f16) {
        write_blocks<f16_writer>(to, head, x);
    } else if (type == stored_type::q8_0) {
        write_blocks<q8_0_writer>(to, head, x);
    } else if (type == stored_type::q5_0) {
        least_error ? write_blocks<q5_0_writer<true>>(to, head, x) : write_blocks<q5_0_writer<false>>(to, head, x);
    } else {
        least_error ? write_blocks<q4_0_writer<true>>(to, head, x) : write_blocks<q4_0_writer<false>>(to, head, x);
    }
}

template <int d>
MIXEDKV_DEVICE void store_head(const store_rows & s, stored_type type, int token, int head, uint16_t * f16) {
    constexpr int n    = d / warp_size;
    const auto *  from = reinterpret_cast<const float *>(s.from + token * s.from_token + head * s.from_head);
    float         x[n];
#pragma unroll
    for (int i = 0; i < n; i++) {
        x[i] = from[i * warp_size + lane()];
        if (s.scale) {
            x[i] *= s.scale[head * d + i * warp_size + lane()];
        }
    }
    if (s.rotation) {
        rotate(x, s.rotation);
    }
#pragma unroll
    for (int i = 0; i < n; i++) {
        constexpr float max = 65504.0f;
        x[i]                = x[i] > max ? max : x[i] < -max ? -max : x[i] == x[i] ? x[i] : 0.0f;
        if (f16) {
            f16[i * warp_size + lane()] = float_to_half_bits(x[i]);
        }
    }
    write_head(type, f16 != nullptr, s.cold + s.cold_rows[token] * s.cold_row, head, x);
}

// Grid: tokens, heads of K and V by store_warps. Block: store_warps warps, of which each has a head.
template <int d>
MIXEDKV_KERNEL(store_warps * warp_size, 1)
store_kernel(const store_problem p, stored_type type_k, stored_type type_v) {
    wait_for_previous();
    start_next(); // attention may look at its queries: they were made before
    const int        token = block_x(), i = block_y() * store_warps + thread() / warp_size, head = i % p.n_head_kv;
    uint16_t * const f16 = p.f16 ? p.f16 + int64_t(token) * p.n_head_kv * 2 * d : nullptr;
    if (i < 2 * p.n_head_kv) {
        const bool is_v = i >= p.n_head_kv;
        store_head<d>(is_v ? p.v : p.k, is_v ? type_v : type_k, token, head, f16 ? f16 + i * d : nullptr);
    }
}

} // namespace cuda
} // namespace mixedkv
