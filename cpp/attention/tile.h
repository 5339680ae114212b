// The body shared by all vector instruction sets: blocks of up to 64 keys are dequantised to F32 once per KV head, then
// scored, weighed and added up for all rows of the group. L is a vector layer (vector_*.h).

#pragma once

#include "product.h"
#include "row_types.h"
#include "softmax.h"
#include "sparse/pages.h"

#include "simd/half.h"
#include "simd/rotation.h"

namespace mixedkv {
namespace {

template <class L>
struct tile {
    using V       = typename L::V;
    using sums    = sums_of<L>;
    using softmax = softmax_of<L>;

    // What stands for rows that see no key; their acc is not read
    static void begin(const item_memory & m) {
        for (int row = 0; row < m.rows; row++) {
            m.max[row] = -INFINITY;
            m.sum[row] = 0.0f;
        }
    }

    static void clear(const item_memory & m) {
        begin(m);
        std::memset(m.acc, 0, size_t(m.rows) * m.d_v_padded * sizeof(float));
    }

    // One head's row of n elements as F32, zeros up to a multiple of 16.
    static void dequantise(const attention_rows & rows, int64_t key, int head, int n, float * out) {
        const char * p = key_row(rows, key, head);
        switch (rows.type) {
        case row_type::f16: {
            const int whole = n / L::width * L::width;
            for (int i = 0; i < whole; i += L::width) {
                L::store(out + i, L::load_half(p + 2 * i));
            }
            for (int i = whole; i < n; i++) {
                out[i] = half_at(p + 2 * i);
            }
            break;
        }
        case row_type::other:
            rows.to_float(p, out, n);
            break;
        default:
            with_block_type(rows.type, [&](auto type) {
                for (int i = 0; i < n; i += block_elements(type.value), p += block_bytes(type.value)) {
                    L::dequantise(type, p, out + i);
                }
            });
        }
        for (int i = n; i % 16; i++) {
            out[i] = 0.0f;
        }
    }

    // s[4 rows][K keys] = q . k over rows of d elements as they lie: no transposition, but a reduction per score
    template <int K>
    static void dots(const float * q, const float * k, int64_t d, float * s) {
        V sum[K][4];
        for (int j = 0; j < K; j++) {
            for (int r = 0; r < 4; r++) {
                sum[j][r] = L::zero();
            }
        }
        for (int64_t i = 0; i < d; i += L::width) {
            V x[4];
            for (int r = 0; r < 4; r++) {
                x[r] = L::load(q + r * d + i);
            }
            for (int j = 0; j < K; j++) {
                const V y = L::load(k + j * d + i);
                for (int r = 0; r < 4; r++) {
                    sum[j][r] = L::fma(x[r], y, sum[j][r]);
                }
            }
        }
        for (int j = 0; j < K; j++) {
            float four[4];
            L::sums(sum[j], four);
            for (int r = 0; r < 4; r++) {
                s[r * key_block + j] = four[r];
            }
        }
    }

    // R <= 4 rows from `row` on
    template <int R>
    static void softmax_quad(const attention_item & w, int head, const item_memory & m, const key_span & span, int row,
                             float * s) {
        if constexpr (L::updates_together && R > 1) {
            const attention_args & a     = *w.args;
            const int              group = a.n_head / a.n_head_kv;
            const auto             state = [&](int r) { return span.states[(row + r) / group]; };
            bool                   suits = a.logit_softcap == 0.0f && !span.inverse_probability;
            for (int r = 0; suits && r < R; r++) {
                suits = state(r) == all_plain ||
                        (state(r) == mixed && span.n % L::width == 0); // a mask is read 16 at a time
            }
            if (suits) {
                row_rule rules[R];
                for (int r = 0; r < R; r++) {
                    add_pairs(w, head, span, row + r, s + r * key_block);
                    rules[r] = rule_of(w, span, head, row + r);
                }
                softmax::template update_together<R>(rules, s, span.n, m.max + row, m.sum + row,
                                                     m.acc + row * m.d_v_padded, m.d_v_padded);
                return;
            }
        }
        for (int r = 0; r < R; r++) {
            softmax_row(w, head, m, span, row + r, s + r * key_block);
        }
    }

