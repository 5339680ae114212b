// Attention of many query rows: a block dequantises a tile of keys to F16 in shared memory once, and each of its warps
// multiplies its rows with it. No F16 view of the keys lies in memory.
//
// Four tiles are under way. While one is multiplied the next is dequantised, from rows that have come as they lie;
// those of the one after that are on their way, and so is the mask of the fourth: tiles that no row of the block sees
// are not read. F16 rows are copied to where they are multiplied. Four lanes copy and dequantise a row, so the block
// meets once a tile.

#pragma once

#include "problem.h"
#include "rows.h"

namespace mixedkv {
namespace cuda {

template <int warp_rows_, int warps_, int keys_, int blocks_, bool between_>
struct prefill_shape {
    static constexpr int  warp_rows = warp_rows_; // query rows of a warp, 16 or 32: products that an operand serves
    static constexpr int  warps     = warps_;
    static constexpr int  keys      = keys_;    // of a tile
    static constexpr int  blocks    = blocks_;  // that a multiprocessor shall have room for
    static constexpr bool between   = between_; // dequantise a tile between the products of the last one
    static constexpr int  rows      = warp_rows * warps;
    static constexpr int  parts     = warp_rows / 16;
};

// What the package has. Others are for tests/measure/gpu/kernel_times.cu.
template <int d>
using usual_prefill = prefill_shape<16, (d > 128 ? 4 : 8), 32, (d > 128 ? 1 : 2), false>;

// Of a query row: what it needs of a tile that hides some key or weighs it
struct row_info {
    float slope; // in bits
    int   mask;  // bytes to its token's row in a mask; rows behind the last have the last token's
};

template <int d, class Shape>
struct prefill_layout {
    static constexpr int threads = Shape::warps * warp_size;
    static constexpr int pitch   = 2 * d + 16; // bytes of a row in F16: eight rows lie in different banks

    // of a row as it is stored, of any type but F16: a multiple of 16 that is none of 32, for the same reason
    static constexpr int raw_pitch = (row_bytes<q8_0_rows>(d) + 15) / 16 * 16;
    static_assert(raw_pitch % 32 == 16, "rows share banks");

    static constexpr int raw_size   = Shape::keys * raw_pitch; // of K, and of V
    static constexpr int f16_size   = Shape::keys * pitch;     // the same
    static constexpr int mask_pitch = 2 * Shape::keys;
    static constexpr int n_masks    = 4;

    static constexpr int f16   = Shape::rows * pitch; // behind the queries: K and V of two tiles
    static constexpr int raw   = f16 + 2 * 2 * f16_size;
    static constexpr int infos = raw + 2 * raw_size;
    static constexpr int masks = infos + Shape::rows * int(sizeof(row_info));

    // each token has a row of a mask
    MIXEDKV_SHARED(int) most_tokens(int group) { return (Shape::rows + group - 1) / group + 1; }
    MIXEDKV_SHARED(int) bytes(int group) { return masks + n_masks * most_tokens(group) * mask_pitch; }
};

// The keys that a block goes through, and their places in shared memory
template <int d, class Shape>
struct tile_reader {
    using layout = prefill_layout<d, Shape>;

    const attention_problem & p;
    const int                 stream, head_kv;
    const bool                is_hot;
    const int                 end; // of the split's keys, within their kind
    const stored_type         type_k, type_v;
    char * const              memory;
    const int                 n_tokens; // of the block's rows
    const uint16_t * const    mask;     // of the block's first token and the first key of their kind

    MIXEDKV_DEVICE_MEMBER char * mask_at(int tile) const {
        return memory + layout::masks + tile % layout::n_masks * n_tokens * layout::mask_pitch;
    }
    MIXEDKV_DEVICE_MEMBER row_info & info_of(int row) const {
        return reinterpret_cast<row_info *>(memory + layout::infos)[row];
    }
    MIXEDKV_DEVICE_MEMBER char * f16_at(int tile, bool is_v) const {
        return memory + layout::f16 + (2 * (tile % 2) + is_v) * layout::f16_size;
    }
    MIXEDKV_DEVICE_MEMBER char * raw_at(int row, bool is_v) const {
        return memory + layout::raw + is_v * layout::raw_size + row * layout::raw_pitch;
    }

