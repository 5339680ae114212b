#include "attention/sparse/mass.h"

#include "attention/row_types.h"
#include "attention/simd/half.h"
#include "attention/simd/rotation.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace mixedkv {

namespace {

// Keys of one KV head as [d_k, n]: a score is then added to channel by channel, which vectorises.
void dequantise_head(const attention_args & a, int head_kv, int64_t n, std::vector<float> & keys) {
    float   row[attention_max_head_size];
    int64_t column = 0;
    keys.resize(a.d_k * n);
    for (int segment = 0; segment < a.n_segments; segment++) {
        for (int64_t key = 0; key < a.segments[segment].n; key++, column++) {
            dequantise_row(a.segments[segment].k, key, head_kv, a.d_k, row);
            for (int i = 0; i < a.d_k; i++) {
                keys[i * n + column] = row[i];
            }
        }
    }
}

void add_subtracted_bias(const attention_args & a, int64_t query, int head, std::vector<float> & scores) {
    int64_t column = 0;
    for (int i = 0; i < a.n_segments; i++) {
        for (int64_t key = 0; key < a.segments[i].n; key++, column++) {
            scores[column] += a.scale * score_pairs(a, a.segments[i], key, query, head);
        }
    }
}

void fill_scores(const attention_args & a, int64_t query, int head, const std::vector<float> & keys,
                 std::vector<float> & scores) {
    const int64_t n = int64_t(scores.size());
    float         q[attention_max_head_size];
    load_query(a, query, head, a.scale, q);
    std::fill(scores.begin(), scores.end(), 0.0f);
    for (int i = 0; i < a.d_k; i++) {
        const float * channel = keys.data() + i * n;
        for (int64_t key = 0; key < n; key++) {
            scores[key] += q[i] * channel[key];
        }
    }
    add_subtracted_bias(a, query, head, scores);
    for (int64_t key = 0; key < n && a.logit_softcap > 0.0f; key++) {
        scores[key] = a.logit_softcap * std::tanh(scores[key] / a.logit_softcap);
    }
    const float slope = a.max_alibi_bias > 0.0f ? alibi_slope(a, head) : 1.0f;
    for (int64_t key = 0; key < n && a.mask; key++) {
        const float bias = half_to_float(mask_row(a, query)[key]);
        scores[key]      = bias == -INFINITY ? bias : scores[key] + slope * bias;
    }
}

void add_weights(const attention_args & a, int head, std::vector<float> & scores, float * mass) {
    float max = a.sinks ? a.sinks[head] : -INFINITY;
    for (const float score : scores) {
        max = score > max ? score : max;
    }
    if (max == -INFINITY) {
        return;
    }
    float sum = a.sinks ? std::exp(a.sinks[head] - max) : 0.0f;
    for (float & score : scores) {
        score = score == -INFINITY ? 0.0f : std::exp(score - max);
        sum += score;
    }
    for (int64_t key = 0; key < a.segments[0].n; key++) {
        mass[key] += scores[key] / sum;
    }
}

} // namespace

void attention_mass(const attention_args & a, int ith, int nth, float * mass) {
    const int          group = a.n_head / a.n_head_kv;
    std::vector<float> keys;
    std::vector<float> scores(count_keys(a));
    for (int head_kv = ith; head_kv < a.n_head_kv; head_kv += nth) {
        dequantise_head(a, head_kv, int64_t(scores.size()), keys);
        for (int64_t query = 0; query < a.n_queries; query++) {
            for (int i = 0; i < group; i++) {
                fill_scores(a, query, head_kv * group + i, keys, scores);
                add_weights(a, head_kv * group + i, scores, mass);
            }
        }
    }
}

} // namespace mixedkv
