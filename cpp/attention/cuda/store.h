// Stores K and V of a micro-batch: scaled, rotated, in the type of the cold rows, and rounded to F16 for the ring. The
// same bits as llama.cpp's own conversions, but for numbers that F16 cannot hold: they become its largest, as on the
// CPU.

#pragma once

#include "problem.h"

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

MIXEDKV_DEVICE float warp_max(float x) {
    for (int h = 1; h < warp_size; h *= 2) {
        x = max_of(x, shuffle_xor(x, h));
    }
    return x;
}

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

MIXEDKV_DEVICE void store_u16(char * p, uint32_t x) {
    *reinterpret_cast<uint16_t *>(p) = uint16_t(x);
}

MIXEDKV_DEVICE void store_half(char * p, float x) {
    store_u16(p, float_to_half_bits(x));
}

// How a unit of 32 elements, one a lane, is written
struct f16_writer {
    static constexpr int unit_bytes = 64;
    MIXEDKV_DEVICE void  write(char * unit, float x) { store_half(unit + 2 * lane(), x); }
};

struct q8_0_writer {
    static constexpr int unit_bytes = 34;
    MIXEDKV_DEVICE void  write(char * unit, float x) {
        const float d    = warp_max(fabsf(x)) / 127.0f;
        const int   q    = int(roundf(x * (d != 0.0f ? 1.0f / d : 0.0f)));
        unit[2 + lane()] = char(q);
        if (lane() == 0) {
            store_half(unit, d);
        }
    }
};

// q of the lane and of the lane 16 further make a byte
MIXEDKV_DEVICE void write_nibbles(char * to, int q) {
    const uint32_t high = shuffle_xor(uint32_t(q), 16);
    if (lane() < 16) {
        to[lane()] = char((q & 15) | (high & 15) << 4);
    }
}

struct q4_0_writer {
    static constexpr int unit_bytes = 18;
    MIXEDKV_DEVICE void  write(char * unit, float x) {
        const float d = warp_extreme(x) / -8.0f;
        const int   q = min_of(15, int(x * (d != 0.0f ? 1.0f / d : 0.0f) + 8.5f));
        write_nibbles(unit + 2, q);
        if (lane() == 0) {
            store_half(unit, d);
        }
    }
};

struct q5_0_writer {
    static constexpr int unit_bytes = 22;
    MIXEDKV_DEVICE void  write(char * unit, float x) {
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

constexpr int store_warps = 4;

template <class Writer, int d>
MIXEDKV_DEVICE void store_head(const store_rows & s, int token, int head, uint16_t * f16) {
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
    char * const to = s.cold + s.cold_rows[token] * s.cold_row + head * n * Writer::unit_bytes;
#pragma unroll
    for (int i = 0; i < n; i++) {
        constexpr float max = 65504.0f;
        x[i]                = x[i] > max ? max : x[i] < -max ? -max : x[i] == x[i] ? x[i] : 0.0f;
        Writer::write(to + i * Writer::unit_bytes, x[i]);
        if (f16) {
            f16[i * warp_size + lane()] = float_to_half_bits(x[i]);
        }
    }
}

// Grid: tokens, heads of K and V by store_warps. Block: store_warps warps, of which each has a head.
template <class K, class V, int d_k, int d_v>
MIXEDKV_KERNEL(store_warps * warp_size, 1)
store_kernel(const store_problem p) {
    wait_for_previous();
    start_next(); // attention may look at its queries: they were made before
    const int        token = block_x(), i = block_y() * store_warps + thread() / warp_size, head = i % p.n_head_kv;
    uint16_t * const f16 = p.f16 ? p.f16 + int64_t(token) * p.n_head_kv * (d_k + d_v) : nullptr;
    if (i < p.n_head_kv) {
        store_head<K, d_k>(p.k, token, head, f16 ? f16 + head * d_k : nullptr);
    } else if (i < 2 * p.n_head_kv) {
        store_head<V, d_v>(p.v, token, head, f16 ? f16 + p.n_head_kv * d_k + head * d_v : nullptr);
    }
}

} // namespace cuda
} // namespace mixedkv