    // Columns behind the last key of a kind are those of the next, or hidden: who reads them asks for `end` besides.
    MIXEDKV_DEVICE_MEMBER void copy_mask(int tile, int key0) const {
        constexpr int chunks = layout::mask_pitch / 16;
        if (key0 >= end) {
            return;
        }
#pragma unroll 1
        for (int i = thread(); i < n_tokens * chunks; i += layout::threads) {
            copy_async<16>(mask_at(tile) + 16 * i, mask + i / chunks * p.mask_token + key0 + i % chunks * 8);
        }
    }

    // Whether some row may see some key of the tile, by what this thread has copied
    MIXEDKV_DEVICE_MEMBER bool sees(int tile, int key0) const {
        constexpr int      chunks = layout::mask_pitch / 16;
        constexpr uint32_t none   = hidden | uint32_t(hidden) << 16;
        bool               res    = false;
        if (key0 < end) {
#pragma unroll 1
            for (int i = thread(); i < n_tokens * chunks; i += layout::threads) {
                const words<4> x = load_words<4>(mask_at(tile) + 16 * i);
                res |= x.at[0] != none || x.at[1] != none || x.at[2] != none || x.at[3] != none;
            }
        }
        return res;
    }

    // What the mask has for n tokens, from one of the block's on: whether any key is seen, and whether any is not, or
    // is weighed
    MIXEDKV_DEVICE_MEMBER void look_at_mask(int tile, int first, int n, bool & sees_any, bool & is_masked) const {
        constexpr int      chunks = layout::mask_pitch / 16;
        constexpr uint32_t none   = hidden | uint32_t(hidden) << 16;
        bool               seen = false, masked = false;
#pragma unroll 1
        for (int i = lane(); i < n * chunks; i += warp_size) {
            const words<4> x = load_words<4>(mask_at(tile) + (first * chunks + i) * 16);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                seen |= x.at[j] != none;
                masked |= x.at[j] != 0;
            }
        }
        sees_any  = any_lane(seen);
        is_masked = any_lane(masked);
    }

    // Which row of K, or of K and then V, the thread's four lanes have first. Those of a warp are eight in an order in
    // which the first four, and every two, lie in different banks when they are written.
    MIXEDKV_DEVICE_MEMBER int own_row() const {
        const int i = thread() / 4;
        return (i & ~5) | (i & 1) << 2 | (i & 4) >> 2;
    }

    static constexpr int  row_step  = layout::threads / 4;
    static constexpr bool one_of_kv = row_step > Shape::keys; // a warp has rows of K or of V, not of both
    static_assert(one_of_kv ? row_step == 2 * Shape::keys : Shape::keys % row_step == 0, "rows are left over");

    MIXEDKV_DEVICE_MEMBER bool has_rows(bool is_v) const { return !one_of_kv || own_row() / Shape::keys == int(is_v); }

    // The type of what this warp dequantises of K or V; F16: nothing
    MIXEDKV_DEVICE_MEMBER stored_type to_dequantise(bool is_v) const {
        return !has_rows(is_v) ? stored_type::f16 : is_v ? type_v : type_k;
    }

    // Calls f(which row) for each row that the four lanes have of K or V, if the warp has rows of it.
    template <class F>
    MIXEDKV_DEVICE_MEMBER void for_own_rows(F && f) const {
#pragma unroll
        for (int row = 0; row < Shape::keys; row += row_step) {
            f(row + own_row() % Shape::keys);
        }
    }

    template <class Rows>
    MIXEDKV_DEVICE_MEMBER void copy_row(const char * row, char * to) const {
        constexpr int width = copy_bytes(row_bytes<Rows>(d)), chunks = row_bytes<Rows>(d) / width;
        const int     t    = thread() % 4;
        const char *  from = row + t * width;
#pragma unroll
        for (int i = 0; i < (chunks + 3) / 4; i++) {
            if (chunks % 4 == 0 || 4 * i + t < chunks) {
                copy_async<width>(to + (4 * i + t) * width, from + 4 * i * width);
            }
        }
    }

