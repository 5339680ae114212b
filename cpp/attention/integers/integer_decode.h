// Decode over rows of a scale and integers (integers.h), their integers multiplied as they are with Q and the weights
// as integers. Body says how: a vector layer L, four rows of Q (quad, pack_block), a block of 16 keys transposed
// to columns (columns, score_block), and sums over keys (add_block). Weights are 16-bit integers, or bytes where Body
// has in_bytes: then value_scales and round_weights are its own.

#pragma once

#include "integers.h"

namespace mixedkv {
namespace {

// Groups of N neighbouring keys, in order, of which one has a weight in some row
template <int N>
struct key_groups {
    uint8_t at[key_block / N];
    int     n = 0;

    explicit key_groups(uint64_t used) {
        used |= used >> 1;
        if (N == 4) {
            used |= used >> 2;
        }
        constexpr uint64_t firsts = N == 4 ? 0x1111111111111111 : 0x5555555555555555;
        for (used &= firsts; used; used &= used - 1) {
            at[n++] = uint8_t(__builtin_ctzll(used) / N);
        }
    }
    template <class Each>
    void for_each(Each each) const {
        if (n > 0 && at[n - 1] == n - 1) { // none is left out
            for (int i = 0; i < n; i++) {
                each(i);
            }
            return;
        }
        for (int j = 0; j < n; j++) {
            each(at[j]);
        }
    }
};

using key_pairs = key_groups<2>;

constexpr bool has_integers_or_unpacked(row_type type) {
    return has_integers(type) || type == row_type::tc3 || type == row_type::q5_0;
}

// As with_integers, for those as well whose rows are unpacked first
template <class F>
bool with_integers_or_unpacked(row_type type, F f) {
    if (type == row_type::tc3) {
        f(type_constant<unpacked_tc3>{});
        return true;
    }
    if (type == row_type::q5_0) {
        f(type_constant<unpacked_q5_0>{});
        return true;
    }
    return with_integers(type, f);
}

template <class Body>
struct integer_decode {
    using L                = typename Body::L;
    using base             = tile<L>;
    using quad             = typename Body::quad;
    using columns_of_block = typename Body::columns_of_block;
    using integers         = decltype(L::to_int16(L::zero(), L::zero()));
    using groups           = key_groups<Body::keys_together>;

    static constexpr int max_row_bytes = 256 / 32 * most_block_bytes;

    // Behind the F32 queries that other types need
    static quad * quads(const attention_args & a, const item_memory & m) {
        return reinterpret_cast<quad *>(static_cast<char *>(m.q) + m.rows_padded * round_up(a.d_k, 128) * 4);
    }

    // From the F32 queries, rows first .. first + 3, which are padded with zeros
    static void pack_quad(const attention_args & a, const item_memory & m, int first) {
        const int64_t d   = round_up(a.d_k, 16);
        quad *        out = quads(a, m) + first / 4 * (a.d_k / 32);
        for (int b = 0; 32 * b < a.d_k; b++, out++) {
            for (int r = 0; r < 4; r++) {
                Body::pack_block(static_cast<const float *>(m.q) + (first + r) * d + 32 * b, r, *out);
            }
        }
    }

    // 16 rows from p on, n of them there: past the last one it is repeated, in `local`
    template <row_type type>
    static const char * sixteen(const char * p, int64_t & row, int n, int n_blocks, char * local) {
        if (n >= 16) {
            return p;
        }
        for (int i = 0; i < 16; i++) {
            std::memcpy(local + i * max_row_bytes, p + (i < n ? i : n - 1) * row, scale_at(type, n_blocks));
        }
        row = max_row_bytes;
        return local;
    }

    // n rows of 32 n_blocks elements in type, of which the first is at p and the next `row` bytes further; what has to
    // be unpacked first is then in `unpacked`
    template <row_type type>
    static const char * unpacked_rows(const char * p, int64_t & row, int n, int n_blocks, char * unpacked) {
        if constexpr (unpacked_bytes(type) > 0) {
            for (int i = 0; i < n; i++) {
                unpack_row(type_constant<type>{}, p + i * row, n_blocks,
                           unpacked + unpacked_bytes(type) * n_blocks * i);
            }
            row = unpacked_bytes(type) * n_blocks;
            return unpacked;
        }
        return p;
    }

