// Attention of many query rows: a block opens a tile of keys to F16 in shared memory once, and each of its warps
// multiplies 16 rows with it. No F16 view of the keys lies in memory.
//
// Three tiles are under way. While one is worked on the next is opened, from rows that have come as they lie, and the
// mask of the one after that arrives: tiles that no row of the block sees are not read. Four lanes copy a row and open
// it, so the block meets once a tile.

#pragma once

#include "problem.h"
#include "rows.h"

namespace mixedkv {
namespace cuda {

constexpr int prefill_keys = 32; // of a tile

template <int d>
struct prefill_layout {
    static constexpr int warps   = d > 128 ? 4 : 8;
    static constexpr int threads = warps * warp_size;
    static constexpr int rows    = 16 * warps;
    static constexpr int pitch   = 2 * d + 16; // bytes of a row in F16: eight rows lie in different banks

    static constexpr int raw_size   = prefill_keys * pitch; // of K, and of V
    static constexpr int open_size  = prefill_keys * pitch; // the same
    static constexpr int mask_pitch = 2 * prefill_keys;
    static constexpr int n_masks    = 3;

    static constexpr int open  = rows * pitch; // behind the queries: K and V of two tiles
    static constexpr int raw   = open + 2 * 2 * open_size;
    static constexpr int masks = raw + 2 * raw_size;

    // each token has a row of a mask
    MIXEDKV_SHARED(int) most_tokens(int group) { return (rows + group - 1) / group + 1; }
    MIXEDKV_SHARED(int) bytes(int group) { return masks + n_masks * most_tokens(group) * mask_pitch; }
};

// The keys that a block goes through, and their places in shared memory
template <int d>
struct tile_reader {
    using layout = prefill_layout<d>;

    const attention_problem & p;
    const int                 stream, head_kv, row0;
    const bool                is_hot;
    const int                 end; // of the split's keys, within their kind
    const stored_type         type_k, type_v;
    char * const              memory;
    const int                 first_token, n_tokens; // of the block's rows
    const uint16_t * const    mask;                  // of the first token and the first key of their kind

    MIXEDKV_DEVICE_MEMBER char * mask_at(int tile) const {
        return memory + layout::masks + tile % layout::n_masks * n_tokens * layout::mask_pitch;
    }
    MIXEDKV_DEVICE_MEMBER char * open_at(int tile, bool is_v) const {
        return memory + layout::open + (2 * (tile % 2) + is_v) * layout::open_size;
    }

    // Columns behind the last key of a kind are those of the next, or hidden: who reads them asks for `end` besides.
    MIXEDKV_DEVICE_MEMBER void copy_mask(int tile, int key0) const {
        constexpr int chunks = layout::mask_pitch / 16;
        if (key0 >= end) {
            return;
        }
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
            for (int i = thread(); i < n_tokens * chunks; i += layout::threads) {
                const words<4> x = load_words<4>(mask_at(tile) + 16 * i);
                res |= x.at[0] != none || x.at[1] != none || x.at[2] != none || x.at[3] != none;
            }
        }
        return res;
    }

    template <class Rows>
    MIXEDKV_DEVICE_MEMBER void copy_row(int key, bool is_v, char * to) const {
        constexpr int width = copy_bytes(row_bytes<Rows>(d)), chunks = row_bytes<Rows>(d) / width;
        const int     t    = thread() % 4;
        const char *  from = find_row(p, stream, head_kv, min_of(key, end - 1), is_hot, is_v) + t * width;
#pragma unroll
        for (int i = 0; i < (chunks + 3) / 4; i++) {
            if (chunks % 4 == 0 || 4 * i + t < chunks) {
                copy_async<width>(to + (4 * i + t) * width, from + 4 * i * width);
            }
        }
    }