    // The rows of a tile that are F16, to where they are multiplied
    MIXEDKV_DEVICE_MEMBER void copy_f16(int tile, int key0) const {
        if (type_k != stored_type::f16 && type_v != stored_type::f16) {
            return;
        }
#pragma unroll 1
        for (int is_v = 0; is_v < 2; is_v++) {
            if (has_rows(is_v) && (is_v ? type_v : type_k) == stored_type::f16) {
                for_own_rows([&](int row) {
                    copy_row<f16_rows>(find_row(p, stream, head_kv, min_of(key0 + row, end - 1), is_hot, is_v),
                                       f16_at(tile, is_v) + row * layout::pitch);
                });
            }
        }
    }

    // The others, all cold, as they are stored
    MIXEDKV_DEVICE_MEMBER void copy_raw(int key0) const {
#pragma unroll 1
        for (int is_v = 0; is_v < 2; is_v++) {
            const row_view &   all   = is_v ? p.cold.v : p.cold.k;
            const char * const first = all.data + stream * all.stream + head_kv * all.head + key0 * all.row;
            with_rows<d>(to_dequantise(is_v), [&](auto rows) {
                if constexpr (decltype(rows)::has_scale) {
                    for_own_rows([&](int row) {
                        copy_row<decltype(rows)>(first + uint32_t(min_of(row, end - 1 - key0)) * uint32_t(all.row),
                                                 raw_at(row, is_v));
                    });
                }
            });
        }
    }

    template <class Rows, int unit>
    MIXEDKV_DEVICE_MEMBER void dequantise_unit(int tile, bool is_v) const {
        if constexpr (Rows::has_scale) {
            for_own_rows([&](int row) {
                const int t = thread() % 4;
                uint32_t  y[4];
                Rows::template dequantise_runs<unit>(raw_at(row, is_v), t, y);
                char * const to = f16_at(tile, is_v) + row * layout::pitch + 64 * unit + 2 * Rows::first_run(t);
                if constexpr (Rows::second_run(0) == 4) {
                    *reinterpret_cast<words<4> *>(to) = { { y[0], y[1], y[2], y[3] } };
                } else {
                    *reinterpret_cast<words<2> *>(to)                           = { { y[0], y[1] } };
                    *reinterpret_cast<words<2> *>(to + 2 * Rows::second_run(0)) = { { y[2], y[3] } };
                }
            });
        }
    }

    template <class Rows, int unit = 0>
    MIXEDKV_DEVICE_MEMBER void dequantise_units(int tile, bool is_v) const {
        dequantise_unit<Rows, unit>(tile, is_v);
        if constexpr (unit + 1 < d / 32) {
            dequantise_units<Rows, unit + 1>(tile, is_v);
        }
    }

    MIXEDKV_DEVICE_MEMBER void dequantise_keys(int tile) const {
#pragma unroll 1
        for (int is_v = 0; is_v < 2; is_v++) {
            with_rows<d>(to_dequantise(is_v), [&](auto rows) { dequantise_units<decltype(rows)>(tile, is_v); });
        }
    }
};

// What a warp has of its rows: g, g + 8, ... are the thread's
template <int d, class Shape>
struct prefill_sums {
    static constexpr int n_own = 2 * Shape::parts;

    float m[n_own]; // the largest score so far, in bits
    float l[n_own]; // the thread's share of the sum of weights
    float o[Shape::parts][d / 8][4];
    int   first, n; // tokens of the warp's rows
};

// Of 16 rows and 8 keys each: rows g and g + 8, keys 2 t and 2 t + 1
template <class Shape>
using prefill_scores = float[Shape::parts][Shape::keys / 8][4];

template <int d, class Shape>
struct prefill_products {
    using layout = prefill_layout<d, Shape>;
    using reader = tile_reader<d, Shape>;

    // Rows of matrices that this lane points to: 16 rows by two halves of 8 elements, and the other way round
    MIXEDKV_DEVICE int row_first() { return lane() % 16 * layout::pitch + lane() / 16 * 16; }
    MIXEDKV_DEVICE int row_last() { return (lane() % 8 + lane() / 16 * 8) * layout::pitch + lane() / 8 % 2 * 16; }