    template <row_type type>
    static void score_keys(const attention_item & w, int head, const item_memory & m, const key_span & span,
                           prefetcher & ahead, float * s) {
        const attention_rows & rows     = span.segment->k;
        const int              n_blocks = w.args->d_k / 32;
        constexpr row_type     stored   = stored_type(type);
        char                   local[16 * max_row_bytes];
        alignas(64) char       unpacked[1 + 16 * unpacked_bytes(type) * 256 / 32];
        key_scales             scales;
        columns_of_block       x;
        for (int j = 0; j < span.n; j += 16) {
            int64_t      row   = rows.row;
            const char * p     = sixteen<stored>(key_row(rows, span.first + j, head), row, span.n - j, n_blocks, local);
            int64_t      bytes = row;
            const char * ints  = unpacked_rows<type>(p, bytes, 16, n_blocks, unpacked);
            for (int r = 0; r < m.rows; r++) {
                for (int i = 0; i < 16; i += L::width) {
                    L::store(s + r * key_block + j + i, L::zero());
                }
            }
            for (int b = 0; b < n_blocks; b++) {
                for (int i = 0; b % 4 == 0 && i < 16; i += 4) {
                    const int left = n_blocks - b;
                    scales.load<stored>(p + i * row + scale_at(stored, b), row, left < 4 ? left : 4, i);
                }
                Body::template columns<type>(ints + integers_at(type, b), bytes, x);
                for (int q = 0; 4 * q < m.rows; q++) {
                    if (!any_visible(w, span, 4 * q, 4)) {
                        continue;
                    }
                    ahead.step(n_blocks < 16 ? 16 / n_blocks : 1); // 64 in all, of a quad
                    Body::template score_block<type>(x, scales.half[b % 4], quads(*w.args, m)[q * n_blocks + b],
                                                     m.rows - 4 * q < 4 ? m.rows - 4 * q : 4,
                                                     s + 4 * q * key_block + j);
                }
            }
        }
    }

    // Blocks of 32 elements that share a scale, and so weights
    template <row_type type>
    static constexpr int per_scale() {
        return block_elements(type) / 32;
    }

    // R rows of weights s against up to 4 blocks of n keys; units of each row
    template <row_type type, int R>
    static void add_rows(const char * p, int64_t row, int n, const groups & keys, int n_blocks, prefetcher & ahead,
                         const weight_unit<L> * const * units, const float * s, float * acc, int64_t ld) {
        alignas(64) int32_t ints[4][R][32];
        float               top[R];
        for (int r = 0; r < R; r++) {
            block_weights<L> weights;
            top[r] = relative_weights<L>(s + r * key_block, weights);
            for (int b = 0; b < n_blocks; b += per_scale<type>()) {
                integers packed[key_block / (2 * L::width)];
                units[r][b].apply(weights, packed);
                Body::keep_weights(packed, ints[b][r]);
            }
        }
        for (int b = 0; b < n_blocks; b++) {
            const int first = b / per_scale<type>() * per_scale<type>();
            float     scales[R];
            for (int r = 0; r < R; r++) {
                scales[r] = top[r] * units[r][first].unit;
            }
            Body::template add_block<type, R>(p + integers_at(type, b), row, n, keys, ahead, ints[first], scales,
                                              acc + 32 * b, ld);
        }
    }

    // The units of a query for up to 4 blocks of elements. Those follow from the keys that it sees, and not from who is
    // worked on beside it; where they are extreme, each row takes those of the keys that it weighs.
    struct query_units {
        weight_unit<L> of[4];
        int64_t        query   = -1;
        bool           extreme = false;

        template <row_type type>
        void find(const key_scales & scales, int n_blocks, uint64_t keys) {
            extreme = false;
            for (int b = 0; b < n_blocks; b += per_scale<type>()) {
                of[b].find(scales.half[b], keys);
                extreme |= of[b].is_extreme();
            }
        }
    };

    // Up to 4 rows from `first` on
    template <row_type type>
    static void add_quad(const attention_item & w, const key_span & span, const char * p, int64_t row, int n_blocks,
                         const key_scales & scales, prefetcher & ahead, int first, int rows, const float * weights,
                         float * acc, int64_t ld) {
        const uint64_t used = used_keys<L>(weights, rows, key_block);
        if (!used) {
            return;
        }
        const int              group = w.args->n_head / w.args->n_head_kv;
        query_units            known[4];
        const weight_unit<L> * units[4];
        for (int r = 0; r < rows; r++) {
            const int64_t query = (first + r) / group;
            const int     same  = r > 0 && known[r - 1].query == query && !known[r - 1].extreme ? r - 1 : r;
            units[r]            = same < r ? units[same] : known[r].of;
            known[r].query      = query;
            if (same < r) {
                continue;
            }
            known[r].template find<type>(scales, n_blocks, visible_keys(w, span, query));
            if (known[r].extreme) {
                known[r].template find<type>(scales, n_blocks, used_keys<L>(weights + r * key_block, 1, key_block));
                known[r].extreme = true;
            }
        }
        const groups keys(used);
        with_rows(rows,
                  [&](auto R) { add_rows<type, R>(p, row, span.n, keys, n_blocks, ahead, units, weights, acc, ld); });
    }

