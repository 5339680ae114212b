// What rows make of splits of the keys, summed up, for a vector layer L.

#pragma once

#include "kernel.h"

#include "simd/rotation.h"

#include <cmath>

namespace mixedkv {
namespace {

template <class L>
struct sums_of {
    using V = typename L::V;

    static void rescale(float highest, float & max, float & sum, float * acc, int64_t d_v) {
        if (max != -INFINITY) {
            const float correction = exp2_of(max - highest);
            sum *= correction;
            for (int64_t i = 0; i < d_v; i += L::width) {
                L::store(acc + i, L::mul(L::set(correction), L::load(acc + i)));
            }
        }
        max = highest;
    }

    static float exp2_of(float x) {
        float out[L::width];
        L::store(out, L::exp2(L::set(x)));
        return out[0];
    }

    // What a row makes of more keys is added to what it makes of others. Compiled once, as update().
    [[gnu::noinline]] static void add(const row_sums & to, const row_sums & more, int row, int64_t d_v) {
        const float   max = more.max[row] > to.max[row] ? more.max[row] : to.max[row];
        float *       acc = to.acc + row * d_v;
        const float * by  = more.acc + row * d_v;
        if (more.max[row] == -INFINITY) {
            return;
        }
        if (to.max[row] == -INFINITY) {
            to.max[row] = max;
            to.sum[row] = more.sum[row];
            std::memcpy(acc, by, d_v * sizeof(float));
            return;
        }
        const V old = L::set(exp2_of(to.max[row] - max)), now = L::set(exp2_of(more.max[row] - max));
        for (int64_t i = 0; i < d_v; i += L::width) {
            L::store(acc + i, L::fma(now, L::load(by + i), L::mul(old, L::load(acc + i))));
        }
        float sum[2][L::width];
        L::store(sum[0], L::mul(old, L::set(to.sum[row])));
        L::store(sum[1], L::fma(now, L::set(more.sum[row]), L::load(sum[0])));
        to.max[row] = max;
        to.sum[row] = sum[1][0];
    }

    // The first chunk's memory serves for the sums of all.
    static void merge_row(const item_memory & part, int row, int n_chunks, size_t stride, const float * sink, int d_v,
                          float * out) {
        for (int c = 1; c < n_chunks; c++) {
            add(part.all,
                { chunk_of(part.max, c, stride), chunk_of(part.sum, c, stride), chunk_of(part.acc, c, stride) }, row,
                part.d_v_padded);
        }
        const float * acc  = part.all.acc + row * part.d_v_padded;
        const float   max  = part.all.max[row];
        const float   most = sink && *sink * log2e > max ? *sink * log2e : max;
        if (max == -INFINITY) {
            std::memset(out, 0, d_v * sizeof(float));
            return;
        }
        const float scale   = exp2_of(max - most);
        const float sum     = part.all.sum[row] * scale + (sink ? exp2_of(*sink * log2e - most) : 0.0f);
        const V     inverse = L::set(sum > 0.0f ? scale / sum : 0.0f);
        for (int i = 0; i < d_v; i += L::width) {
            const V y = L::mul(inverse, L::load(acc + i));
            if (i + L::width <= d_v) {
                L::store(out + i, y);
            } else {
                float last[L::width];
                L::store(last, y);
                std::memcpy(out + i, last, (d_v - i) * sizeof(float));
            }
        }
    }

    static void merge(const attention_item & first, int n_chunks, size_t chunk_stride) {
        const attention_args & a     = *first.args;
        const int              group = a.n_head / a.n_head_kv;
        for (int i = 0; i < first.n_head; i++) {
            const item_memory part(a, first.decode, first.n_queries, first.memory, i);
            for (int row = 0; row < part.rows; row++) {
                const int head = (first.head0 + i) * group + row % group;
                float *   out  = output_row(a, first.q0 + row / group, head);
                merge_row(part, row, n_chunks, chunk_stride, a.sinks ? a.sinks + head : nullptr, a.d_v, out);
                if (a.rotation_out) {
                    rotate(out, a.d_v, a.rotation_out);
                }
            }
        }
    }
};

} // namespace
} // namespace mixedkv
