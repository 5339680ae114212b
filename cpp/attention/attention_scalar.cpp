// The oracle: one key at a time, as the formula in attention.h reads. Every other body is tested against the same
// reference as this one, and it is what runs on processors without a body of their own.

#include "key_span.h"
#include "row_types.h"

#include "simd/half.h"
#include "simd/rotation.h"

#include <cmath>

namespace mixedkv {
namespace {

float score(const attention_args & a, const float * q, const float * k, float subtracted_bias, float bias) {
    float dot = subtracted_bias;
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

void begin(const item_memory & m, int d_v) {
    for (int row = 0; row < m.rows; row++) {
        m.max[row] = -INFINITY;
        m.sum[row] = 0.0f;
        std::memset(m.acc + row * m.d_v_padded, 0, d_v * sizeof(float));
    }
}

void add_sums(const row_sums & to, const row_sums & more, int row, int d_v, int64_t d_v_padded) {
    const float max = more.max[row] > to.max[row] ? more.max[row] : to.max[row];
    if (max == -INFINITY) {
        return;
    }
    const float old = std::exp2(to.max[row] - max), now = std::exp2(more.max[row] - max);
    for (int i = 0; i < d_v; i++) {
        float & x = to.acc[row * d_v_padded + i];
        x         = (old > 0.0f ? old * x : 0.0f) + (now > 0.0f ? now * more.acc[row * d_v_padded + i] : 0.0f);
    }
    to.sum[row] = old * to.sum[row] + now * more.sum[row];
    to.max[row] = max;
}

// Against the keys of the split at hand
void run_split(const attention_item & w, int i, const item_memory & m) {
    const attention_args & a       = *w.args;
    const int              group   = a.n_head / a.n_head_kv;
    const float *          queries = static_cast<const float *>(m.q);
    begin(m, a.d_v);
    float      k[attention_max_head_size];
    float      v[attention_max_head_size];
    const auto add_key = [&](const attention_segment & s, int64_t key, const key_span & span) {
        dequantise_row(s.k, key, w.head0 + i, a.d_k, k);
        dequantise_row(s.v, key, w.head0 + i, a.d_v, v);
        for (int row = 0; row < m.rows; row++) {
            const int64_t query = w.q0 + row / group;
            const int     head  = (w.head0 + i) * group + row % group;
            float         bias  = 0.0f;
            if (span.mask || a.mask) {
                bias = alibi_slope(a, head) * half_to_float(*mask_of(w, span, row / group));
            }
            if (bias != -INFINITY && may_read(w, span, row / group)) {
                const float subtracted_bias = score_pairs(a, s, key, query, head);
                accumulate(m, row, a.d_v, score(a, queries + row * a.d_k, k, subtracted_bias, bias), v);
            }
        }
    };
    mask_state states[1];
    for (int64_t segment = 0, first = 0; segment < a.n_segments; first += a.segments[segment++].n) {
        const attention_segment & s = a.segments[segment];
        for (int64_t key = 0; key < s.n; key++) {
            if (first + key >= w.k0 && first + key < w.k1) {
                add_key(s, key, { &s, key, first + key, 1, states });
            }
        }
    }
    for (int64_t block = w.block0; block < w.block1; block++) {
        for (int place = 0; place < a.order.blocks[block].n; place++) {
            const key_span span   = span_of(a, a.order.blocks[block], place, 1, states);
            const int64_t  column = span.list ? *span.list : span.column;
            if (column >= 0) {
                const placed_key at(a, column);
                add_key(*at.segment, at.key, span);
            }
        }
    }
}

void run_head(const attention_item & w, int i) {
    const attention_args & a     = *w.args;
    const int              group = a.n_head / a.n_head_kv;
    const item_memory      m(a, w.decode, w.n_queries, w.memory, i);
    for (int row = 0; row < m.rows; row++) {
        load_query(a, w.q0 + row / group, (w.head0 + i) * group + row % group, 1.0f,
                   static_cast<float *>(m.q) + row * a.d_k);
        m.all.max[row] = -INFINITY;
        m.all.sum[row] = 0.0f;
    }
    attention_item part = w;
    for (int64_t split = w.split0; split < w.split1; split++) {
        go_to_split(part, split);
        run_split(part, i, m);
        for (int row = 0; !w.decode && row < m.rows; row++) {
            add_sums(m.all, m, row, a.d_v, m.d_v_padded);
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
        const item_memory part(a, first.decode, first.n_queries, first.memory, i);
        for (int row = 0; row < part.rows; row++) {
            const int head = (first.head0 + i) * group + row % group;
            float *   out  = output_row(a, first.q0 + row / group, head);
            for (int c = 1; c < n_chunks; c++) {
                add_sums(part.all,
                         { chunk_of(part.max, c, chunk_stride), chunk_of(part.sum, c, chunk_stride),
                           chunk_of(part.acc, c, chunk_stride) },
                         row, a.d_v, part.d_v_padded);
            }
            float sum = part.all.sum[row];
            if (a.sinks) {
                sum += std::exp2(a.sinks[head] * log2e - part.all.max[row]);
            }
            for (int d = 0; d < a.d_v; d++) {
                const bool any = part.all.max[row] != -INFINITY && sum > 0.0f;
                out[d]         = any ? part.all.acc[row * part.d_v_padded + d] / sum : 0.0f;
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
    static constexpr attention_kernels kernels = { "scalar", supported,       true,    run,    merge,
                                                   rotate,   least_error_any, nullptr, nullptr };
    return &kernels;
}

} // namespace mixedkv