    template <class Rows, int unit>
    MIXEDKV_DEVICE void open_row(const char * from, char * to) {
        const int t = thread() % 4;
        uint32_t  y[4];
        Rows::template open_runs<unit>(from, t, y);
        char * const at                                             = to + 64 * unit;
        *reinterpret_cast<words<2> *>(at + 2 * Rows::first_run(t))  = { { y[0], y[1] } };
        *reinterpret_cast<words<2> *>(at + 2 * Rows::second_run(t)) = { { y[2], y[3] } };
        if constexpr (unit + 1 < d / 32) {
            open_row<Rows, unit + 1>(from, to);
        }
    }

    // Calls f(which row, whether of V) for each row that the four lanes have.
    template <class F>
    MIXEDKV_DEVICE void for_own_rows(F && f) {
        const int row = thread() / 4;
        if constexpr (layout::threads == 4 * 2 * prefill_keys) {
            f(row % prefill_keys, row >= prefill_keys);
        } else {
            f(row, false);
            f(row, true);
        }
    }

    // Rows as they are stored: a multiple of 16 bytes that is no multiple of 128, so that rows lie in different banks
    static constexpr int raw_pitch = layout::pitch;

    MIXEDKV_DEVICE_MEMBER char * raw_at(int row, bool is_v) const {
        return memory + layout::raw + is_v * layout::raw_size + row * raw_pitch;
    }

    MIXEDKV_DEVICE_MEMBER void copy_keys(int key0) const {
        for_own_rows([&](int row, bool is_v) {
            with_rows<d>(is_v ? type_v : type_k,
                         [&](auto rows) { copy_row<decltype(rows)>(key0 + row, is_v, raw_at(row, is_v)); });
        });
    }

    MIXEDKV_DEVICE_MEMBER void open_keys(int tile) const {
        for_own_rows([&](int row, bool is_v) {
            with_rows<d>(is_v ? type_v : type_k, [&](auto rows) {
                open_row<decltype(rows), 0>(raw_at(row, is_v), open_at(tile, is_v) + row * layout::pitch);
            });
        });
    }

    // What the mask has for n tokens, from one of the block's on: whether any key is seen, and whether any is not, or
    // is weighed
    MIXEDKV_DEVICE_MEMBER void look_at_mask(int tile, int first, int n, bool & sees_any, bool & is_masked) const {
        constexpr int      chunks = layout::mask_pitch / 16;
        constexpr uint32_t none   = hidden | uint32_t(hidden) << 16;
        bool               seen = false, masked = false;
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
};

// What a warp has of its rows: g and g + 8 are the thread's
template <int d>
struct prefill_sums {
    float m[2]; // the largest score so far, in bits
    float l[2]; // the thread's share of the sum of weights
    float o[d / 8][4];
    float slope[2]; // in bits
    int   token[2]; // of the rows, counted from the block's first; rows behind the last have its
    int   first, n; // tokens of the warp's rows
};

template <int d>
MIXEDKV_DEVICE void attend_tile(const attention_problem & p, const tile_reader<d> & reader, int tile, int key0,
                                int row0, prefill_sums<d> & sums) {
    using layout          = prefill_layout<d>;
    constexpr int n_tiles = prefill_keys / 8;
    const int     t       = lane() % 4;

    bool sees, is_masked;
    reader.look_at_mask(tile, sums.first, sums.n, sees, is_masked);
    if (!sees) {
        return;
    }

    // rows of matrices that this lane points to: 16 rows by two halves of 8 elements, and the other way round
    const int    row_first = lane() % 16 * layout::pitch + lane() / 16 * 16;
    const int    row_last  = (lane() % 8 + lane() / 16 * 8) * layout::pitch + lane() / 8 % 2 * 16;
    const char * queries   = reader.memory + (row0 - reader.row0) * layout::pitch + row_first;
    const char * k         = reader.open_at(tile, false) + row_last;
    const char * v         = reader.open_at(tile, true) + row_first;

    float score[n_tiles][4] = {};
#pragma unroll
    for (int step = 0; step < d / 16; step++) {
        uint32_t a[4];
        load_matrices(a, queries + 32 * step);
#pragma unroll
        for (int pair = 0; pair < n_tiles / 2; pair++) {
            uint32_t b[4]; // of 16 keys: both words of the first 8, then of the others
            load_matrices(b, k + 16 * pair * layout::pitch + 32 * step);
            multiply_16x8x16(score[2 * pair], a, b[0], b[1]);
            multiply_16x8x16(score[2 * pair + 1], a, b[2], b[3]);
        }
    }
    if (p.logit_softcap != 0.0f) {
#pragma unroll
        for (int n = 0; n < n_tiles; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                score[n][i] = capped_score(p, score[n][i]);
            }
        }
    }
    if (is_masked || key0 + prefill_keys > reader.end) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const char * mask = reader.mask_at(tile) + sums.token[half] * layout::mask_pitch;
#pragma unroll
            for (int n = 0; n < n_tiles; n++) {
                const uint32_t two = *reinterpret_cast<const uint32_t *>(mask + 16 * n + 4 * t);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const bool is_key      = key0 + 8 * n + 2 * t + i < reader.end;
                    score[n][2 * half + i] = masked_score(score[n][2 * half + i],
                                                          is_key ? uint16_t(two >> 16 * i) : hidden, sums.slope[half]);
                }
            }
        }
    }

    float factor[2], base[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float largest = sums.m[half];
#pragma unroll
        for (int n = 0; n < n_tiles; n++) {
            largest = max_of(largest, max_of(score[n][2 * half], score[n][2 * half + 1]));
        }
        largest      = max_of(largest, shuffle_xor(largest, 1));
        largest      = max_of(largest, shuffle_xor(largest, 2));
        base[half]   = base_of(largest);
        factor[half] = exp2_of(sums.m[half] - base[half]);
        sums.m[half] = largest;
        sums.l[half] *= factor[half];
    }
    if (any_lane(factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
        for (int j = 0; j < d / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sums.o[j][i] *= factor[i / 2];
            }
        }
    }