    // Products of 16 elements a step, d / 32 steps. After each the thread dequantises a unit of its rows of the next
    // tile, K in the first half of the steps and V in the second.
    template <class Rows, int step>
    MIXEDKV_DEVICE void add_steps(const reader & r, int tile, const char * queries, const char * k,
                                  prefill_scores<Shape> & score) {
        constexpr int pairs = Shape::keys / 16;
        uint32_t      a[Shape::parts][4], b[pairs][4]; // b: of 16 keys both words of the first 8, then of the others
#pragma unroll
        for (int part = 0; part < Shape::parts; part++) {
            load_matrices(a[part], queries + 16 * part * layout::pitch + 32 * step);
        }
#pragma unroll
        for (int pair = 0; pair < pairs; pair++) {
            load_matrices(b[pair], k + 16 * pair * layout::pitch + 32 * step);
        }
#pragma unroll
        for (int pair = 0; pair < pairs; pair++) {
#pragma unroll
            for (int part = 0; part < Shape::parts; part++) {
                multiply_16x8x16(score[part][2 * pair], a[part], b[pair][0], b[pair][1]);
                multiply_16x8x16(score[part][2 * pair + 1], a[part], b[pair][2], b[pair][3]);
            }
        }
        r.template dequantise_unit<Rows, step % (d / 32)>(tile + 1, step >= d / 32);
        if constexpr ((step + 1) % (d / 32) != 0) {
            add_steps<Rows, step + 1>(r, tile, queries, k, score);
        }
    }

    template <bool is_v>
    MIXEDKV_DEVICE void add_half(const reader & r, int tile, const char * queries, const char * k,
                                 prefill_scores<Shape> & score) {
        constexpr int first = is_v ? d / 32 : 0;
        if constexpr (Shape::between) {
            with_rows<d>(r.to_dequantise(is_v),
                         [&](auto rows) { add_steps<decltype(rows), first>(r, tile, queries, k, score); });
        } else {
            add_steps<f16_rows, first>(r, tile, queries, k, score);
        }
    }

    // row: of the block, the warp's first
    MIXEDKV_DEVICE void multiply_keys(const reader & r, int tile, int row, prefill_scores<Shape> & score) {
        const char * queries = r.memory + row * layout::pitch + row_first();
        const char * k       = r.f16_at(tile, false) + row_last();
        add_half<false>(r, tile, queries, k, score);
        add_half<true>(r, tile, queries, k, score);
    }

    // The tile's scores become weights.
    MIXEDKV_DEVICE void softmax(const reader & r, int tile, int key0, int row, bool is_masked,
                                prefill_scores<Shape> & score, prefill_sums<d, Shape> & sums) {
        constexpr int n_tiles = Shape::keys / 8;
        const int     g = lane() / 4, t = lane() % 4;
        if (r.p.logit_softcap != 0.0f) {
#pragma unroll
            for (int part = 0; part < Shape::parts; part++) {
#pragma unroll
                for (int n = 0; n < n_tiles; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        score[part][n][i] = capped_score(r.p, score[part][n][i]);
                    }
                }
            }
        }
        if (is_masked || key0 + Shape::keys > r.end) {
#pragma unroll
            for (int own = 0; own < sums.n_own; own++) {
                const row_info info = r.info_of(row + 8 * own + g);
                const char *   mask = r.mask_at(tile) + info.mask;
#pragma unroll
                for (int n = 0; n < n_tiles; n++) {
                    const uint32_t two = *reinterpret_cast<const uint32_t *>(mask + 16 * n + 4 * t);
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float &    x      = score[own / 2][n][2 * (own % 2) + i];
                        const bool is_key = key0 + 8 * n + 2 * t + i < r.end;
                        x                 = masked_score(x, is_key ? uint16_t(two >> 16 * i) : hidden, info.slope);
                    }
                }
            }
        }

