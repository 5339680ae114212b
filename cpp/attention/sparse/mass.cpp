#include "attention/sparse/mass.h"

#include "attention/row_types.h"
#include "attention/simd/half.h"
#include "attention/simd/rotation.h"
#include "attention/wide_registers.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace mixedkv {

namespace {

constexpr int together = 32; // keys whose scores are summed up in registers

int64_t padded(int64_t n) {
    return (n + together - 1) / together * together;
}

// Keys of one KV head as [d_k, padded(n)], so that scores of keys side by side are summed up channel by channel
void dequantise_head(const attention_args & a, int head_kv, int64_t n, std::vector<float> & keys) {
    float   row[attention_max_head_size];
    int64_t column = 0;
    n              = padded(n);
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

// scores[n] = the products of q with keys[d_k, n]; n: a multiple of `together`
template <int lanes>
[[gnu::always_inline]] inline void multiply(const float * q, int d_k, const float * keys, int64_t n, float * scores) {
    for (int64_t key = 0; key < n; key += together) {
        numbers<lanes> sums[together / lanes] = {};
        for (int i = 0; i < d_k; i++) {
            for (int part = 0; part < together / lanes; part++) {
                numbers<lanes> channel;
                std::memcpy(&channel, keys + i * n + key + part * lanes, sizeof(channel));
                sums[part] += q[i] * channel;
            }
        }
        std::memcpy(scores + key, sums, sizeof(sums));
    }
}

// scores: of all keys, and room for padded(n) of them
void fill_scores(const attention_args & a, int64_t query, int head, const std::vector<float> & keys, int64_t n,
                 std::vector<float> & scores) {
    float q[attention_max_head_size];
    load_query(a, query, head, a.scale, q);
    with_widest_registers([&](auto lanes) __attribute__((always_inline)) {
        multiply<lanes>(q, a.d_k, keys.data(), padded(n), scores.data());
    });
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

void add_weights(const attention_args & a, int head, int64_t n, std::vector<float> & scores, float * mass) {
    float max = a.sinks ? a.sinks[head] : -INFINITY;
    for (int64_t key = 0; key < n; key++) {
        max = scores[key] > max ? scores[key] : max;
    }
    if (max == -INFINITY) {
        return;
    }
    float sum = a.sinks ? std::exp(a.sinks[head] - max) : 0.0f;
    for (int64_t key = 0; key < n; key++) {
        scores[key] = scores[key] == -INFINITY ? 0.0f : std::exp(scores[key] - max);
        sum += scores[key];
    }
    for (int64_t key = 0; key < a.segments[0].n; key++) {
        mass[key] += scores[key] / sum;
    }
}

} // namespace

void attention_mass(const attention_args & a, int ith, int nth, float * mass) {
    const int          group = a.n_head / a.n_head_kv;
    const int64_t      n     = count_keys(a);
    std::vector<float> keys, scores(padded(n));
    for (int head_kv = ith; head_kv < a.n_head_kv; head_kv += nth) {
        dequantise_head(a, head_kv, n, keys);
        for (int64_t query = 0; query < a.n_queries; query++) {
            for (int i = 0; i < group; i++) {
                fill_scores(a, query, head_kv * group + i, keys, n, scores);
                add_weights(a, head_kv * group + i, n, scores, mass);
            }
        }
    }
}

} // namespace mixedkv
