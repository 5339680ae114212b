// Which pages a query reads, for a vector layer L. What a key is weighed with is estimated from its sketch: the score
// of two bits, whose error is taken to be normally distributed. So the weight is exp(score + variance / 2) in the mean,
// and its root mean square, which is a key's size here, is exp(score + variance). Keys that are read anyway are scored
// as they are.
//
// A page of size z is read with the probability min(1, z / step), and then stands for as many. This makes a sum of
// weights right in the mean, whatever the estimates are. Its variance is step times the sum of the sizes below the
// step, at most, where the estimates are right. The step is the greatest with which that is as small as is asked for.

#pragma once

#include "attention/tile.h"
#include "pages.h"
#include "sketch.h"

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

    // Strips of which a query sees some keys and a sketch is known, and the size of their pages for each row, up to a
    // multiple of 64; from the end on those without a sketch
    struct strip_list {
        int64_t      n        = 0;
        int64_t      n_others = 0;
        int64_t      most;
        seen_strip * strip;
        float *      sizes;

        strip_list(const attention_args & a, void * memory) : most(round_up(count_strips(a), 16)) {
            strip = static_cast<seen_strip *>(memory);
            sizes = reinterpret_cast<float *>(strip + most);
        }
        seen_strip & other(int64_t i) const { return strip[most - 1 - i]; }
        float *      of(int row) const { return sizes + row * most * pages_of_strip; }
    };

    static mask_state state_at(const attention_item & w, int64_t key, int n) {
        const attention_args & a = *w.args;
        if (!a.mask) {
            return all_plain;
        }
        const key_span span{ a.segments, key, key, n, nullptr };
        return a.seen.blocks && key % key_block == 0
                   ? recall_state(w, key / key_block * attention_max_segments, span, 0)
                   : state_of(mask_of(w, span, 0), n);
    }

    static page_code * codes_of(page_code * taken, int64_t strip) { return taken + strip * pages_of_strip; }

    static void set_codes(page_code * taken, int64_t strip, page_code code) {
        std::memset(codes_of(taken, strip), code, pages_of_strip);
    }

    // Marks what is read whatever it weighs, and lists the strips whose pages are chosen from.
    static void classify(const attention_item & w, page_code * taken, strip_list & strips) {
        const attention_args & a = *w.args;
        for (int64_t key = 0; key < a.segments[0].n; key += key_block) {
            const int        n     = int(a.segments[0].n - key < key_block ? a.segments[0].n - key : key_block);
            const mask_state state = state_at(w, key, n);
            if (state == all_hidden) {
                const int n_strips = (n + attention_strip - 1) / attention_strip;
                std::memset(codes_of(taken, key / attention_strip), left_out, n_strips * pages_of_strip);
                continue;
            }
            for (int i = 0; i < n; i += attention_strip) {
                const int64_t    strip = (key + i) / attention_strip;
                const int        left  = n - i < attention_strip ? n - i : attention_strip;
                const mask_state own   = state != mixed ? state : state_of(mask_row(a, w.q0) + key + i, left);
                const bool       seen = own != all_hidden, known = left == attention_strip && a.pages.known[strip];
                set_codes(taken, strip, seen && !known ? read_once : left_out);
                if (seen) {
                    (known ? strips.strip[strips.n++] : strips.other(strips.n_others++)) = { int32_t(strip), own };
                }
            }
        }
    }

    // What rows weigh the keys with that are read anyway: max and sum of the item's memory
    static void softmax_others(const attention_item & w, const item_memory & m, const strip_list & strips) {
        const attention_args & a = *w.args;
        alignas(64) float      s[decode_rows * key_block];
        const auto             softmax_block = [&](const key_span & blocks) {
            attention_segment copied;
            const key_span    span = place_rows(w, w.head0, blocks, copied);
            base::score_rows(w, w.head0, m, span, s);
            for (int row = 0; row < m.rows; row++) {
                float * x = s + row * key_block;
                base::add_pairs(w, w.head0, span, row, x);
                base::softmax::update(rule_of(w, span, w.head0, row), x, span.n, m.max[row], m.sum[row], nullptr, 0);
            }
        };
        attention_item part = w;
        for (int64_t i = 0; i < strips.n_others; i++) {
            part.k0 = int64_t(strips.other(i).index) * attention_strip;
            part.k1 = part.k0 + attention_strip < a.segments[0].n ? part.k0 + attention_strip : a.segments[0].n;
            for_each_block(part, attention_strip, softmax_block);
        }
        part.k0     = a.segments[0].n;
        part.k1     = w.k1;
        part.block1 = a.order.n_splits > 0 ? a.order.splits[a.order.n_splits] : 0;
        for_each_block(part, base::block_keys(a), softmax_block);
    }

    // The variance of a row's score of a key, for what two bits of it lose, in units of the squared half step. What is
    // added to scores in units of log2 is the variance in those of the natural logarithm times log2e.
    static float variance_of(const attention_args & a, const float * q) {
        const float unit = a.logit_softcap == 0.0f ? 1.0f : a.logit_softcap * log2e; // of scores as they are
        float       sum  = 0.0f;
        for (int i = 0; i < a.d_k; i++) {
            sum += q[i] * q[i];
        }
        return sum * unit * unit * sketch_loss / log2e;
    }

    // From sums over a strip to scores of its keys, in units of log2: s[R][key_block]
    template <int R>
    static void to_scores(const sketch_query & q, const float * variance, const uint16_t * steps, const float * sums,
                          float * s) {
        for (int j = 0; j < attention_strip; j += L::width) {
            const auto step = L::load_half(steps + j);
            for (int r = 0; r < R; r++) {
                const auto x = L::fma(L::load(sums + r * attention_strip + j), L::set(q.factor[r]), L::set(q.bias[r]));
                L::store(s + r * key_block + j, L::mul(step, L::fma(step, L::set(variance[r]), x)));
            }
        }
    }

    // As that, of a row, with the subtracted bias and a soft-cap, which comes before the variance
    static void to_capped_scores(const attention_item & w, const sketch_query & q, int row, float variance,
                                 int64_t strip, const uint16_t * steps, const float * sums, float * s) {
        const attention_args & a         = *w.args;
        const mask_state       states[1] = { all_plain };
        for (int j = 0; j < attention_strip; j++) {
            s[j] = half_at(steps + j) * (sums[j] * q.factor[row % 4] + q.bias[row % 4]);
        }
        base::add_pairs(w, w.head0, { a.segments, strip * attention_strip, 0, attention_strip, states }, row, s);
        for (int j = 0; j < attention_strip; j++) {
            const float step = half_at(steps + j);
            s[j]             = a.logit_softcap == 0.0f ? s[j] : a.logit_softcap * log2e * tanhf(s[j]);
            s[j] += variance * step * step;
        }
    }

    static void add_mask(const attention_item & w, int row, int64_t strip, float * s) {
        const uint16_t * mask  = mask_row(*w.args, w.q0) + strip * attention_strip;
        const auto       slope = L::set(slope_of(*w.args, w.head0, row));
        for (int j = 0; j < attention_strip; j += L::width) {
            L::store(s + j, L::fma(slope, L::load_half(mask + j), L::load(s + j)));
        }
    }

    // R rows from `first` on: the sizes of pages, and what all keys weigh is added to what those do that are read
    // anyway.
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
        alignas(64) float      squares[key_block] = {}; // of half the steps
        float                  variance[R];
        typename L::V          whole[R]; // of the weights in the mean
        for (int r = 0; r < R; r++) {
            variance[r] = variance_of(a, static_cast<const float *>(m.q) + (first + r) * round_up(a.d_k, 16));
            whole[r]    = L::zero();
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
                for (int k = 0; k < attention_strip; k += L::width) {
                    const auto x = L::load_half(step + k);
                    L::store(squares + j * attention_strip + k, L::mul(x, x));
                }
                if (simple) {
                    to_scores<R>(q, variance, step, sums[0], to);
                }
                for (int r = 0; r < R && !simple; r++) {
                    to_capped_scores(w, q, first + r, variance[r], strip.index, step, sums[r], to + r * key_block);
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
                    const auto x    = L::add(L::load(s[r] + j), L::set(-max));
                    const auto mean = L::fma(L::load(squares + j), L::set(-0.5f * variance[r]), x);
                    L::store(s[r] + j, L::rough_exp2(L::min(x, L::set(most_above))));
                    whole[r] = L::add(whole[r], L::rough_exp2(L::min(mean, L::set(most_above))));
                }
                L::sum_fours(s[r], strips.of(first + r) + i * pages_of_strip);
            }
        }
        for (int r = 0; r < R; r++) {
            m.sum[first + r] += L::sum(whole[r]);
        }
    }

    // Estimates are relative to the best key known before: of those that are read anyway and the last block.
    static void begin_estimates(const float * s, float & max, float & sum) {
        float top = max;
        for (int j = 0; j < key_block; j++) {
            top = s[j] > top && s[j] < INFINITY ? s[j] : top;
        }
        sum = max == -INFINITY ? 0.0f : sum * base::sums::exp2_of(max - top);
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

    // Of sizes below x; n is a multiple of 64
    static float sum_below(const float * sizes, int64_t n, float x) {
        typename L::V sum[4] = { L::zero(), L::zero(), L::zero(), L::zero() };
        for (int64_t i = 0; i < n; i += 4 * L::width) {
            for (int j = 0; j < 4; j++) {
                const auto y = L::load(sizes + i + j * L::width);
                sum[j]       = L::add(sum[j], L::sub(y, L::at_least(y, x)));
            }
        }
        return L::sum(L::add(L::add(sum[0], sum[1]), L::add(sum[2], sum[3])));
    }

    // The step with which the variance of the sum is as small as is asked for; 0: all pages are read.
    static float find_step(float error, const float * sizes, int64_t n, float whole) {
        const float  sum     = sum_below(sizes, n, INFINITY);
        const double allowed = double(error) * error * whole * whole; // beyond what F32 holds, with large scores
        double       least   = allowed / sum;                         // with this step all may be below it
        if (!(least > 0.0 && sum < INFINITY && whole < INFINITY)) {
            return 0.0f;
        }
        least      = least < 0x1p126 ? least : 0x1p126;
        float    x = float(least);
        uint32_t low, high; // as integers floats have the same order, and half way is half of a ratio
        std::memcpy(&low, &x, 4);
        x = x > sum ? x : sum;
        std::memcpy(&high, &x, 4);
        while (high - low > 1u << 20) { // an eighth of a factor of two
            const uint32_t middle = low + (high - low) / 2;
            std::memcpy(&x, &middle, 4);
            (double(x) * sum_below(sizes, n, x) <= allowed ? low : high) = middle;
        }
        std::memcpy(&x, &low, 4);
        return x;
    }

    static constexpr int64_t draws_apart = 1361; // pages that lie as far apart as the table is long have other draws

    // The number of the first page in a table of draws, by the bits of Q of all rows
    static int64_t first_draw(const attention_args & a, const item_memory & m) {
        const int64_t d    = round_up(a.d_k, 16);
        uint64_t      hash = 14695981039346656037u;
        for (int row = 0; row < m.rows; row++) {
            for (int i = 0; i < a.d_k; i++) {
                uint32_t bits;
                std::memcpy(&bits, static_cast<const float *>(m.q) + row * d + i, 4);
                hash = (hash ^ bits) * 1099511628211u;
            }
        }
        return int64_t((hash ^ hash >> 32) % n_draws);
    }

    // Of the pages of four strips, a bit each, those that may be read, and their probabilities, which are added up too
    static uint32_t draw(const strip_list & strips, int64_t first, int rows, const float * per_step,
                         const float * draws, float * probability, typename L::V & sum) {
        const auto least = L::set(1.0f / 256.0f); // as in code_of()
        uint32_t   drawn = 0;
        for (int j = 0; j < strips_at_once * pages_of_strip; j += L::width) {
            auto p = L::mul(L::load(strips.of(0) + first + j), L::set(per_step[0]));
            for (int row = 1; row < rows; row++) {
                p = L::max(p, L::mul(L::load(strips.of(row) + first + j), L::set(per_step[row])));
            }
            L::store(probability + j, p);
            sum           = L::add(sum, L::min(L::max(p, least), L::set(1.0f)));
            const auto up = L::max(L::mul(p, L::set(1.125f)), least); // as code_of() rounds, or more
            drawn |= L::nonzero(L::at_least(L::sub(up, L::load(draws + j)), 0.0f)) << j;
        }
        return drawn;
    }

    // Marks the pages that are read; classify() has marked none of these strips. Returns how many they are: all of them
    // where more than most_read are expected. That so many have been drawn would not do: samples that are too heavy
    // would be replaced, and those that are too light would stay.
    static int64_t choose(const attention_item & w, const item_memory & m, page_code * taken,
                          const strip_list & strips) {
        const attention_args & a       = *w.args;
        const int64_t          n_pages = round_up(strips.n, 16) * pages_of_strip;
        const int64_t          filled  = round_up(strips.n, strips_at_once) * pages_of_strip;
        float                  per_step[decode_rows];
        base::begin(m);
        for (int row = 0; row < m.rows; row += 4) {
            base::pack_quad(w, w.head0, m, row);
        }
        softmax_others(w, m, strips);
        for (int row = 0; row < m.rows; row += 4) {
            estimate(w, m, row, strips);
        }
        for (int row = 0; row < m.rows; row++) {
            std::memset(strips.of(row) + filled, 0, (n_pages - filled) * sizeof(float));
            per_step[row] = 1.0f / find_step(a.pages.error, strips.of(row), n_pages, m.sum[row]);
        }
        const int64_t first  = first_draw(a, m);
        const float * draws  = page_draws();
        int64_t       n_read = 0;
        typename L::V sum    = L::zero();
        for (int64_t i = 0; i < strips.n; i += strips_at_once) {
            float         probability[strips_at_once * pages_of_strip];
            const int64_t page = i * pages_of_strip;
            const float * u    = draws + (first + page + page / n_draws * draws_apart) % n_draws;
            const int     n    = int(strips.n - i < strips_at_once ? strips.n - i : strips_at_once);
            for (uint32_t drawn =
                     draw(strips, page, m.rows, per_step, u, probability, sum) & ((1u << n * pages_of_strip) - 1);
                 drawn; drawn &= drawn - 1) {
                const int       j    = __builtin_ctz(drawn);
                const page_code code = code_of(probability[j]);
                if (probability_of(code) > u[j]) {
                    codes_of(taken, strips.strip[i + j / pages_of_strip].index)[j % pages_of_strip] = code;
                    n_read++;
                }
            }
        }
        const int64_t all = strips.n * pages_of_strip;
        return L::sum(sum) > float(all) * most_read ? all : n_read;
    }

    static void run(const attention_item & w) {
        const attention_args & a     = *w.args;
        page_code *            taken = taken_pages(a, w.q0, w.head0);
        const item_memory      m(a, true, 1, w.memory, 0);
        strip_list             strips(a, static_cast<char *>(w.memory) + m.bytes);
        classify(w, taken, strips);
        int64_t n_read = strips.n * pages_of_strip;
        if (a.pages.error > 0.0f && strips.n > 0 && strips.n * attention_strip >= a.pages.depth) {
            n_read = choose(w, m, taken, strips);
        }
        reads_all(a, w.q0, w.head0) = strips.n > 0 && n_read == strips.n * pages_of_strip;
        if (a.page_counts) {
            __atomic_fetch_add(&a.page_counts->pages, strips.n * pages_of_strip, __ATOMIC_RELAXED);
            __atomic_fetch_add(&a.page_counts->pages_read, n_read, __ATOMIC_RELAXED);
        }
    }
};

} // namespace
} // namespace mixedkv