    // Rows first .. first + 3 as F32, zeros past the last one
    static void pack_quad(const attention_item & w, int head, const item_memory & m, int first) {
        const attention_args & a     = *w.args;
        const int              group = a.n_head / a.n_head_kv;
        const int64_t          d     = round_up(a.d_k, 16);
        float *                out   = static_cast<float *>(m.q) + first * d;
        for (int row = first; row < first + 4; row++, out += d) {
            const int n = row < m.rows ? a.d_k : 0;
            if (n > 0) {
                load_query(a, w.q0 + row / group, head * group + row % group, query_factor(a), out);
            }
            std::memset(out + n, 0, (d - n) * sizeof(float));
        }
    }

    // Decode: makes the quads of rows that see keys of this span ready, unless they are, and calls pack(m, row) for
    // each of them and each KV head. In a batch of many sequences most see nothing of an item's keys.
    template <class Pack>
    static void prepare_rows(const attention_item & w, const key_span & span, uint32_t & ready, Pack pack) {
        const int rows = int(w.n_queries) * (w.args->n_head / w.args->n_head_kv);
        for (int row = 0; row < rows; row += 4) {
            if (ready >> row / 4 & 1 || !any_visible(w, span, row, 4)) {
                continue;
            }
            ready |= 1u << row / 4;
            for (int i = 0; i < w.n_head; i++) {
                const item_memory m(*w.args, w.decode, w.n_queries, w.memory, i);
                const int         n = rows - row < 4 ? rows - row : 4;
                std::memset(m.acc + row * m.d_v_padded, 0, size_t(n) * m.d_v_padded * sizeof(float));
                pack_quad(w, w.head0 + i, m, row);
                pack(m, row);
            }
        }
    }

    // Decode: s[rows][key_block] of all rows. Hot ones are as prefill scores them, bit by bit, and so are those of
    // other types, where it costs little beside their conversion. The rest are taken as they lie.
    static void score_rows(const attention_item & w, int head, const item_memory & m, const key_span & span,
                           float * s) {
        const int64_t d = round_up(w.args->d_k, 16);
        if (span.is_hot || span.segment->k.type == row_type::other) {
            const int ld = block_keys(*w.args); // what the panel holds of long rows
            transpose_keys(w, head, span, ld, w.panels->k);
            for (int r = 0; r < m.rows; r += L::rows) {
                const int rows = m.rows - r < L::rows ? m.rows - r : L::rows;
                if (any_visible(w, span, r, rows)) {
                    product_of<L>::template multiply<false>(rows, static_cast<const float *>(m.q) + r * d, d,
                                                            w.panels->k, ld, s + r * key_block, key_block, int(d),
                                                            int(round_up(span.n, L::width)));
                }
            }
            return;
        }
        const float * q             = static_cast<const float *>(m.q);
        float * __restrict k        = w.panels->k;
        const attention_rows & rows = span.segment->k;
        prefetcher             ahead(w, rows, span, head, block_keys(*w.args));
        for (int j = 0; j < span.n; j++) {
            ahead.step();
            dequantise(rows, span.first + j, head, w.args->d_k, k + j * d);
        }
        for (int r = 0; r < m.rows; r += 4) { // rows are padded
            if (!any_visible(w, span, r, 4)) {
                continue;
            }
            int j = 0;
            for (; j + L::dot_keys <= span.n; j += L::dot_keys) {
                dots<L::dot_keys>(q + r * d, k + j * d, d, s + r * key_block + j);
            }
            for (; j < span.n; j++) {
                dots<1>(q + r * d, k + j * d, d, s + r * key_block + j);
            }
        }
    }

    static void dequantise_values(const attention_item & w, int head, const key_span & span, float * panel) {
        const attention_rows & rows = span.segment->v;
        const int64_t          d    = round_up(w.args->d_v, 16);
        prefetcher             ahead(w, rows, span, head, block_keys(*w.args));
        for (int j = 0; j < span.n; j++) {
            ahead.step();
            dequantise(rows, span.first + j, head, w.args->d_v, panel + j * d);
        }
    }

