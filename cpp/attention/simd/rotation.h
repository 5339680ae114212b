// Walsh-Hadamard rotation of rows, and the queries that come out of it.

#pragma once

#include "attention/kernel.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace mixedkv {
namespace {

// x[i] + x[i + h] and x[i] - x[i + h], in place
inline void butterflies(float * x, int64_t n, int64_t h) {
    for (int64_t i = 0; i < n; i += 2 * h) {
        for (int64_t j = i; j < i + h; j++) {
            const float a = x[j];
            const float b = x[j + h];
            x[j]          = a + b;
            x[j + h]      = a - b;
        }
    }
}

#ifdef __AVX2__
// The steps of 1, 2 and 4 in registers of eight
inline void rotate_eights(float * x, int n, float scale) {
    const __m256 one  = _mm256_setr_ps(0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f);
    const __m256 two  = _mm256_setr_ps(0.0f, 0.0f, -0.0f, -0.0f, 0.0f, 0.0f, -0.0f, -0.0f);
    const __m256 four = _mm256_setr_ps(0.0f, 0.0f, 0.0f, 0.0f, -0.0f, -0.0f, -0.0f, -0.0f);
    for (int i = 0; i < n; i += 8) {
        __m256 y = _mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(scale));
        y        = _mm256_add_ps(_mm256_permute_ps(y, 0xb1), _mm256_xor_ps(y, one));
        y        = _mm256_add_ps(_mm256_permute_ps(y, 0x4e), _mm256_xor_ps(y, two));
        y        = _mm256_add_ps(_mm256_permute2f128_ps(y, y, 1), _mm256_xor_ps(y, four));
        _mm256_storeu_ps(x + i, y);
    }
}
#endif

// Sums of neighbours to the front, differences to the back: the step is the same at every level, so compilers make
// vectors of all of them.
inline void neighbours(const float * __restrict in, float * __restrict out, int n) {
    for (int i = 0; i < n / 2; i++) {
        out[i]         = in[2 * i] + in[2 * i + 1];
        out[i + n / 2] = in[2 * i] - in[2 * i + 1];
    }
}

// Each `edge` elements by the orthonormal Hadamard matrix, `edge` a power of two. Sums are formed in the order in which
// ggml forms them, so rows get the same bits. log2(edge) steps of neighbours bring every element back to its place.
inline void rotate(float * x, int64_t n, int edge) {
    const float scale = 1.0f / __builtin_sqrtf(float(edge));
#ifdef __AVX2__
    if (edge >= 8) {
        for (int64_t i = 0; i < n; i += edge, x += edge) {
            rotate_eights(x, edge, scale);
            for (int h = 8; h < edge; h *= 2) {
                butterflies(x, edge, h);
            }
        }
        return;
    }
#endif
    alignas(64) float a[attention_max_head_size];
    alignas(64) float b[attention_max_head_size];
    for (int64_t i = 0; i < n; i += edge, x += edge) {
        float * in  = a;
        float * out = b;
        for (int j = 0; j < edge; j++) {
            in[j] = x[j] * scale;
        }
        for (int length = 1; length < edge; length *= 2) {
            neighbours(in, out, edge);
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