        float factor[prefill_sums<d, Shape>::n_own];
        bool  grows = false;
#pragma unroll
        for (int own = 0; own < sums.n_own; own++) {
            float largest = sums.m[own];
#pragma unroll
            for (int n = 0; n < n_tiles; n++) {
                const float * x = &score[own / 2][n][2 * (own % 2)];
                largest         = max_of(largest, max_of(x[0], x[1]));
            }
            largest     = max_of(largest, shuffle_xor(largest, 1));
            largest     = max_of(largest, shuffle_xor(largest, 2));
            factor[own] = exp2_of(sums.m[own] - base_of(largest));
            grows |= factor[own] != 1.0f;
            sums.m[own] = largest;
            sums.l[own] *= factor[own];
        }
        if (any_lane(grows)) {
#pragma unroll
            for (int part = 0; part < Shape::parts; part++) {
#pragma unroll
                for (int j = 0; j < d / 8; j++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        sums.o[part][j][i] *= factor[2 * part + i / 2];
                    }
                }
            }
        }
#pragma unroll
        for (int own = 0; own < sums.n_own; own++) {
            const float base = base_of(sums.m[own]);
#pragma unroll
            for (int n = 0; n < n_tiles; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float & x = score[own / 2][n][2 * (own % 2) + i];
                    x         = exp2_of(x - base);
                    sums.l[own] += x;
                }
            }
        }
    }

    MIXEDKV_DEVICE void add_values(const reader & r, int tile, const prefill_scores<Shape> & weight,
                                   prefill_sums<d, Shape> & sums) {
        const char * v = r.f16_at(tile, true) + row_first();
#pragma unroll
        for (int pair = 0; pair < Shape::keys / 16; pair++) {
            uint32_t a[Shape::parts][4];
#pragma unroll
            for (int part = 0; part < Shape::parts; part++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float (&x)[4] = weight[part][2 * pair + i / 2];
                    a[part][i]          = pack_f16x2(x[2 * (i % 2)], x[2 * (i % 2) + 1]);
                }
            }
#pragma unroll
            for (int j = 0; j < d / 16; j++) {
                uint32_t b[4]; // of 16 elements: both words of the first 8, then of the others
                load_matrices_transposed(b, v + 16 * pair * layout::pitch + 32 * j);
#pragma unroll
                for (int part = 0; part < Shape::parts; part++) {
                    multiply_16x8x16(sums.o[part][2 * j], a[part], b[0], b[1]);
                    multiply_16x8x16(sums.o[part][2 * j + 1], a[part], b[2], b[3]);
                }
            }
        }
    }
};

// row: of the block, the warp's first
template <int d, class Shape>
MIXEDKV_DEVICE void attend_tiles(const tile_reader<d, Shape> & reader, int begin, int row,
                                 prefill_sums<d, Shape> & sums) {
    using products  = prefill_products<d, Shape>;
    constexpr int n = Shape::keys;
    for (int i = 0; i < 3; i++) {
        reader.copy_mask(i, begin + i * n);
    }
    commit_copies();
    wait_copies<0>();
    bool sees       = any_thread(reader.sees(0, begin));
    bool sees_next  = any_thread(reader.sees(1, begin + n));
    bool sees_after = any_thread(reader.sees(2, begin + 2 * n));
    if (sees) {
        reader.copy_f16(0, begin);
        reader.copy_raw(begin);
        commit_copies();
        wait_copies<0>();
        sync_warp();
        reader.dequantise_keys(0);
        sync_warp();
    }
    if (sees_next) {
        reader.copy_raw(begin + n);
        commit_copies();
        wait_copies<0>();
    }
    sync_block();
    int tile = 0;
    for (int key0 = begin; key0 < reader.end; key0 += n, tile++) {
        // What is dequantised is there for all warps, and nobody multiplies the tile before it any more.
        const auto copy_next = [&] {
            sync_warp(); // rows as they are stored have been dequantised
            if (sees_after) {
                reader.copy_raw(key0 + 2 * n);
            }
            reader.copy_mask(tile + 3, key0 + 3 * n);
            commit_copies();
        };
        if (sees_next) {
            reader.copy_f16(tile + 1, key0 + n);
        }
        bool works = false, is_masked = false; // the warp's rows may see nothing
        if (sees) {
            reader.look_at_mask(tile, sums.first, sums.n, works, is_masked);
        }
        if (sees_next && !(Shape::between && works)) {
            reader.dequantise_keys(tile + 1);
        }
        if constexpr (!Shape::between) {
            copy_next();
        }
        prefill_scores<Shape> score = {};
        if (works) {
            products::multiply_keys(reader, tile, row, score);
        }
        if constexpr (Shape::between) {
            copy_next();
        }
        if (works) {
            products::softmax(reader, tile, key0, row, is_masked, score, sums);
            products::add_values(reader, tile, score, sums);
        }
        wait_copies<0>();
        sees       = sees_next;
        sees_next  = sees_after;
        sees_after = any_thread(reader.sees(tile + 3, key0 + 3 * n));
    }
}

