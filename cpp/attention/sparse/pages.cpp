// Pages of keys: the sketch of K, and who works out which of them a query reads.

#include "pages.h"
#include "attention/kernel.h"
#include "attention/thread_memory.h"
#include "sketch.h"

#include <algorithm>
#include <memory>
#include <vector>

namespace mixedkv {

size_t attention_taken_bytes(int64_t n_keys, int n_head_kv) {
    return size_t(n_head_kv) * ((n_keys + attention_strip - 1) / attention_strip * pages_of_strip + 1);
}

// The same in every process, so that an answer can be had again. Multiples of 1 / n_draws, each once, in a random
// order: of each probability that has a code exactly the right number lies below it. Numbers that are drawn
// independently would read some sizes too often and others too seldom, in all answers.
const float * page_draws() {
    static const std::vector<float> draws = [] {
        std::vector<float> x(n_draws + 64);
        uint64_t           state = 1;
        for (int i = 0; i < n_draws; i++) { // SplitMix64
            uint64_t z  = state += 0x9e3779b97f4a7c15;
            z           = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
            z           = (z ^ z >> 27) * 0x94d049bb133111eb;
            const int j = int((z ^ z >> 31) % uint64_t(i + 1));
            x[i]        = x[j];
            x[j]        = float(i) / n_draws;
        }
        std::copy_n(x.begin(), 64, x.end() - 64);
        return x;
    }();
    return draws.data();
}

size_t attention_sketch_bytes(int d_k) {
    return size_t(sketch_groups(d_k)) * 64;
}

void choose_pages(const attention_args & a, const attention_kernels & kernels, block_panels * panels, int ith,
                  int nth) {
    auto &            memory   = thread_memory<std::vector<char>, struct choose_pages_tag>();
    const int64_t     n_strips = count_strips(a);
    const item_memory size(a, true, 1, nullptr, 0);
    memory.resize(size.bytes + 64 + choice_bytes(n_strips, size.rows));

    attention_item w;
    w.args      = &a;
    w.decode    = true;
    w.n_head    = 1;
    w.n_queries = 1;
    w.k0        = 0;
    w.k1        = count_plain_keys(a);
    w.block0    = 0;
    w.block1    = 0;
    w.memory    = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    w.panels    = panels;
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