    // Scores of the subtracted bias of K
    static void add_pairs(const attention_item & w, int head_kv, const key_span & span, int row, float * s) {
        const attention_args & a     = *w.args;
        const int              group = a.n_head / a.n_head_kv;
        const int64_t          first = span.segment->first_angle + span.first;
        for (int i = 0; i < span.segment->n_pairs; i++) {
            const attention_pair & pair = span.segment->pairs[i];
            const pair_score       x    = score_of(a, pair, w.q0 + row / group, head_kv * group + row % group);
            if (x.by_cosine == 0.0f && x.by_sine == 0.0f) {
                continue; // another head's
            }
            const V       by_cosine = L::set(query_factor(a) * x.by_cosine);
            const V       by_sine   = L::set(query_factor(a) * x.by_sine);
            const float * cosines   = pair.cosines + first;
            const float * sines     = pair.sines + first;
            float         gathered[2][key_block];
            if (span.pages || span.list) {
                for (int j = 0; j < round_up(span.n, L::width); j++) {
                    const int64_t key = span.segment->first_angle + key_at(span, j < span.n ? j : 0);
                    gathered[0][j]    = pair.cosines[key];
                    gathered[1][j]    = pair.sines[key];
                }
                cosines = gathered[0];
                sines   = gathered[1];
            }
            for (int j = 0; j < span.n; j += L::width) {
                const V sum = L::fma(by_cosine, L::load(cosines + j), L::load(s + j));
                L::store(s + j, L::fma(by_sine, L::load(sines + j), sum));
            }
        }
    }

    static void softmax_row(const attention_item & w, int head, const item_memory & m, const key_span & span, int row,
                            float * s) {
        if (span.states[row / (w.args->n_head / w.args->n_head_kv)] == all_hidden) {
            std::memset(s, 0, round_up(span.n, 16) * sizeof(float));
            return;
        }
        add_pairs(w, head, span, row, s);
        softmax::update(rule_of(w, span, head, row), s, span.n, m.max[row], m.sum[row], m.acc + row * m.d_v_padded,
                        m.d_v_padded);
    }

    // Decode: scores of all rows become weights, and each() is called for each of them.
    template <class Each>
    static void softmax_rows(const attention_item & w, int head, const item_memory & m, const key_span & span,
                             float * s, Each each) {
        for (int row = 0; row < m.rows; row += 4) {
            const int rows = m.rows - row < 4 ? m.rows - row : 4;
            for (int r = 0; r < rows; r++) {
                each();
            }
            with_rows(rows, [&](auto R) { softmax_quad<R>(w, head, m, span, row, s + row * key_block); });
        }
    }

    // acc += s v for all rows
    static void add_values(const attention_item & w, int head, const item_memory & m, const key_span & span,
                           const float * s) {
        const int64_t d      = round_up(w.args->d_v, 16);
        float * __restrict v = w.panels->v;
        dequantise_values(w, head, span, v);
        for (int row = 0; row < m.rows; row += L::rows) {
            if (!any_visible(w, span, row, L::rows)) {
                continue;
            }
            product_of<L>::template multiply<true>(m.rows - row, s + row * key_block, key_block, v, d,
                                                   m.acc + row * m.d_v_padded, m.d_v_padded, span.n, int(d));
        }
    }

    static void decode_block(const attention_item & w, int head, const item_memory & m, const key_span & span) {
        alignas(64) float s[decode_rows * key_block];
        score_rows(w, head, m, span, s);
        softmax_rows(w, head, m, span, s, [] {});
        add_values(w, head, m, span, s);
    }

