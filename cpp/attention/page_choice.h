// Which pages a query reads, for a vector layer L. What a key is weighed with is estimated from its sketch: the score
// of two bits, whose error is taken to be normally distributed, so that the mean weight is exp(score + variance / 2).
// Keys that are read anyway are scored as they are.

#pragma once

#include "pages.h"
#include "sketch.h"
#include "tile.h"

namespace mixedkv {
namespace {

template <class L>
struct page_choice {
    using base = tile<L>;

    static constexpr int   strips_at_once = key_block / attention_strip;
    static constexpr int   ahead          = 8;      // strips, which come from memory meanwhile
    static constexpr float most_read      = 0.6f;   // of the pages, from which on all are read, as without pages
    static constexpr float most_above     = 100.0f; // log2 of a weight over that of the best key known before
    static_assert(attention_page == 4 && attention_strip == 16);

    // Strips of which a query sees some keys and a sketch is known, and what each row is estimated to weigh their pages
    // with, up to a multiple of 64; from the end on those without a sketch
    struct strip_list {
        int64_t      n        = 0;
        int64_t      n_others = 0;
        int64_t      most;
        seen_strip * strip;
        float *      weights;

        strip_list(const attention_args & a, void * memory) : most(round_up(count_strips(a), 16)) {
            strip   = static_cast<seen_strip *>(memory);
            weights = reinterpret_cast<float *>(strip + most);
        }
        seen_strip & other(int64_t i) const { return strip[most - 1 - i]; }
        float *      of(int row) const { return weights + row * most * pages_of_strip; }
    };

    static mask_state state_at(const attention_item & w, int64_t key, int n) {
        const attention_args & a = *w.args;
        if (!a.mask) {
            return all_plain;
        }
        return a.seen.blocks && key % key_block == 0 ? recall_state(w, 0, key, n, w.q0)
                                                     : state_of(mask_row(a, w.q0) + key, n);
    }

    // Marks what is read whatever it weighs, and lists the strips whose pages are chosen from.
    static void classify(const attention_item & w, uint8_t * taken, strip_list & strips) {
        const attention_args & a = *w.args;
        for (int64_t key = 0; key < a.segments[0].n; key += key_block) {
            const int        n     = int(a.segments[0].n - key < key_block ? a.segments[0].n - key : key_block);
            const mask_state state = state_at(w, key, n);
            if (state == all_hidden) {
                std::memset(taken + key / attention_strip, 0, (n + attention_strip - 1) / attention_strip);
                continue;
            }
            for (int i = 0; i < n; i += attention_strip) {
                const int64_t    strip = (key + i) / attention_strip;
                const int        left  = n - i < attention_strip ? n - i : attention_strip;
                const mask_state own   = state != mixed ? state : state_of(mask_row(a, w.q0) + key + i, left);
                const bool       seen = own != all_hidden, known = left == attention_strip && a.pages.known[strip];
                taken[strip] = seen && !known ? all_pages : 0;
                if (seen) {
                    (known ? strips.strip[strips.n++] : strips.other(strips.n_others++)) = { int32_t(strip), own };
                }
            }
        }
    }

    // What rows weigh the keys with that are read anyway: max and sum of the item's memory
    static void weigh_others(const attention_item & w, const item_memory & m, const strip_list & strips) {
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
        for (int64_t i = 0; i < strips.n_others; i++) {
            part.k0 = int64_t(strips.other(i).index) * attention_strip;
            part.k1 = part.k0 + attention_strip < a.segments[0].n ? part.k0 + attention_strip : a.segments[0].n;
            for_each_block(part, attention_strip, weigh);
        }
        part.k0 = a.segments[0].n;
        part.k1 = w.k1;
        for_each_block(part, base::block_keys(a), weigh);
    }

    // What a row adds to the score of a key for what two bits of it lose, in units of the squared half step
    static float loss_of(const attention_args & a, const float * q) {
        const float unit = a.logit_softcap == 0.0f ? 1.0f : a.logit_softcap * log2e; // of scores as they are
        float       sum  = 0.0f;
        for (int i = 0; i < a.d_k; i++) {
            sum += q[i] * q[i];
        }
        return sum * unit * unit * sketch_loss / (2.0f * log2e);
    }

    // From sums over a strip to scores of its keys, in units of log2: s[R][key_block]
    template <int R>
    static void to_scores(const sketch_query & q, const float * loss, const uint16_t * steps, const float * sums,
                          float * s) {
        for (int j = 0; j < attention_strip; j += L::width) {
            const auto step = L::load_half(steps + j);
            for (int r = 0; r < R; r++) {
                const auto x = L::fma(L::load(sums + r * attention_strip + j), L::set(q.factor[r]), L::set(q.bias[r]));
                L::store(s + r * key_block + j, L::mul(step, L::fma(step, L::set(loss[r]), x)));
            }
        }
    }

