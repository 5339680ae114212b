// Walsh-Hadamard rotation of rows, and the queries that come out of it.

#pragma once

#include "attention/kernel.h"

namespace mixedkv {
namespace {

// Sums of neighbours to the front, differences to the back: the step is the same at every level, so it vectorises at
// all.
inline void butterflies(const float * __restrict in, float * __restrict out, int n) {
    for (int i = 0; i < n / 2; i++) {
        out[i]         = in[2 * i] + in[2 * i + 1];
        out[i + n / 2] = in[2 * i] - in[2 * i + 1];
    }
}

// Each `edge` elements by the orthonormal Hadamard matrix, `edge` a power of two. log2(edge) steps bring every element
// back to its place; sums are formed in the order in which ggml forms them, so rows get the same bits.
inline void rotate(float * x, int64_t n, int edge) {
    alignas(64) float a[attention_max_head_size];
    alignas(64) float b[attention_max_head_size];
    const float       scale = 1.0f / __builtin_sqrtf(float(edge));
    for (int64_t i = 0; i < n; i += edge, x += edge) {
        float * in  = a;
        float * out = b;
        for (int j = 0; j < edge; j++) {
            in[j] = x[j] * scale;
        }
        for (int length = 1; length < edge; length *= 2) {
            butterflies(in, out, edge);
            float * const before = in;
            in                   = out;
            out                  = before;
        }
        std::memcpy(x, in, edge * sizeof(float));
    }
}

// d_k floats of one query, scaled and rotated if need be, times `factor`
inline void load_query(const attention_args & a, int64_t query, int head, float factor, float * out) {
    std::memcpy(out, query_row(a, query, head), a.d_k * sizeof(float));
    if (a.scale_q) {
        const float * scale = a.scale_q + int64_t(head / (a.n_head / a.n_head_kv)) * a.d_k;
        for (int i = 0; i < a.d_k; i++) {
            out[i] *= scale[i];
        }
    }
    if (a.rotation_q) {
        rotate(out, a.d_k, a.rotation_q);
    }
    for (int i = 0; i < a.d_k; i++) {
        out[i] *= factor;
    }
}

} // namespace
} // namespace mixedkv
