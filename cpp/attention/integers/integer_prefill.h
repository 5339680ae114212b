// Prefill over rows of a scale and integers (integers.h): a block of 64 keys is unpacked once for all rows of an item,
// then multiplied as in decode (integer_decode.h). Sums of integers are exact and scales are applied in the same order,
// so a query has the same bits in both. Body says how: keys and values of a block unpacked, products of R rows with
// them, and how weights become integers: here, kept by its keep_weights, or by its own round_weights (in_bytes).
//
// Where Body pads rows, the last ones are worked on as most_rows: what the rows beyond them hold is of no use.
//
// Rows of other types, as F16 ones, are dequantised to F32 (tile.h).

#pragma once

#include "integer_decode.h"

namespace mixedkv {
namespace {

template <class Body>
struct integer_prefill {
    using L    = typename Body::L;
    using base = tile<L>;
    using rows = integer_decode<typename Body::decode>;

    using value_scales = typename Body::decode::value_scales;

    static constexpr int most_rows     = Body::most_rows;
    static constexpr int weight_dwords = Body::decode::in_bytes ? 16 : 32; // of a row and block

    static bool fits(const attention_args & a) {
        return rows::fits(a) && a.d_k % 32 == 0 && a.d_v % 32 == 0 &&
               (has_integers_or_unpacked(a.segments[0].k.type) || has_integers_or_unpacked(a.segments[0].v.type));
    }

    // What is known of a block of keys
    struct block_state {
        alignas(64) float k[8][key_block]; // scales, by block of elements
        value_scales   v[2];               // by 4 blocks of elements
        weight_unit<L> units[8];           // of a query, by block of elements
        int64_t        query      = -1;
        bool           extreme[2] = {}; // of 4 blocks each, as decode has it
    };

    template <row_type type>
    static void unpack_keys(const attention_item & w, int head, const key_span & span, block_state & state) {
        const attention_rows & stored_rows = span.segment->k;
        const int              n_blocks    = w.args->d_k / 32;
        constexpr row_type     stored      = stored_type(type);
        char                   local[16 * rows::max_row_bytes];
        alignas(64) char       unpacked[1 + 16 * unpacked_bytes(type) * 256 / 32];
        key_scales             scales;
        prefetcher             ahead(w, stored_rows, span, head, key_block);
        for (int j = 0; j < span.n; j += 16) {
            int64_t      row   = stored_rows.row;
            const char * first = key_row(stored_rows, span.first + j, head);
            const char * p     = rows::template sixteen<stored>(first, row, span.n - j, n_blocks, local);
            int64_t      bytes = row;
            const char * ints  = rows::template unpacked_rows<type>(p, bytes, 16, n_blocks, unpacked);
            ahead.step(16);
            for (int b = 0; b < n_blocks; b++) {
                for (int i = 0; b % 4 == 0 && i < 16; i += 4) {
                    const int left = n_blocks - b;
                    scales.load<stored>(p + i * row + scale_at(stored, b), row, left < 4 ? left : 4, i);
                }
                for (int i = 0; i < 16; i += L::width) {
                    L::store(state.k[b] + j + i, L::load_half(scales.half[b % 4] + i));
                }
                Body::template unpack_keys<type>(ints + integers_at(type, b), bytes, n_blocks, b, j / 16, w.panels->k);
            }
        }
    }

    template <row_type type>
    static void unpack_values(const attention_item & w, int head, const key_span & span, block_state & state) {
        const attention_rows & stored_rows = span.segment->v;
        constexpr row_type     stored      = stored_type(type);
        prefetcher             ahead(w, stored_rows, span, head, key_block);
        for (int g = 0; 128 * g < w.args->d_v; g++) {
            const int        left     = w.args->d_v / 32 - g * 4;
            const int        n_blocks = left < 4 ? left : 4;
            int64_t          bytes    = stored_rows.row;
            const char *     p        = key_row(stored_rows, span.first, head) + scale_at(stored, 4 * g);
            alignas(64) char unpacked[1 + key_block * unpacked_bytes(type) * 4];
            key_scales       scales;
            scales.load_all<stored>(p, bytes, span.n, n_blocks);
            state.v[g]        = value_scales(scales);
            const char * ints = rows::template unpacked_rows<type>(p, bytes, span.n, n_blocks, unpacked);
            for (int b = 0; b < n_blocks; b++) {
                ahead.step(16);
                Body::template unpack_values<type>(ints + integers_at(type, b), bytes, span.n, 4 * g + b, state.v[g],
                                                   w.panels->v);
            }
        }
    }