    // As that, of a row, with what K lacks and a soft-cap, which comes before the loss
    static void to_capped_scores(const attention_item & w, const sketch_query & q, int row, float loss, int64_t strip,
                                 const uint16_t * steps, const float * sums, float * s) {
        const attention_args & a         = *w.args;
        const mask_state       states[1] = { all_plain };
        for (int j = 0; j < attention_strip; j++) {
            s[j] = half_at(steps + j) * (sums[j] * q.factor[row % 4] + q.bias[row % 4]);
        }
        base::add_pairs(w, w.head0, { a.segments, strip * attention_strip, 0, attention_strip, states }, row, s);
        for (int j = 0; j < attention_strip; j++) {
            const float step = half_at(steps + j);
            s[j]             = a.logit_softcap == 0.0f ? s[j] : a.logit_softcap * log2e * tanhf(s[j]);
            s[j] += loss * step * step;
        }
    }

    static void add_mask(const attention_item & w, int row, int64_t strip, float * s) {
        const uint16_t * mask  = mask_row(*w.args, w.q0) + strip * attention_strip;
        const auto       slope = L::set(slope_of(*w.args, w.head0, row));
        for (int j = 0; j < attention_strip; j += L::width) {
            L::store(s + j, L::fma(slope, L::load_half(mask + j), L::load(s + j)));
        }
    }

    // R rows from `first` on
    template <int R>
    static void estimate(const attention_item & w, const item_memory & m, const sketch_query & q, int first,
                         const strip_list & strips) {
        const attention_args & a      = *w.args;
        const int              groups = sketch_groups(a.d_k);
        const uint8_t *        bits   = a.pages.bits + w.head0 * a.pages.strips * groups * 64;
        const uint16_t *       steps  = a.pages.steps + w.head0 * a.pages.strips * attention_strip;
        const bool             simple = a.logit_softcap == 0.0f && a.segments[0].n_pairs == 0;
        alignas(64) float      sums[R][attention_strip];
        alignas(64) float      s[R][key_block];
        float                  loss[R];
        for (int r = 0; r < R; r++) {
            loss[r] = loss_of(a, static_cast<const float *>(m.q) + (first + r) * round_up(a.d_k, 16));
        }
        const int64_t last = (strips.n - 1) / strips_at_once * strips_at_once;
        for (int64_t i = last; i >= 0; i -= strips_at_once) { // with ALiBi the last keys weigh the most
            const int n = int(strips.n - i < strips_at_once ? strips.n - i : strips_at_once);
            for (int j = 0; j < n; j++) {
                const seen_strip strip = strips.strip[i + j];
                for (int g = 0; i + j >= ahead && g < groups; g++) {
                    const int64_t next = strips.strip[i + j - ahead].index;
                    __builtin_prefetch(bits + (next * groups + g) * 64, 0, 2);
                }
                L::template sum_strip<R>(bits + int64_t(strip.index) * groups * 64, groups, q.ints, sums[0]);
                const uint16_t * step = steps + int64_t(strip.index) * attention_strip;
                float *          to   = s[0] + j * attention_strip;
                if (simple) {
                    to_scores<R>(q, loss, step, sums[0], to);
                }
                for (int r = 0; r < R && !simple; r++) {
                    to_capped_scores(w, q, first + r, loss[r], strip.index, step, sums[r], to + r * key_block);
                }
                for (int r = 0; r < R && strip.state == mixed; r++) {
                    add_mask(w, first + r, strip.index, to + r * key_block);
                }
            }
            for (int r = 0; r < R; r++) {
                float & max = m.max[first + r];
                for (int j = n * attention_strip; j < key_block; j++) {
                    s[r][j] = -INFINITY;
                }
                if (i == last) {
                    begin_estimates(s[r], max, m.sum[first + r]);
                }
                for (int j = 0; j < key_block; j += L::width) {
                    const auto x = L::min(L::add(L::load(s[r] + j), L::set(-max)), L::set(most_above));
                    L::store(s[r] + j, L::rough_exp2(x));
                }
                L::sum_fours(s[r], strips.of(first + r) + i * pages_of_strip);
            }
        }
    }

    // Estimates are relative to the best key known before: of those that are read anyway and the last block.
    static void begin_estimates(const float * s, float & max, float & sum) {
        float top = max;
        for (int j = 0; j < key_block; j++) {
            top = s[j] > top && s[j] < INFINITY ? s[j] : top;
        }
        sum = max == -INFINITY ? 0.0f : sum * base::exp2_of(max - top);
        max = top == -INFINITY ? 0.0f : top;
    }

    static void estimate(const attention_item & w, const item_memory & m, int first, const strip_list & strips) {
        const int64_t d      = round_up(w.args->d_k, 16);
        void *        behind = static_cast<float *>(m.q) + m.rows_padded * round_up(d, 128); // the F32 queries
        sketch_query  q;
        q.ints = static_cast<int32_t (*)[4][4]>(behind);
        q.pack(static_cast<const float *>(m.q) + first * d, d, w.args->d_k);
        switch (m.rows - first) {
        case 1:
            return estimate<1>(w, m, q, first, strips);
        case 2:
            return estimate<2>(w, m, q, first, strips);
        case 3:
            return estimate<3>(w, m, q, first, strips);
        default:
            return estimate<4>(w, m, q, first, strips);
        }
    }