#pragma unroll
    for (int n = 0; n < n_tiles; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            score[n][i] = exp2_of(score[n][i] - base[i / 2]);
            sums.l[i / 2] += score[n][i];
        }
    }
#pragma unroll
    for (int pair = 0; pair < n_tiles / 2; pair++) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float (&x)[4] = score[2 * pair + i / 2];
            a[i]                = pack_halves(x[2 * (i % 2)], x[2 * (i % 2) + 1]);
        }
#pragma unroll
        for (int j = 0; j < d / 16; j++) {
            uint32_t b[4]; // of 16 elements: both words of the first 8, then of the others
            load_matrices_transposed(b, v + 16 * pair * layout::pitch + 32 * j);
            multiply_16x8x16(sums.o[2 * j], a, b[0], b[1]);
            multiply_16x8x16(sums.o[2 * j + 1], a, b[2], b[3]);
        }
    }
}

template <int d>
MIXEDKV_DEVICE void attend_tiles(const attention_problem & p, const tile_reader<d> & reader, int begin, int row0,
                                 prefill_sums<d> & sums) {
    constexpr int n = prefill_keys;
    reader.copy_mask(0, begin);
    reader.copy_mask(1, begin + n);
    commit_copies();
    wait_copies<0>();
    bool sees      = any_thread(reader.sees(0, begin));
    bool sees_next = any_thread(reader.sees(1, begin + n));
    if (sees) {
        reader.copy_keys(begin);
        commit_copies();
        wait_copies<0>();
        sync_warp();
        reader.open_keys(0);
        sync_warp();
    }
    if (sees_next) {
        reader.copy_keys(begin + n);
    }
    reader.copy_mask(2, begin + 2 * n);
    commit_copies();
    sync_block();
    int tile = 0;
    for (int key0 = begin; key0 < reader.end; key0 += n, tile++) {
        wait_copies<0>();
        sync_warp();
        if (sees_next) {
            reader.open_keys(tile + 1);
        }
        if (sees) {
            attend_tile<d>(p, reader, tile, key0, row0, sums);
        }
        const bool sees_after = any_thread(reader.sees(tile + 2, key0 + 2 * n));
        if (sees_after) {
            reader.copy_keys(key0 + 2 * n);
        }
        reader.copy_mask(tile + 3, key0 + 3 * n);
        commit_copies();
        sees      = sees_next;
        sees_next = sees_after;
    }
    wait_copies<0>();
}

