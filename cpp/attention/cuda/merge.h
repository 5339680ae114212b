// What comes after the splits of the keys: their sums are put together, and the output leaves the basis of V's rows.

#pragma once

#include "problem.h"

namespace mixedkv {
namespace cuda {

constexpr int merge_warps = 8;

MIXEDKV_SHARED(int) merge_bytes(int d_v) {
    return merge_warps * (d_v + 2) * 4;
}

// Copies the F16 row of a token to the ring, by one block; the last row of a ring is one that nobody reads.
MIXEDKV_DEVICE void write_ring_row(const attention_problem & p, int token) {
    const int64_t row = p.ring_rows[token];
    if (row % p.ring.n == p.ring.n - 1) {
        return;
    }
    const int  stream = token / p.n_tokens;
    const auto copy   = [&](const row_view & from, const row_view & to) {
        // streams of a ring follow each other
        const char * const source = from.data + stream * from.stream + (token % p.n_tokens) * from.row;
        char * const       target = const_cast<char *>(to.data) + (row - p.first_ring_row) * to.row;
        for (int i = 16 * thread(); i < to.row; i += 16 * merge_warps * warp_size) {
            *reinterpret_cast<words<4> *>(target + i) = load_words<4>(source + i);
        }
    };
    copy(p.current.k, p.ring.k);
    copy(p.current.v, p.ring.v);
}

// Sums over some splits of a row, which a warp has: lane l elements l, l + 32, ...
template <int n>
struct row_sums {
    float m    = -INFINITY;
    float l    = 0.0f;
    float o[n] = {};

    MIXEDKV_DEVICE_MEMBER void add(float other_m, float other_l, const float * other_o) {
        const float factor = exp2_of(other_m - m); // m is the largest already
        l += factor * other_l;
#pragma unroll
        for (int i = 0; i < n; i++) {
            o[i] += factor * other_o[i * warp_size + lane()];
        }
    }
};

// Grid: query rows by `rows_per_block`, then the tokens of the micro-batch if their rows go to the ring. Block:
// merge_warps warps, which share a row or have one each.
template <int d_v, int rows_per_block>
MIXEDKV_KERNEL(merge_warps * warp_size, 1)
merge_kernel(const attention_problem p) {
    constexpr int n = d_v / warp_size, share = merge_warps / rows_per_block;
    wait_for_previous();
    start_next();
    const int n_rows   = p.n_stream * p.n_tokens * p.n_head;
    const int n_blocks = (n_rows + rows_per_block - 1) / rows_per_block;
    if (block_x() >= n_blocks) {
        write_ring_row(p, block_x() - n_blocks);
        return;
    }
    const int   warp = thread() / warp_size % share, row = block_x() * rows_per_block + thread() / warp_size / share;
    row_sums<n> sums;
    if (row < n_rows) {
        const float * const weights = p.weights + int64_t(row) * p.n_splits * 2;
        const float * const values  = p.sums + int64_t(row) * p.n_splits * d_v;
        for (int split = warp; split < p.n_splits; split += share) {
            sums.m = max_of(sums.m, weights[2 * split]);
        }
#pragma unroll 4
        for (int split = warp; split < p.n_splits && sums.m != -INFINITY; split += share) {
            sums.add(weights[2 * split], weights[2 * split + 1], values + int64_t(split) * d_v);
        }
    }
    if constexpr (share > 1) {
        float * const all_o = reinterpret_cast<float *>(shared_memory());
        float * const all_m = all_o + merge_warps * d_v;
        float * const all_l = all_m + merge_warps;
#pragma unroll
        for (int i = 0; i < n; i++) {
            all_o[warp * d_v + i * warp_size + lane()] = sums.o[i];
        }
        if (lane() == 0) {
            all_m[warp] = sums.m;
            all_l[warp] = sums.l;
        }
        sync_block();
        if (warp > 0) {
            return;
        }
        sums = {};
#pragma unroll
        for (int w = 0; w < share; w++) {
            sums.m = max_of(sums.m, all_m[w]);
        }
#pragma unroll
        for (int w = 0; w < share; w++) {
            if (sums.m != -INFINITY) {
                sums.add(all_m[w], all_l[w], all_o + w * d_v);
            }
        }
    }
    if (row >= n_rows) {
        return;
    }
    if (p.sinks && sums.m != -INFINITY) {
        sums.l += exp2_of(p.sinks[row % p.n_head] * log2e - sums.m);
    }
    const float inverse = sums.l > 0.0f ? 1.0f / sums.l : 0.0f; // a query that sees no key gives zeros
#pragma unroll
    for (int i = 0; i < n; i++) {
        sums.o[i] *= inverse;
    }
    if (p.rotation_v) {
        rotate(sums.o, p.rotation_v);
    }
#pragma unroll
    for (int i = 0; i < n; i++) {
        p.out[int64_t(row) * d_v + i * warp_size + lane()] = sums.o[i];
    }
}

} // namespace cuda
} // namespace mixedkv