    // Of weights below x; n is a multiple of 64
    static float sum_below(const float * weights, int64_t n, float x) {
        typename L::V sum[4] = { L::zero(), L::zero(), L::zero(), L::zero() };
        for (int64_t i = 0; i < n; i += 4 * L::width) {
            for (int j = 0; j < 4; j++) {
                const auto y = L::load(weights + i + j * L::width);
                sum[j]       = L::add(sum[j], L::sub(y, L::at_least(y, x)));
            }
        }
        return L::sum(L::add(L::add(sum[0], sum[1]), L::add(sum[2], sum[3])));
    }

    // The weight from which on pages of a row are read, 0 for all: those below it hold less than 1 - share
    static float find_least(float share, const float * weights, int64_t n, float others) {
        const float spare = (1.0f - share) * (sum_below(weights, n, INFINITY) + others);
        if (!(spare > 0.0f && spare < INFINITY)) { // estimates beyond what F32 holds
            return 0.0f;
        }
        uint32_t low, high; // as integers floats have the same order, and half way is half of a ratio
        float    x = spare / float(n);
        std::memcpy(&low, &x, 4);
        std::memcpy(&high, &spare, 4);
        while (high - low > 1u << 20) { // an eighth of a factor of two
            const uint32_t middle = low + (high - low) / 2;
            std::memcpy(&x, &middle, 4);
            (sum_below(weights, n, x) <= spare ? low : high) = middle;
        }
        std::memcpy(&x, &low, 4);
        return x;
    }

    // Of the pages of four strips, a bit each, those that weigh as much
    static uint32_t heavy_pages(const float * weights, float least) {
        uint32_t heavy = 0;
        for (int j = 0; j < strips_at_once * pages_of_strip; j += L::width) {
            heavy |= L::nonzero(L::at_least(L::load(weights + j), least)) << j;
        }
        return heavy;
    }

    // Returns how many pages are read
    static int64_t choose(const attention_item & w, const item_memory & m, uint8_t * taken, const strip_list & strips) {
        const attention_args & a       = *w.args;
        const int64_t          n_pages = round_up(strips.n, 16) * pages_of_strip;
        const int64_t          filled  = round_up(strips.n, strips_at_once) * pages_of_strip;
        float                  least[few_rows];
        base::begin(m);
        for (int row = 0; row < m.rows; row += 4) {
            base::pack_quad(w, w.head0, m, row);
        }
        weigh_others(w, m, strips);
        for (int row = 0; row < m.rows; row += 4) {
            estimate(w, m, row, strips);
        }
        bool all = false;
        for (int row = 0; row < m.rows; row++) {
            std::memset(strips.of(row) + filled, 0, (n_pages - filled) * sizeof(float));
            least[row] = find_least(a.pages.share, strips.of(row), n_pages, m.sum[row]);
            all |= least[row] == 0.0f;
        }
        int64_t n_read = 0;
        for (int64_t i = 0; i < strips.n; i += strips_at_once) {
            uint32_t heavy = all ? 0xffff : 0;
            for (int row = 0; row < m.rows; row++) {
                heavy |= heavy_pages(strips.of(row) + i * pages_of_strip, least[row]);
            }
            for (int64_t j = i; j < i + strips_at_once && j < strips.n; j++, heavy >>= pages_of_strip) {
                taken[strips.strip[j].index] = heavy & all_pages;
                n_read += __builtin_popcount(heavy & all_pages);
            }
        }
        return n_read;
    }

    static void run(const attention_item & w) {
        const attention_args & a     = *w.args;
        uint8_t *              taken = taken_pages(a, w.q0, w.head0);
        const item_memory      m(a, true, 1, w.memory, 0);
        strip_list             strips(a, static_cast<char *>(w.memory) + m.bytes);
        classify(w, taken, strips);
        int64_t n_read = strips.n * pages_of_strip;
        if (a.pages.share < 1.0f && strips.n > 0 && strips.n * attention_strip >= a.pages.depth) {
            n_read = choose(w, m, taken, strips);
        }
        const bool most             = n_read > strips.n * pages_of_strip * most_read;
        reads_all(a, w.q0, w.head0) = most;
        n_read                      = most ? strips.n * pages_of_strip : n_read;
        if (a.skips) {
            __atomic_fetch_add(&a.skips->pages, strips.n * pages_of_strip, __ATOMIC_RELAXED);
            __atomic_fetch_add(&a.skips->pages_read, n_read, __ATOMIC_RELAXED);
        }
    }
};

} // namespace
} // namespace mixedkv