// Grid: KV heads x blocks of rows, splits, streams. Block: the shape's warps.
template <int d, class Shape>
MIXEDKV_KERNEL((prefill_layout<d, Shape>::threads), Shape::blocks)
prefill_kernel(const attention_problem p, stored_type type_k, stored_type type_v) {
    using layout          = prefill_layout<d, Shape>;
    constexpr int n       = d / warp_size;
    const int     head_kv = block_x() % p.n_head_kv, split = block_y(), stream = block_z(), group = p.group();
    const int     first = block_x() / p.n_head_kv * Shape::rows, g = lane() / 4, t = lane() % 4;
    const int     row = thread() / warp_size * Shape::warp_rows, row0 = first + row, first_token = first / group;

#pragma unroll 4
    for (int i = 0; i < Shape::warp_rows; i++) {
        float x[n];
        load_query(p, stream, head_kv, row0 + i, x);
        auto * to = reinterpret_cast<uint16_t *>(shared_memory() + (row + i) * layout::pitch);
#pragma unroll
        for (int j = 0; j < n; j++) {
            to[j * warp_size + lane()] = float_to_half_bits(x[j]);
        }
    }

    const bool is_hot = split >= p.n_cold_splits;
    const int  begin  = is_hot ? (split - p.n_cold_splits) * p.hot_keys : split * p.split_keys;
    const int  end    = is_hot ? min_of(begin + p.hot_keys, p.n_hot()) : min_of(begin + p.split_keys, p.cold.n);
    const tile_reader<d, Shape> reader{ p,
                                        stream,
                                        head_kv,
                                        is_hot,
                                        end,
                                        is_hot ? stored_type::f16 : type_k,
                                        is_hot ? stored_type::f16 : type_v,
                                        shared_memory(),
                                        min_of((first + Shape::rows - 1) / group + 1, p.n_tokens) - first_token,
                                        p.mask + stream * p.mask_stream + first_token * p.mask_token +
                                            (is_hot ? p.first_hot_key : 0) };

    prefill_sums<d, Shape> sums = {};
#pragma unroll
    for (int own = 0; own < sums.n_own; own++) {
        const int i     = row + 8 * own + g;
        const int token = min_of((first + i) / group, p.n_tokens - 1) - first_token;
        sums.m[own]     = -INFINITY;
        if (t == 0) {
            reader.info_of(i) = { alibi_slope(p, head_kv * group + (first + i) % group), token * layout::mask_pitch };
        }
    }
    sums.first = row0 / group - first_token;
    sums.n     = min_of((row0 + Shape::warp_rows - 1) / group, p.n_tokens - 1) - first_token + 1 - sums.first;

    wait_for_previous();
    start_next();
    attend_tiles<d, Shape>(reader, begin, row, sums);

#pragma unroll
    for (int own = 0; own < sums.n_own; own++) {
        const int own_row = row0 + 8 * own + g;
        const int token = own_row / group, head = head_kv * group + own_row % group;
        float     l = sums.l[own];
        l += shuffle_xor(l, 1);
        l += shuffle_xor(l, 2);
        if (token >= p.n_tokens) {
            continue;
        }
        const int64_t at = ((int64_t(stream) * p.n_tokens + token) * p.n_head + head) * p.n_splits + split;
#pragma unroll
        for (int j = 0; j < d / 8; j++) {
            const float * o                                                = &sums.o[own / 2][j][2 * (own % 2)];
            *reinterpret_cast<words<2> *>(p.sums + at * d + 8 * j + 2 * t) = { { float_bits(o[0]), float_bits(o[1]) } };
        }
        if (t == 0) {
            p.weights[2 * at]     = sums.m[own];
            p.weights[2 * at + 1] = l;
        }
    }
}

} // namespace cuda
} // namespace mixedkv
