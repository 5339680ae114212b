// Which pages a query reads, for a vector layer L. The scores of a page's keys are taken to be normally distributed
// with the score of its mean and the page's spread, so the mean of their weights is exp(mean + variance / 2). Keys that
// are read anyway are scored one by one.

#pragma once

#include "pages.h"
#include "tile.h"

namespace mixedkv {
namespace {

template <class L>
struct page_choice {
    using base = tile<L>;

    static constexpr int   steps    = 8;    // of a factor of two, into which estimates are sorted
    static constexpr int   buckets  = 512;  // 2^-64 of the largest is nothing
    static constexpr float log_page = 4.0f; // log2(attention_page)
    static_assert(attention_page == 16);

    // Pages of which keys are scored one by one, and those that a query sees entirely, all of it as it is
    enum : uint8_t { left_out, read, whole };

    // Pages that a query sees entirely, and for each row log2 of the weight that they are estimated to have
    struct whole_pages {
        int64_t   n = 0;
        int64_t   most;
        int32_t * page;
        float *   estimates;

        whole_pages(const attention_args & a, void * memory) : most(count_pages(a)) {
            page      = static_cast<int32_t *>(memory);
            estimates = reinterpret_cast<float *>(page + most);
        }
        float * of(int row) const { return estimates + row * most; }
    };

    static mask_state state_at(const attention_item & w, int64_t key, int n) {
        const attention_args & a = *w.args;
        if (!a.mask) {
            return all_plain;
        }
        return a.seen.blocks && key % key_block == 0 ? recall_state(w, 0, key, n, w.q0)
                                                     : state_of(mask_row(a, w.q0) + key, n);
    }

    static void classify(const attention_item & w, uint8_t * taken, whole_pages & pages) {
        const attention_args & a = *w.args;
        for (int64_t key = 0; key < a.segments[0].n; key += key_block) {
            const int        n     = int(a.segments[0].n - key < key_block ? a.segments[0].n - key : key_block);
            const mask_state state = state_at(w, key, n);
            for (int i = 0; i < n; i += attention_page) {
                const int64_t page = (key + i) / attention_page;
                const bool    fits = i + attention_page <= n && a.pages.known[page];
                mask_state    own  = state;
                if (state == mixed) {
                    const int left = n - i < attention_page ? n - i : attention_page;
                    own            = state_of(mask_row(a, w.q0) + key + i, left);
                }
                taken[page] = own == all_hidden ? left_out : own == all_plain && fits ? whole : read;
                if (taken[page] == whole) {
                    pages.page[pages.n++] = int32_t(page);
                }
            }
        }
    }

    static void estimate(const attention_item & w, const item_memory & m, const float * squares,
                         const whole_pages & pages) {
        const attention_args & a         = *w.args;
        const mask_state       states[1] = { all_plain };
        attention_segment      means;
        means.k.data     = a.pages.means;
        means.k.row      = size_t(a.n_head_kv) * a.d_k * sizeof(uint16_t);
        means.k.head     = a.d_k * sizeof(uint16_t);
        means.pairs      = a.pages.pairs;
        means.n_pairs    = a.segments[0].n_pairs;
        means.first_turn = a.pages.first_turn;

        alignas(64) float s[few_rows * key_block];
        const int         most = base::block_keys(a);
        for (int64_t i = 0, n; i < pages.n; i += n) {
            const int64_t first = pages.page[i];
            for (n = 1; i + n < pages.n && n < most && pages.page[i + n] == first + n; n++) {
            }
            const key_span span = { &means, first, 0, int(n), states };
            base::score_rows(w, w.head0, m, span, s);
            for (int row = 0; row < m.rows; row++) {
                float * x = s + row * key_block;
                base::add_pairs(w, w.head0, span, row, x);
                for (int j = 0; j < n; j++) {
                    const float spread   = a.pages.spreads[(first + j) * a.n_head_kv + w.head0];
                    const float mean     = a.logit_softcap == 0.0f ? x[j] : a.logit_softcap * log2e * tanhf(x[j]);
                    pages.of(row)[i + j] = mean + squares[row] * spread + log_page;
                }
            }
        }
    }