    // R rows of weights s in bytes against up to 4 blocks of n keys
    template <row_type type, int R, class Scales>
    static void add_bytes(const char * p, int64_t row, int n, const groups & fours, int n_blocks, const Scales & of,
                          prefetcher & ahead, const float * s, float * acc, int64_t ld) {
        constexpr int       per = per_scale<type>();
        alignas(64) int32_t ints[4][R][16];
        float               units[R][4];
        for (int r = 0; r < R; r++) {
            Body::template round_weights<per>(s + r * key_block, of, { ints[0][r], ints[1][r], ints[2][r], ints[3][r] },
                                              units[r]);
        }
        for (int b = 0; b < n_blocks; b++) {
            const int first = b / per * per;
            float     scales[R];
            for (int r = 0; r < R; r++) {
                scales[r] = units[r][first];
            }
            Body::template add_block<type, R>(p + integers_at(type, b), row, n, fours, of.negative[first], ahead,
                                              ints[first], scales, acc + 32 * b, ld);
        }
    }

    template <row_type type>
    static void add_values(const attention_item & w, int head, const item_memory & m, const key_span & span,
                           prefetcher & ahead, float * s) {
        const attention_rows & rows = span.segment->v;
        key_scales             scales;
        clear_rest(m, span.n, s);
        for (int g = 0; 128 * g < w.args->d_v; g++) {
            const int          left     = w.args->d_v / 32 - g * 4;
            const int          n_blocks = left < 4 ? left : 4;
            constexpr row_type stored   = stored_type(type);
            int64_t            bytes    = rows.row;
            const char *       p        = key_row(rows, span.first, head) + scale_at(stored, 4 * g);
            alignas(64) char   unpacked[1 + key_block * unpacked_bytes(type) * 4];
            scales.load_all<stored>(p, bytes, span.n, n_blocks);
            const char * ints = unpacked_rows<type>(p, bytes, span.n, n_blocks, unpacked);
            if constexpr (Body::in_bytes) {
                const typename Body::value_scales of(scales);
                for (int row = 0; row < m.rows; row += 4) {
                    const int      rows_here = m.rows - row < 4 ? m.rows - row : 4;
                    const uint64_t used      = used_keys<L>(s + row * key_block, rows_here, key_block);
                    if (used) {
                        with_rows(rows_here, [&](auto R) {
                            add_bytes<type, R>(ints, bytes, span.n, groups(used), n_blocks, of, ahead,
                                               s + row * key_block, m.acc + row * m.d_v_padded + 128 * g, m.d_v_padded);
                        });
                    }
                }
            } else {
                for (int row = 0; row < m.rows; row += 4) {
                    add_quad<type>(w, span, ints, bytes, n_blocks, scales, ahead, row,
                                   m.rows - row < 4 ? m.rows - row : 4, s + row * key_block,
                                   m.acc + row * m.d_v_padded + 128 * g, m.d_v_padded);
                }
            }
        }
    }

    static void block(const attention_item & w, int head, const item_memory & m, const key_span & span) {
        alignas(64) float s[decode_rows * key_block];
        prefetcher        keys(w, span.segment->k, span, head, key_block);
        prefetcher        values(w, span.segment->v, span, head, key_block);
        if (!with_integers_or_unpacked(span.segment->k.type, [&](auto type) {
                score_keys<decltype(type)::value>(w, head, m, span, keys, s);
            })) {
            base::score_rows(w, head, m, span, s);
        }
        base::softmax_rows(w, head, m, span, s, [] {});
        if (!with_integers_or_unpacked(span.segment->v.type, [&](auto type) {
                add_values<decltype(type)::value>(w, head, m, span, values, s);
            })) {
            base::add_values(w, head, m, span, s);
        }
    }

    static bool fits(const attention_args & a) { return a.d_k <= 256 && a.d_v <= 256; }

    static void run(const attention_item & w) {
        decode_blocks<base>(
            w, [&](const item_memory & m, int row) { pack_quad(*w.args, m, row); },
            [&](int head, const item_memory & m, const key_span & span) { block(w, head, m, span); });
    }
};

} // namespace
} // namespace mixedkv
