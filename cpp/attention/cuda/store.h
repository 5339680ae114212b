// Stores K and V of a micro-batch: scaled, rotated, in the type of the cold rows, and rounded to F16 for the ring. The
// same bits as llama.cpp's own conversions, and in lm4 and tc3 (store_levels.h) those of the CPU, but for numbers that
// F16 cannot hold: they become its largest, as on the CPU.

#pragma once

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

struct q4_0_writer {
    static constexpr int units = 1, block_bytes = 18;

    MIXEDKV_DEVICE void write(char * unit, const float * block) {
        const float x = *block;
        const float d = warp_extreme(x) / -8.0f;
        const int   q = min_of(15, int(x * (d != 0.0f ? 1.0f / d : 0.0f) + 8.5f));
        write_nibbles(unit + 2, q);
        if (lane() == 0) {
            store_half(unit, d);
        }
    }
};

struct q5_0_writer {
    static constexpr int units = 1, block_bytes = 22;

    MIXEDKV_DEVICE void write(char * unit, const float * block) {
        const float x = *block;
        const float d = warp_extreme(x) / -16.0f;
        const int   q = min_of(31, int(x * (d != 0.0f ? 1.0f / d : 0.0f) + 16.5f));
        write_nibbles(unit + 6, q);
        uint32_t fifths = uint32_t(q >> 4 & 1) << lane();
        for (int h = 1; h < warp_size; h *= 2) {
            fifths |= shuffle_xor(fifths, h);
        }
        if (lane() == 0) {
            store_half(unit, d);
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
MIXEDKV_DEVICE void write_head(stored_type type, char * to, int head, const float (&x)[n]) {
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
        write_blocks<q5_0_writer>(to, head, x);
    } else {
        write_blocks<q4_0_writer>(to, head, x);
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
    write_head(type, s.cold + s.cold_rows[token] * s.cold_row, head, x);
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