    // The units in which the row's weights become integers
    template <row_type type>
    static const weight_unit<L> * units_of(const attention_item & w, const key_span & span, int row, const float * s,
                                           weight_unit<L> * own, block_state & state) {
        const int     n_blocks = w.args->d_v / 32;
        const int64_t query    = row / (w.args->n_head / w.args->n_head_kv);
        // queries that see all keys share them
        const int64_t known    = span.states[query] == all_plain ? -2 : query;
        if (state.query != known) {
            state.query      = known;
            state.extreme[0] = state.extreme[1] = false;
            for (int b = 0; b < n_blocks; b += rows::template per_scale<type>()) {
                state.units[b].find(state.v[b / 4].half[b % 4], visible_keys(w, span, query));
                state.extreme[b / 4] |= state.units[b].is_extreme();
            }
        }
        if (!state.extreme[0] && !state.extreme[1]) {
            return state.units;
        }
        for (int b = 0; b < n_blocks; b += rows::template per_scale<type>()) {
            if (state.extreme[b / 4]) {
                own[b].find(state.v[b / 4].half[b % 4], used_keys<L>(s, 1, key_block));
            } else {
                own[b] = state.units[b];
            }
        }
        return own;
    }

    // Weights of n <= R rows times the scales of V become integers in units, by blocks of elements that share a scale
    template <row_type type, int R>
    static void round_weights(const attention_item & w, const key_span & span, int row, int n, const float * s,
                              int32_t (*ints)[R][weight_dwords], float (*units)[R], block_state & state) {
        constexpr int per      = rows::template per_scale<type>();
        const int     n_blocks = w.args->d_v / 32;
        for (int r = 0; r < n; r++, s += key_block) {
            if constexpr (Body::decode::in_bytes) {
                for (int b = 0; b < n_blocks; b += 4) {
                    float     four[4];
                    int32_t * to[4];
                    for (int i = 0; i < 4; i++) {
                        to[i] = ints[(b + i) / per][r];
                    }
                    Body::decode::template round_weights<per>(s, state.v[b / 4], to, four);
                    for (int i = 0; i < 4; i += per) {
                        units[(b + i) / per][r] = four[i];
                    }
                }
            } else {
                weight_unit<L>         own[8];
                block_weights<L>       weights;
                const weight_unit<L> * of  = units_of<type>(w, span, row + r, s, own, state);
                const float            top = relative_weights<L>(s, weights);
                for (int b = 0; b < n_blocks; b += per) {
                    typename rows::integers packed[key_block / (2 * L::width)];
                    of[b].apply(weights, packed);
                    Body::template keep_weights<R>(packed, r, ints[b / per]);
                    units[b / per][r] = top * of[b].unit;
                }
            }
        }
    }

    // acc += weights s[n <= R][key_block] times the values, from row `row` on
    template <row_type type, int R>
    static void add_values(const attention_item & w, const key_span & span, const item_memory & m, int row, int n,
                           const float * s, block_state & state) {
        constexpr int       per = rows::template per_scale<type>();
        alignas(64) int32_t ints[8 / per][R][weight_dwords];
        float               units[8 / per][R];
        if (n < R) {
            std::memset(units, 0, sizeof(units));
        }
        round_weights<type, R>(w, span, row, n, s, ints, units, state);
        for (int b = 0; b < w.args->d_v / 32; b++) {
            Body::template add_values<type, R>(w.panels->v, span.n, b, ints[b / per], units[b / per],
                                               m.acc + row * m.d_v_padded + 32 * b, m.d_v_padded);
        }
    }