    // K transposed so that keys are columns: scores of many rows need no reduction. Rows go through the panel of V.
    static void transpose_keys(const attention_item & w, int head, const key_span & span, int64_t ld, float * panel) {
        static_assert(L::width * attention_max_head_size <= block_panels::floats);
        const int64_t d   = round_up(w.args->d_k, 16);
        float *       row = w.panels->v;
        for (int j = 0; j < span.n; j += L::width) {
            for (int i = 0; i < L::width; i++) { // past the last key, repeat it: its scores are set to -inf later
                const int key = j + i < span.n ? j + i : span.n - 1;
                dequantise(span.segment->k, span.first + key, head, w.args->d_k, row + i * d);
            }
            for (int64_t i = 0; i < d; i += L::width) {
                L::transpose(row + i, d, panel + i * ld + j, ld);
            }
        }
    }

    // Inlined into the loop over blocks, GCC 12 makes its products a tenth slower.
    [[gnu::noinline]] static void prefill_block(const attention_item & w, int head, const item_memory & m,
                                                const key_span & span) {
        const int64_t     d   = round_up(w.args->d_k, 16);
        const int64_t     d_v = round_up(w.args->d_v, 16);
        const int         ld  = block_keys(*w.args);
        float *           k   = w.panels->k;
        float *           v   = w.panels->v;
        alignas(64) float s[L::rows * key_block];
        transpose_keys(w, head, span, ld, k);
        dequantise_values(w, head, span, v);
        for (int row = 0; row < m.rows; row += L::rows) {
            const int rows = m.rows - row < L::rows ? m.rows - row : L::rows;
            if (!any_visible(w, span, row, rows)) {
                continue;
            }
            product_of<L>::template multiply<false>(rows, static_cast<const float *>(m.q) + row * d, d, k, ld, s,
                                                    key_block, int(d), int(round_up(span.n, L::width)));
            for (int r = 0; r < rows; r += 4) {
                with_rows(rows - r, [&](auto R) { softmax_quad<R>(w, head, m, span, row + r, s + r * key_block); });
            }
            product_of<L>::template multiply<true>(rows, s, key_block, v, d_v, m.acc + row * m.d_v_padded, m.d_v_padded,
                                                   span.n, int(d_v));
        }
    }

    // Keys per block: what the panels hold
    static int block_keys(const attention_args & a) {
        const int64_t d = round_up(a.d_k > a.d_v ? a.d_k : a.d_v, 16);
        return d <= 256 ? 64 : d <= 512 ? 32 : 16;
    }

    // Prefill: block(m, span) for each block of each split that some row sees, and all splits are summed up.
    template <class Block>
    static void prefill_splits(const attention_item & w, int step, Block block) {
        const item_memory m(*w.args, w.decode, w.n_queries, w.memory, 0);
        attention_item    part = w;
        for (int row = 0; row < m.rows; row++) {
            m.all.max[row] = -INFINITY;
        }
        for (int64_t i = w.split0; i < w.split1; i++) {
            bool any = false;
            go_to_split(part, i);
            for_each_block(part, step, [&](const key_span & span) {
                attention_segment copied;
                if (!any) {
                    clear(m);
                    any = true;
                }
                block(m, place_rows(w, w.head0, span, copied));
            });
            for (int row = 0; any && row < m.rows; row++) {
                sums::add(m.all, m, row, m.d_v_padded);
            }
        }
    }

    static void run(const attention_item & w) {
        if (!w.decode) {
            const item_memory m(*w.args, w.decode, w.n_queries, w.memory, 0);
            for (int row = 0; row < m.rows; row += 4) {
                pack_quad(w, w.head0, m, row);
            }
            prefill_splits(w, block_keys(*w.args),
                           [&](const item_memory & m, const key_span & span) { prefill_block(w, w.head0, m, span); });
            return;
        }
        for (int i = 0; i < w.n_head; i++) {
            begin(item_memory(*w.args, w.decode, w.n_queries, w.memory, i));
        }
        uint32_t   ready   = 0;
        const auto prepare = [&](const key_span & span) {
            prepare_rows(w, span, ready, [](const item_memory &, int) {});
        };
        for_each_block_read(w, block_keys(*w.args), prepare, [&](int i, const key_span & span) {
            decode_block(w, w.head0 + i, item_memory(*w.args, w.decode, w.n_queries, w.memory, i), span);
        });
    }
};

} // namespace
} // namespace mixedkv
