// The oracle: one key at a time, as the formula in attention.h reads. Every other body is tested against the same
// reference as this one, and it is what runs on processors without a body of their own.

#include "kernel.h"
#include "row_types.h"

#include "simd/half.h"
#include "simd/rotation.h"

#include <cmath>

namespace mixedkv {
namespace {

float score(const attention_args & a, const float * q, const float * k, float lacking, float bias) {
    float dot = lacking;
    for (int i = 0; i < a.d_k; i++) {
        dot += q[i] * k[i];
    }
    dot *= a.scale;
    if (a.logit_softcap != 0.0f) {
        dot = a.logit_softcap * std::tanh(dot / a.logit_softcap);
    }
    return (dot + bias) * log2e;
}

void accumulate(const item_memory & m, int row, int d_v, float score, const float * v) {
    float * acc = m.acc + row * m.d_v_padded;
    if (score > m.max[row]) {
        const float correction = std::exp2(m.max[row] - score);
        m.max[row]             = score;
        m.sum[row] *= correction;
        for (int i = 0; i < d_v; i++) {
            acc[i] *= correction;
        }
    }
    const float p = std::exp2(score - m.max[row]);
    m.sum[row] += p;
    for (int i = 0; i < d_v; i++) {
        acc[i] += p * v[i];
    }
}

void run_head(const attention_item & w, int i) {
    const attention_args & a     = *w.args;
    const int              group = a.n_head / a.n_head_kv;
    const item_memory      m(a, w.few, w.n_queries, w.memory, i);
    float *                queries = static_cast<float *>(m.q);
    for (int row = 0; row < m.rows; row++) {
        m.max[row] = -INFINITY;
        m.sum[row] = 0.0f;
        load_query(a, w.q0 + row / group, (w.head0 + i) * group + row % group, 1.0f, queries + row * a.d_k);
        std::memset(m.acc + row * m.d_v_padded, 0, a.d_v * sizeof(float));
    }
    float k[attention_max_head_size];
    float v[attention_max_head_size];
    for (int64_t segment = 0, first = 0; segment < a.n_segments; first += a.segments[segment++].n) {
        const attention_segment & s = a.segments[segment];
        for (int64_t key = 0; key < s.n; key++) {
            if (first + key < w.k0 || first + key >= w.k1) {
                continue;
            }
            unpack_row(s.k, key, w.head0 + i, a.d_k, k);
            unpack_row(s.v, key, w.head0 + i, a.d_v, v);
            for (int row = 0; row < m.rows; row++) {
                const int64_t query = w.q0 + row / group;
                const int     head  = (w.head0 + i) * group + row % group;
                float         bias  = 0.0f;
                if (a.mask) {
                    bias = alibi_slope(a, head) * half_to_float(mask_row(a, query)[first + key]);
                }
                if (bias != -INFINITY) {
                    const float lacking = score_pairs(a, s, key, query, head);
                    accumulate(m, row, a.d_v, score(a, queries + row * a.d_k, k, lacking, bias), v);
                }
            }
        }
    }
}

void run(const attention_item & w) {
    for (int i = 0; i < w.n_head; i++) {
        run_head(w, i);
    }
}

void merge(const attention_item & first, int n_chunks, size_t chunk_stride) {
    const attention_args & a     = *first.args;
    const int              group = a.n_head / a.n_head_kv;
    for (int i = 0; i < first.n_head; i++) {
        const item_memory part(a, first.few, first.n_queries, first.memory, i);
        for (int row = 0; row < part.rows; row++) {
            const int head = (first.head0 + i) * group + row % group;
            float *   out  = output_row(a, first.q0 + row / group, head);
            float     max  = a.sinks ? a.sinks[head] * log2e : -INFINITY;
            for (int c = 0; c < n_chunks; c++) {
                const float m = chunk_of(part.max, c, chunk_stride)[row];
                max           = m > max ? m : max;
            }
            float sum = a.sinks && max != -INFINITY ? std::exp2(a.sinks[head] * log2e - max) : 0.0f;
            std::memset(out, 0, a.d_v * sizeof(float));
            for (int c = 0; c < n_chunks; c++) {
                const float m = chunk_of(part.max, c, chunk_stride)[row];
                if (m == -INFINITY) {
                    continue;
                }
                const float   weight = std::exp2(m - max);
                const float * acc    = chunk_of(part.acc, c, chunk_stride) + row * part.d_v_padded;
                sum += weight * chunk_of(part.sum, c, chunk_stride)[row];
                for (int d = 0; d < a.d_v; d++) {
                    out[d] += weight * acc[d];
                }
            }
            for (int d = 0; d < a.d_v; d++) {
                out[d] = sum > 0.0f ? out[d] / sum : 0.0f;
            }
            if (a.rotation_out) {
                rotate(out, a.d_v, a.rotation_out);
            }
        }
    }
}

bool supported() {
    return true;
}

} // namespace

const attention_kernels * attention_scalar() {
    static constexpr attention_kernels kernels = { "scalar", supported, run, merge, rotate, nullptr };
    return &kernels;
}

} // namespace mixedkv