    // What rows weigh the keys with that are read anyway: max and sum of the item's memory
    static void weigh_others(const attention_item & w, const item_memory & m, const uint8_t * taken) {
        const attention_args & a = *w.args;
        alignas(64) float      s[few_rows * key_block];
        const auto             weigh = [&](const key_span & span) {
            base::score_rows(w, w.head0, m, span, s);
            for (int row = 0; row < m.rows; row++) {
                float * x = s + row * key_block;
                base::add_pairs(w, w.head0, span, row, x);
                base::weigh(rule_of(w, span, w.head0, row), x, span.n, m.max[row], m.sum[row], nullptr, 0);
            }
        };
        attention_item part = w;
        for (int64_t page = 0; page < count_pages(a); page++) {
            if (taken[page] == read) {
                part.k0 = page * attention_page;
                part.k1 = part.k0 + attention_page < a.segments[0].n ? part.k0 + attention_page : a.segments[0].n;
                for_each_block(part, attention_page, weigh);
            }
        }
        part.k0 = a.segments[0].n;
        part.k1 = w.k1;
        for_each_block(part, base::block_keys(a), weigh);
    }

    // The least estimate of the fewest pages that hold the share of a row. They are sorted by eighths of a factor of
    // two, and those of one eighth stay together.
    static float find_least(float share, const float * estimates, int64_t n, float max, float sum) {
        float top = max;
        for (int64_t i = 0; i < n; i++) {
            top = estimates[i] > top ? estimates[i] : top;
        }
        float weights[buckets] = {};
        for (int64_t i = 0; i < n; i += L::width) {
            const int64_t some        = n - i < L::width ? n - i : L::width;
            float         x[L::width] = {};
            float         weight[L::width];
            std::memcpy(x, estimates + i, some * sizeof(float));
            L::store(weight, L::exp2(L::add(L::load(x), L::set(-top))));
            for (int64_t j = 0; j < some; j++) {
                const float below = (top - x[j]) * steps;
                if (below < buckets) { // not where it is NaN
                    weights[int(below)] += weight[j];
                }
            }
        }
        float held  = max == -INFINITY ? 0.0f : sum * base::exp2_of(max - top);
        float total = held;
        for (int i = 0; i < buckets; i++) {
            total += weights[i];
        }
        if (!(total > 0.0f)) { // estimates beyond what F32 holds
            return -INFINITY;
        }
        int bucket = 0;
        for (; bucket < buckets && held < share * total; bucket++) {
            held += weights[bucket];
        }
        return bucket == buckets ? -INFINITY : top - float(bucket) / steps;
    }

    // Returns how many are read
    static int64_t choose(const attention_item & w, const item_memory & m, uint8_t * taken, const whole_pages & pages) {
        const attention_args & a    = *w.args;
        const int64_t          d    = round_up(a.d_k, 16);
        // of scores as they are, in units of log2
        const float            unit = (a.logit_softcap == 0.0f ? 1.0f : a.logit_softcap * log2e);
        float                  squares[few_rows];
        base::begin(m);
        for (int row = 0; row < m.rows; row += 4) {
            base::pack_quad(w, w.head0, m, row);
        }
        for (int row = 0; row < m.rows; row++) {
            const float * q   = static_cast<const float *>(m.q) + row * d;
            float         sum = 0.0f;
            for (int i = 0; i < a.d_k; i++) {
                sum += q[i] * q[i];
            }
            squares[row] = sum * unit * unit / (2.0f * log2e);
        }
        weigh_others(w, m, taken);
        estimate(w, m, squares, pages);
        for (int64_t i = 0; i < pages.n; i++) {
            taken[pages.page[i]] = left_out;
        }
        for (int row = 0; row < m.rows; row++) {
            const float * x     = pages.of(row);
            const float   least = find_least(a.pages.share, x, pages.n, m.max[row], m.sum[row]);
            for (int64_t i = 0; i < pages.n; i++) {
                if (!(x[i] <= least)) { // NaN is read
                    taken[pages.page[i]] = read;
                }
            }
        }
        int64_t n_read = 0;
        for (int64_t i = 0; i < pages.n; i++) {
            n_read += taken[pages.page[i]];
        }
        return n_read;
    }

    static void run(const attention_item & w) {
        const attention_args & a     = *w.args;
        uint8_t *              taken = taken_pages(a, w.q0, w.head0);
        const item_memory      m(a, true, 1, w.memory, 0);
        whole_pages            pages(a, static_cast<char *>(w.memory) + m.bytes);
        classify(w, taken, pages);
        int64_t n_read = pages.n;
        if (pages.n * attention_page >= a.pages.depth) {
            n_read = choose(w, m, taken, pages);
        }
        for (int64_t i = 0; n_read == pages.n && i < pages.n; i++) {
            taken[pages.page[i]] = read;
        }
        if (a.skips) {
            __atomic_fetch_add(&a.skips->pages, pages.n, __ATOMIC_RELAXED);
            __atomic_fetch_add(&a.skips->pages_read, n_read, __ATOMIC_RELAXED);
        }
    }
};

} // namespace
} // namespace mixedkv