    // R rows from `row` on against the unpacked block, or `there` of them where Body pads rows
    template <int R>
    static void rows_of_block(const attention_item & w, int head, const item_memory & m, const key_span & span, int row,
                              bool k_unpacked, bool v_unpacked, block_state & state, int there = R) {
        const int              n   = Body::pads_rows ? there : R;
        const attention_args & a   = *w.args;
        const int64_t          d   = round_up(a.d_k, 16);
        const int64_t          d_v = round_up(a.d_v, 16);
        alignas(64) float      s[R * key_block];
        if (!any_visible(w, span, row, n)) {
            return;
        }
        if (k_unpacked) {
            with_integers_or_unpacked(span.segment->k.type, [&](auto type) {
                Body::template score<decltype(type)::value, R>(a, m, row, w.panels->k, state.k, s);
            });
        } else {
            for (int r = 0; r < n; r += L::rows) {
                product_of<L>::template multiply<false>(
                    n - r < L::rows ? n - r : L::rows, static_cast<const float *>(m.q) + (row + r) * d, d, w.panels->k,
                    key_block, s + r * key_block, key_block, int(d), int(round_up(span.n, L::width)));
            }
        }
        constexpr int together = R < 4 ? R : 4;
        int           r        = 0;
        for (; r + together <= n; r += together) {
            base::template softmax_quad<together>(w, head, m, span, row + r, s + r * key_block);
        }
        for (; Body::pads_rows && r < n; r++) {
            base::template softmax_quad<1>(w, head, m, span, row + r, s + r * key_block);
        }
        for (int r = 0; r < n && span.n < key_block; r++) {
            std::memset(s + r * key_block + span.n, 0, (key_block - span.n) * sizeof(float));
        }
        if (v_unpacked) {
            with_integers_or_unpacked(span.segment->v.type, [&](auto type) {
                add_values<decltype(type)::value, R>(w, span, m, row, n, s, state);
            });
        } else {
            for (int r = 0; r < n; r += L::rows) {
                product_of<L>::template multiply<true>(n - r < L::rows ? n - r : L::rows, s + r * key_block, key_block,
                                                       w.panels->v, d_v, m.acc + (row + r) * m.d_v_padded, m.d_v_padded,
                                                       span.n, int(d_v));
            }
        }
    }

    static void block(const attention_item & w, int head, const item_memory & m, const key_span & span) {
        block_state state;
        const bool  k_unpacked = with_integers_or_unpacked(
            span.segment->k.type, [&](auto type) { unpack_keys<decltype(type)::value>(w, head, span, state); });
        if (!k_unpacked) {
            base::transpose_keys(w, head, span, key_block, w.panels->k);
        }
        const bool v_unpacked = with_integers_or_unpacked(
            span.segment->v.type, [&](auto type) { unpack_values<decltype(type)::value>(w, head, span, state); });
        if (!v_unpacked) {
            base::dequantise_values(w, head, span, w.panels->v);
        }
        int row = 0;
        for (; row + most_rows <= m.rows; row += most_rows) {
            rows_of_block<most_rows>(w, head, m, span, row, k_unpacked, v_unpacked, state);
        }
        if constexpr (Body::pads_rows) {
            if (row < m.rows) {
                rows_of_block<most_rows>(w, head, m, span, row, k_unpacked, v_unpacked, state, m.rows - row);
            }
        } else {
            for (; row + 4 <= m.rows && most_rows > 4; row += 4) {
                rows_of_block<4>(w, head, m, span, row, k_unpacked, v_unpacked, state);
            }
            for (; row < m.rows; row++) {
                rows_of_block<1>(w, head, m, span, row, k_unpacked, v_unpacked, state);
            }
        }
    }

    static void run(const attention_item & w) {
        const item_memory m(*w.args, w.decode, w.n_queries, w.memory, 0);
        for (int row = 0; row < m.rows; row += 4) {
            base::pack_quad(w, w.head0, m, row);
            Body::pack_rows(*w.args, m, row);
        }
        base::prefill_splits(w, key_block,
                             [&](const item_memory & m, const key_span & span) { block(w, w.head0, m, span); });
    }
};

template <class Decode, class Prefill>
void run_integers(const attention_item & w) {
    if (w.decode && integer_decode<Decode>::fits(*w.args)) {
        return integer_decode<Decode>::run(w);
    }
    if (!w.decode && integer_prefill<Prefill>::fits(*w.args)) {
        return integer_prefill<Prefill>::run(w);
    }
    tile<typename Decode::L>::run(w);
}

} // namespace
} // namespace mixedkv