// Grid: KV heads x blocks of rows, splits, streams. Block: the layout's warps.
template <int d>
MIXEDKV_KERNEL(prefill_layout<d>::threads, d > 128 ? 1 : 2)
prefill_kernel(const attention_problem p, stored_type type_k, stored_type type_v) {
    using layout          = prefill_layout<d>;
    constexpr int n       = d / warp_size;
    const int     head_kv = block_x() % p.n_head_kv, split = block_y(), stream = block_z(), group = p.group();
    const int     first = block_x() / p.n_head_kv * layout::rows, warp = thread() / warp_size, g = lane() / 4,
                  t    = lane() % 4;
    const int     row0 = first + 16 * warp, first_token = first / group;

#pragma unroll 4
    for (int row = 0; row < 16; row++) {
        float x[n];
        load_query(p, stream, head_kv, row0 + row, x);
        auto * to = reinterpret_cast<uint16_t *>(shared_memory() + (16 * warp + row) * layout::pitch);
#pragma unroll
        for (int i = 0; i < n; i++) {
            to[i * warp_size + lane()] = float_to_half_bits(x[i]);
        }
    }

    prefill_sums<d> sums;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        sums.m[half]     = -INFINITY;
        sums.l[half]     = 0.0f;
        sums.slope[half] = alibi_slope(p, head_kv * group + (row0 + 8 * half + g) % group);
        sums.token[half] = min_of((row0 + 8 * half + g) / group, p.n_tokens - 1) - first_token;
    }
#pragma unroll
    for (int j = 0; j < d / 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sums.o[j][i] = 0.0f;
        }
    }

    sums.first = row0 / group - first_token;
    sums.n     = min_of((row0 + 15) / group, p.n_tokens - 1) - first_token + 1 - sums.first;

    const bool           is_hot = split >= p.n_cold_splits;
    const int            begin  = is_hot ? (split - p.n_cold_splits) * p.hot_keys : split * p.split_keys;
    const int            end = is_hot ? min_of(begin + p.hot_keys, p.n_hot()) : min_of(begin + p.split_keys, p.cold.n);
    const tile_reader<d> reader{ p,
                                 stream,
                                 head_kv,
                                 first,
                                 is_hot,
                                 end,
                                 is_hot ? stored_type::f16 : type_k,
                                 is_hot ? stored_type::f16 : type_v,
                                 shared_memory(),
                                 first_token,
                                 min_of((first + layout::rows - 1) / group + 1, p.n_tokens) - first_token,
                                 p.mask + stream * p.mask_stream + first_token * p.mask_token +
                                     (is_hot ? p.first_hot_key : 0) };
    wait_for_previous();
    start_next();
    attend_tiles<d>(p, reader, begin, row0, sums);

#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row   = row0 + 8 * half + g;
        const int token = row / group, head = head_kv * group + row % group;
        float     l = sums.l[half];
        l += shuffle_xor(l, 1);
        l += shuffle_xor(l, 2);
        if (token >= p.n_tokens) {
            continue;
        }
        const int64_t at = ((int64_t(stream) * p.n_tokens + token) * p.n_head + head) * p.n_splits + split;
#pragma unroll
        for (int j = 0; j < d / 8; j++) {
            *reinterpret_cast<words<2> *>(p.sums + at * d + 8 * j + 2 * t) = {
                { float_bits(sums.o[j][2 * half]), float_bits(sums.o[j][2 * half + 1]) }
            };
        }
        if (t == 0) {
            p.weights[2 * at]     = sums.m[half];
            p.weights[2 * at + 1] = l;
        }
    }
}

} // namespace cuda
} // namespace mixedkv
