// Pages of keys: what their K is like, and who works out which of them a query reads.

#include "pages.h"
#include "kernel.h"
#include "row_types.h"
#include "simd/half.h"

#include <algorithm>
#include <memory>
#include <vector>

namespace mixedkv {

// as F16 has it; what is no number is the least
static float finite(float x) {
    return x > 65504.0f ? 65504.0f : x > -65504.0f ? x : -65504.0f;
}

void attention_sum_up_page(const attention_rows & k, int64_t key, int n_head_kv, int d_k, uint16_t * means,
                           float * spreads) {
    float rows[attention_page][attention_max_head_size];
    for (int head = 0; head < n_head_kv; head++) {
        for (int i = 0; i < attention_page; i++) {
            unpack_row(k, key + i, head, d_k, rows[i]);
        }
        double squares = 0.0;
        for (int c = 0; c < d_k; c++) {
            float mean = 0.0f;
            for (int i = 0; i < attention_page; i++) {
                mean += rows[i][c];
            }
            mean /= attention_page;
            float sum = 0.0f;
            for (int i = 0; i < attention_page; i++) {
                sum += (rows[i][c] - mean) * (rows[i][c] - mean);
            }
            squares += sum;
            means[head * d_k + c] = float_to_half(finite(mean));
        }
        spreads[head] = float(squares / (attention_page * d_k));
    }
}

void choose_pages(const attention_args & a, const attention_kernels & kernels, block_panels * panels, int ith,
                  int nth) {
    thread_local std::vector<char> memory;
    const int64_t                  n_pages = count_pages(a);
    const item_memory              size(a, true, 1, nullptr, 0);
    memory.resize(size.bytes + 64 + n_pages * (a.n_head / a.n_head_kv + 1) * sizeof(float));

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
        if (kernels.choose && a.pages.share < 1.0f) {
            kernels.choose(w);
        } else {
            std::fill_n(taken_pages(a, w.q0, w.head0), n_pages, uint8_t(1));
        }
    }
}

} // namespace mixedkv
