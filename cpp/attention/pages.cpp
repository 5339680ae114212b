// Pages of keys: the sketch of K, and who works out which of them a query reads.

#include "pages.h"
#include "kernel.h"
#include "simd/half.h"
#include "sketch.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

namespace mixedkv {

size_t attention_taken_bytes(int64_t n_keys, int n_head_kv) {
    return size_t(n_head_kv) * ((n_keys + attention_strip - 1) / attention_strip + 1);
}

size_t attention_sketch_bytes(int d_k) {
    return size_t(sketch_groups(d_k)) * 64;
}

// Returns half the step
static float sketch_key(const float * x, int d, uint8_t * bits) {
    float squares = 0.0f;
    for (int i = 0; i < d; i++) {
        squares += x[i] * x[i];
    }
    const float step = 2.0f * sketch_half_step * std::sqrt(squares / d);
    float       dot = 0.0f, norm = 0.0f;
    for (int i = 0; i < d; i++) {
        const int   n     = (x[i] >= -step) + (x[i] >= 0.0f) + (x[i] >= step);
        const float level = float(2 * n - 3);
        dot += level * x[i];
        norm += level * level;
        bits[i / 16 * 64 + i % 4] |= uint8_t(n << i % 16 / 4 * 2);
    }
    const float fit = dot / norm;
    return fit < INFINITY ? fit : INFINITY; // what is no number is always read
}

void attention_sketch(const attention_rows & k, int64_t key, int n_head_kv, int d_k, uint8_t * bits, uint16_t * steps,
                      int64_t strips) {
    float row[attention_max_head_size];
    for (int head = 0; head < n_head_kv; head++) {
        uint8_t * to = bits + head * strips * attention_sketch_bytes(d_k);
        std::fill_n(to, attention_sketch_bytes(d_k), uint8_t(0));
        for (int i = 0; i < attention_strip; i++) {
            unpack_row(k, key + i, head, d_k, row);
            steps[head * strips * attention_strip + i] = float_to_half(sketch_key(row, d_k, to + 4 * i));
        }
    }
}

void choose_pages(const attention_args & a, const attention_kernels & kernels, block_panels * panels, int ith,
                  int nth) {
    thread_local std::vector<char> memory;
    const int64_t                  n_strips = count_strips(a);
    const item_memory              size(a, true, 1, nullptr, 0);
    memory.resize(size.bytes + 64 + choice_bytes(n_strips, size.rows));

    attention_item w;
    w.args      = &a;
    w.few       = true;
    w.n_head    = 1;
    w.n_queries = 1;
    w.k0        = 0;
    w.memory    = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    w.panels    = panels;
    w.k1        = 0;
    for (int i = 0; i < a.n_segments; i++) {
        w.k1 += a.segments[i].n;
    }
    for (int64_t i = ith; i < a.n_queries * a.n_head_kv; i += nth) {
        w.q0    = i / a.n_head_kv;
        w.head0 = int(i % a.n_head_kv);
        if (kernels.choose) {
            kernels.choose(w);
        } else {
            reads_all(a, w.q0, w.head0) = 1;
        }
    }
}

} // namespace mixedkv
