// What kernels of attention are given: one layer's attention in a step, all of it in device memory.

#pragma once

#include "device.h"

namespace mixedkv {
namespace cuda {

constexpr float log2e = 1.44269504f; // scores are exponents of two once they are complete: "in bits"

// Rows of K or V. The rows of the next stream of sequences lie `stream` bytes further.
struct row_view {
    const char * data   = nullptr;
    int64_t      row    = 0; // bytes from one key to the next
    int64_t      head   = 0; // bytes from one KV head to the next
    int64_t      stream = 0;
};

struct key_segment {
    row_view k, v;
    int      n = 0; // keys of a stream
};

// As attention.h defines them: the columns of the mask are the cold keys, then those of the ring and of the
// micro-batch.
struct attention_problem {
    int n_head    = 0;
    int n_head_kv = 0;
    int n_tokens  = 0; // of a stream
    int n_stream  = 1;

    const char * q       = nullptr; // F32 [n_stream, n_tokens, n_head, d_k]
    int64_t      q_token = 0;       // bytes
    int64_t      q_head  = 0;

    const float * scale_q    = nullptr; // [n_head_kv, d_k], Q times it before it is rotated; nullptr: 1
    int           rotation_q = 0;       // edge of the Hadamard blocks, 0: none
    int           rotation_v = 0;       // of V, which the output is rotated back by

    key_segment cold;
    key_segment ring; // in F16, as the next
    key_segment current;

    // F16 [n_stream, n_tokens, columns]. Rows begin at multiples of 16 bytes, as do the columns of ring and
    // micro-batch, and there are 32 columns from the last multiple of 32 keys on.
    const uint16_t * mask          = nullptr;
    int64_t          mask_token    = 0; // elements
    int64_t          mask_stream   = 0;
    int              first_hot_key = 0; // the column of the ring's first row

    float         scale          = 1.0f;
    float         max_alibi_bias = 0.0f;
    float         logit_softcap  = 0.0f;
    const float * sinks          = nullptr; // [n_head]

    // Partial results: keys are cut into splits, each of which has sums of its own.
    int     n_splits      = 1;
    int     n_cold_splits = 1;
    int     split_keys    = 0;       // of a cold split
    int     hot_keys      = 0;       // of a split behind the cold ones
    float * sums          = nullptr; // [n_stream * n_tokens * n_head, n_splits, d_v]
    float * weights = nullptr; // [n_stream * n_tokens * n_head, n_splits, 2]: largest score in bits, sum of weights

    float * out = nullptr; // [n_stream * n_tokens, n_head, d_v]

    // F16 rows of the micro-batch go to the ring when all has been read; nullptr: they do not
    const int64_t * ring_rows      = nullptr; // [n_stream * n_tokens], counted over all streams of the cache
    int64_t         first_ring_row = 0;       // of the first stream here

    MIXEDKV_SHARED_MEMBER int group() const { return n_head / n_head_kv; }
    MIXEDKV_SHARED_MEMBER int n_hot() const { return ring.n + current.n; }
};

// ALiBi slope of a head in bits, the rule of ggml_soft_max_ext; that of 1 without ALiBi
MIXEDKV_DEVICE float alibi_slope(const attention_problem & p, int head) {
    if (p.max_alibi_bias <= 0.0f) {
        return log2e;
    }
    int n = 1; // the largest power of two not above n_head
    while (2 * n <= p.n_head) {
        n *= 2;
    }
    const float exponent =
        head < n ? p.max_alibi_bias * float(head + 1) : p.max_alibi_bias / 2 * float(2 * (head - n) + 1);
    return exp2_of(-exponent / float(n)) * log2e;
}

// Rotates one row by Hadamard blocks of `edge` elements, by one warp: lane l has elements l, l + 32, ...
template <int n>
MIXEDKV_DEVICE void rotate(float (&x)[n], int edge) {
    for (int h = 1; h < warp_size && h < edge; h *= 2) {
        for (int i = 0; i < n; i++) {
            const float other = shuffle_xor(x[i], h);
            x[i]              = (lane() & h) ? other - x[i] : x[i] + other;
        }
    }
#pragma unroll
    for (int h = 1; h < n; h *= 2) {
        if (h * warp_size < edge) {
#pragma unroll
            for (int i = 0; i < n; i++) {
                if ((i & h) == 0 && i + h < n) {
                    const float a = x[i], b = x[i + h];
                    x[i]     = a + b;
                    x[i + h] = a - b;
                }
            }
        }
    }
    const float scale = edge > 1 ? 1.0f / sqrtf(float(edge)) : 1.0f;
    for (int i = 0; i < n; i++) {
        x[i] *= scale;
    }
}

// A query row, scaled and rotated, by one warp: its products with keys are scores in bits. Rows behind the last are
// zero. Rows are the tokens' heads that share a KV head, a token's together.
template <int n>
MIXEDKV_DEVICE void load_query(const attention_problem & p, int stream, int head_kv, int row, float (&x)[n]) {
    const int    group = p.group(), token = row / group, head = head_kv * group + row % group;
    const auto * from =
        reinterpret_cast<const float *>(p.q + (int64_t(stream) * p.n_tokens + token) * p.q_token + head * p.q_head);
#pragma unroll
    for (int i = 0; i < n; i++) {
        const int d = i * warp_size + lane();
        x[i]        = token < p.n_tokens ? from[d] * (p.scale * log2e) : 0.0f;
        if (p.scale_q) {
            x[i] *= p.scale_q[head_kv * n * warp_size + d];
        }
    }
    if (p.rotation_q) {
        rotate(x, p.rotation_q);
    }
}

// Where the K or V row of a cold key begins, or of a key of ring and micro-batch
MIXEDKV_DEVICE const char * find_row(const attention_problem & p, int stream, int head_kv, int key, bool is_hot,
                                     bool is_v) {
    const bool          is_current = is_hot && key >= p.ring.n;
    const key_segment & s          = is_current ? p.current : is_hot ? p.ring : p.cold;
    const row_view &    rows       = is_v ? s.v : s.k;
    return rows.data + stream * rows.stream + (is_current ? key - p.ring.n : key) * rows.row + head_kv * rows.head;
}

constexpr uint16_t hidden = 0xfc00; // in a mask: minus infinity

// What of a score in bits is left by a cap, if any
MIXEDKV_DEVICE float capped_score(const attention_problem & p, float score) {
    return p.logit_softcap == 0.0f ? score : p.logit_softcap * log2e * tanh_of(score / (p.logit_softcap * log2e));
}

// slope: in bits. What is hidden is minus infinity, and the mask of what is not is a finite number.
MIXEDKV_DEVICE float masked_score(float score, uint16_t mask, float slope) {
    return mask == hidden ? -INFINITY : score + slope * half_bits_to_float(mask);
}

// A weight of a row whose largest score is m, minus infinity if it sees nothing: 0 stands for that
MIXEDKV_DEVICE float base_of(float m) {
    return m == -INFINITY ? 0.0f : m;
}

// The largest power of two up to 16 that divides a row, by which it is copied
MIXEDKV_SHARED(int) copy_bytes(int bytes) {
    return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : 2;
}

} // namespace cuda
} // namespace mixedkv
