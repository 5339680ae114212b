// Attention of many query rows: a block opens a tile of keys to F16 in shared memory once, and its warps multiply their
// rows with it. No F16 view of the keys lies in memory.
//
// Each warp has `m_tiles` times 16 rows, so that a word of K or V that it reads from shared memory is used for all of
// them. While a tile is worked on, the rows of the next are on their way as they lie, and the mask of the one after that:
// tiles that no row of the block sees are not read.

#pragma once

#include "problem.h"
#include "rows.h"

namespace mixedkv {
namespace cuda {

constexpr int prefill_warps = 4;
constexpr int prefill_keys  = 32; // of a tile: with the four lanes that open a row, a block's threads

// Of a row, as it is stored
enum class stored_type { f16, q8_0, q5_0, q4_0 };

MIXEDKV_SHARED(int) stored_bytes(stored_type type, int d) {
    return type == stored_type::f16    ? row_bytes<f16_rows>(d)
           : type == stored_type::q8_0 ? row_bytes<q8_0_rows>(d)
           : type == stored_type::q5_0 ? row_bytes<q5_0_rows>(d)
                                       : row_bytes<q4_0_rows>(d);
}

template <int d>
struct prefill_layout {
    static constexpr int m_tiles = d > 128 ? 1 : 2;
    static constexpr int rows    = prefill_warps * 16 * m_tiles;
    static constexpr int pitch   = 2 * d + 16; // bytes of a row in F16: eight rows lie in different banks

    static constexpr int raw_size   = prefill_keys * 2 * d; // of K, and of V
    static constexpr int mask_pitch = 2 * prefill_keys + 16;
    static constexpr int mask_size  = rows * mask_pitch;

    static constexpr int queries = 0;
    static constexpr int k       = queries + rows * pitch;
    static constexpr int v       = k + prefill_keys * pitch;
    static constexpr int raw     = v + prefill_keys * pitch;
    static constexpr int masks   = raw + 2 * raw_size;

    // each token has a row of the mask, of two tiles
    MIXEDKV_SHARED(int) bytes(int group) { return masks + 2 * ((rows + group - 1) / group + 1) * mask_pitch; }
};

// The keys that a block goes through, and their places in shared memory
template <int d>
struct prefill_keys_reader {
    using layout = prefill_layout<d>;

    const attention_problem & p;
    const int                 stream, head_kv, row0;
    const bool                is_hot;
    const int                 end, first_key; // of the keys of this kind: the last, and the first one's column of the mask
    const stored_type         type_k, type_v;
    char * const              memory;

    MIXEDKV_DEVICE_MEMBER int first_token() const { return row0 / p.group(); }
    MIXEDKV_DEVICE_MEMBER int count_tokens() const {
        return min_of((row0 + layout::rows - 1) / p.group() + 1, p.n_tokens) - first_token();
    }
    MIXEDKV_DEVICE_MEMBER char * mask_at(int tile) const {
        return memory + layout::masks + tile % 2 * ((layout::rows + p.group() - 1) / p.group() + 1) * layout::mask_pitch;
    }

    // Columns behind the last key of a kind are those of the next, or hidden: who reads them asks for `end` besides.
    MIXEDKV_DEVICE_MEMBER void copy_mask(int tile, int key0) const {
        constexpr int chunks = prefill_keys * 2 / 16;
        if (key0 >= end) {
            return;
        }
        for (int i = thread(); i < count_tokens() * chunks; i += prefill_warps * warp_size) {
            const uint16_t * row = p.mask + stream * p.mask_stream + (first_token() + i / chunks) * p.mask_token;
            copy_async<16>(mask_at(tile) + i / chunks * layout::mask_pitch + i % chunks * 16,
                           row + first_key + key0 + i % chunks * 8);
        }
    }

    MIXEDKV_DEVICE_MEMBER bool sees(int tile, int key0) const {
        bool res = false;
        if (key0 < end) {
            for (int i = thread(); i < count_tokens() * prefill_keys; i += prefill_warps * warp_size) {
                const int key = i % prefill_keys;
                res |= key0 + key < end && load_u16(mask_at(tile) + i / prefill_keys * layout::mask_pitch + 2 * key) != hidden;
            }
        }
        return any_thread(res);
    }

    template <int width>
    MIXEDKV_DEVICE_MEMBER void copy_rows(int key0, bool is_v, int bytes, char * to) const {
        const int chunks = bytes / width;
        for (int i = thread(); i < prefill_keys * chunks; i += prefill_warps * warp_size) {
            const int key = i / chunks, chunk = i % chunks;
            copy_async<width>(to + key * 2 * d + chunk * width,
                              find_row(p, stream, head_kv, min_of(key0 + key, end - 1), is_hot, is_v) + chunk * width);
        }
    }

    MIXEDKV_DEVICE_MEMBER void copy(int key0, bool is_v, stored_type type, char * to) const {
        const int bytes = stored_bytes(type, d);
        switch (copy_bytes(bytes)) {
        case 16:
            return copy_rows<16>(key0, is_v, bytes, to);
        case 8:
            return copy_rows<8>(key0, is_v, bytes, to);
        case 4:
            return copy_rows<4>(key0, is_v, bytes, to);
        default:
            return copy_rows<2>(key0, is_v, bytes, to);
        }
    }

    MIXEDKV_DEVICE_MEMBER void copy_keys(int key0) const {
        copy(key0, false, type_k, memory + layout::raw);
        copy(key0, true, type_v, memory + layout::raw + layout::raw_size);
    }

    // One row by four threads
    template <class Rows, int unit>
    MIXEDKV_DEVICE void open_row(const char * from, int t, char * to) {
        uint32_t y[4];
        Rows::template open_runs<unit>(from, t, y);
        char * const at = to + 64 * unit;
        *reinterpret_cast<words<2> *>(at + 2 * Rows::first_run(t))  = { { y[0], y[1] } };
        *reinterpret_cast<words<2> *>(at + 2 * Rows::second_run(t)) = { { y[2], y[3] } };
        if constexpr (unit + 1 < d / 32) {
            open_row<Rows, unit + 1>(from, t, to);
        }
    }

    MIXEDKV_DEVICE void open_row(stored_type type, const char * from, int t, char * to) {
        switch (type) {
        case stored_type::f16:
            return open_row<f16_rows, 0>(from, t, to);
        case stored_type::q8_0:
            return open_row<q8_0_rows, 0>(from, t, to);
        case stored_type::q5_0:
            return open_row<q5_0_rows, 0>(from, t, to);
        case stored_type::q4_0:
            return open_row<q4_0_rows, 0>(from, t, to);
        }
    }

    MIXEDKV_DEVICE_MEMBER void open() const {
        const int    key  = thread() / 4, t = thread() % 4;
        const char * from = memory + layout::raw + key * 2 * d;
        open_row(type_k, from, t, memory + layout::k + key * layout::pitch);
        open_row(type_v, from + layout::raw_size, t, memory + layout::v + key * layout::pitch);
    }
};

// What a warp has of its rows: 16 m + g and 16 m + g + 8 are the thread's
template <int d>
struct prefill_sums {
    static constexpr int m_tiles = prefill_layout<d>::m_tiles;

    float m[m_tiles][2];
    float l[m_tiles][2];
    float o[m_tiles][d / 8][4];
    float slope[m_tiles][2];
};

template <int d>
MIXEDKV_DEVICE void attend_tile(const attention_problem & p, const prefill_keys_reader<d> & reader, int tile, int key0,
                                prefill_sums<d> & sums) {
    using layout          = prefill_layout<d>;
    constexpr int m_tiles = layout::m_tiles, n_tiles = prefill_keys / 8;
    const int     warp = thread() / warp_size, g = lane() / 4, t = lane() % 4, group = p.group();
    const char *  queries = reader.memory + layout::queries + warp * 16 * m_tiles * layout::pitch;
    const char *  k = reader.memory + layout::k, *v = reader.memory + layout::v;

    // rows of matrices that this lane points to: 16 rows by two halves of 8 elements, and the other way round
    const int row_first = lane() % 16 * layout::pitch + lane() / 16 * 16;
    const int row_last  = (lane() % 8 + lane() / 16 * 8) * layout::pitch + lane() / 8 % 2 * 16;

    float score[m_tiles][n_tiles][4] = {};
#pragma unroll
    for (int step = 0; step < d / 16; step++) {
        uint32_t a[m_tiles][4];
#pragma unroll
        for (int m = 0; m < m_tiles; m++) {
            load_matrices(a[m], queries + 16 * m * layout::pitch + row_first + 32 * step);
        }
#pragma unroll
        for (int pair = 0; pair < n_tiles / 2; pair++) {
            uint32_t b[4]; // of 16 keys: both words of the first 8, then of the others
            load_matrices(b, k + 16 * pair * layout::pitch + row_last + 32 * step);
#pragma unroll
            for (int m = 0; m < m_tiles; m++) {
                multiply_16x8x16(score[m][2 * pair], a[m], b[0], b[1]);
                multiply_16x8x16(score[m][2 * pair + 1], a[m], b[2], b[3]);
            }
        }
    }

    const int  row0       = reader.row0 + warp * 16 * m_tiles, token0 = reader.first_token();
    const bool is_partial = key0 + prefill_keys > reader.end;
#pragma unroll
    for (int m = 0; m < m_tiles; m++) {
        float largest[2] = { -INFINITY, -INFINITY };
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int    token = (row0 + 16 * m + 8 * half + g) / group;
            const char * mask  = reader.mask_at(tile) + (token - token0) * layout::mask_pitch;
#pragma unroll
            for (int n = 0; n < n_tiles; n++) {
                const uint32_t two = token < p.n_tokens ? *reinterpret_cast<const uint32_t *>(mask + 16 * n + 4 * t)
                                                        : hidden | uint32_t(hidden) << 16;
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float &        x   = score[m][n][2 * half + i];
                    const uint16_t own = is_partial && key0 + 8 * n + 2 * t + i >= reader.end ? hidden : uint16_t(two >> 16 * i);
                    x                  = masked_score(p, x, own, sums.slope[m][half]);
                    largest[half]      = max_of(largest[half], x);
                }
            }
        }
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            largest[half]    = max_of(largest[half], shuffle_xor(largest[half], 1));
            largest[half]    = max_of(largest[half], shuffle_xor(largest[half], 2));
            const float now  = max_of(largest[half], sums.m[m][half]);
            factor[half]     = now == -INFINITY ? 1.0f : exp2_of(sums.m[m][half] - now);
            sums.m[m][half]  = now;
            sums.l[m][half] *= factor[half];
        }
        if (any_lane(factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
            for (int j = 0; j < d / 8; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sums.o[m][j][i] *= factor[i / 2];
                }
            }
        }
#pragma unroll
        for (int n = 0; n < n_tiles; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float & x = score[m][n][i];
                x         = x == -INFINITY ? 0.0f : exp2_of(x - sums.m[m][i / 2]);
                sums.l[m][i / 2] += x;
            }
        }
    }
#pragma unroll
    for (int pair = 0; pair < n_tiles / 2; pair++) {
        uint32_t a[m_tiles][4];
#pragma unroll
        for (int m = 0; m < m_tiles; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float(&x)[4] = score[m][2 * pair + i / 2];
                a[m][i]            = pack_halves(x[2 * (i % 2)], x[2 * (i % 2) + 1]);
            }
        }
#pragma unroll
        for (int j = 0; j < d / 16; j++) {
            uint32_t b[4]; // of 16 elements: both words of the first 8, then of the others
            load_matrices_transposed(b, v + 16 * pair * layout::pitch + row_first + 32 * j);
#pragma unroll
            for (int m = 0; m < m_tiles; m++) {
                multiply_16x8x16(sums.o[m][2 * j], a[m], b[0], b[1]);
                multiply_16x8x16(sums.o[m][2 * j + 1], a[m], b[2], b[3]);
            }
        }
    }
}

template <int d>
MIXEDKV_DEVICE void attend_tiles(const attention_problem & p, const prefill_keys_reader<d> & reader, int begin,
                                 prefill_sums<d> & sums) {
    reader.copy_mask(0, begin);
    commit_copies();
    wait_copies<0>();
    sync_block();
    bool sees = reader.sees(0, begin);
    if (sees) {
        reader.copy_keys(begin);
    }
    reader.copy_mask(1, begin + prefill_keys);
    commit_copies();
    int tile = 0;
    for (int key0 = begin; key0 < reader.end; key0 += prefill_keys, tile++) {
        wait_copies<0>();
        sync_block();
        const bool sees_next = reader.sees(tile + 1, key0 + prefill_keys);
        if (sees) {
            reader.open();
        }
        sync_block();
        if (sees_next) {
            reader.copy_keys(key0 + prefill_keys);
        }
        if (sees) {
            attend_tile<d>(p, reader, tile, key0, sums);
        }
        sync_block(); // the mask of this tile is free
        reader.copy_mask(tile, key0 + 2 * prefill_keys);
        commit_copies();
        sees = sees_next;
    }
}

// Grid: KV heads x blocks of rows, splits, streams. Block: prefill_warps warps.
template <int d>
MIXEDKV_KERNEL(prefill_warps * warp_size, 2) prefill_kernel(const attention_problem p, stored_type type_k, stored_type type_v) {
    using layout          = prefill_layout<d>;
    constexpr int m_tiles = layout::m_tiles, n = d / warp_size;
    const int     head_kv = block_x() % p.n_head_kv, split = block_y(), stream = block_z(), group = p.group();
    const int     row0 = block_x() / p.n_head_kv * layout::rows, warp = thread() / warp_size, g = lane() / 4, t = lane() % 4;

    for (int row = warp; row < layout::rows; row += prefill_warps) {
        float x[n];
        load_query(p, stream, head_kv, row0 + row, x);
        auto * to = reinterpret_cast<uint16_t *>(shared_memory() + layout::queries + row * layout::pitch);
#pragma unroll
        for (int i = 0; i < n; i++) {
            to[i * warp_size + lane()] = float_to_half_bits(x[i]);
        }
    }

    prefill_sums<d> sums;
#pragma unroll
    for (int m = 0; m < m_tiles; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row       = row0 + (warp * m_tiles + m) * 16 + 8 * half + g;
            sums.m[m][half]     = -INFINITY;
            sums.l[m][half]     = 0.0f;
            sums.slope[m][half] = alibi_slope(p, head_kv * group + row % group);
        }
#pragma unroll
        for (int j = 0; j < d / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sums.o[m][j][i] = 0.0f;
            }
        }
    }

    const bool is_hot = split >= p.n_cold_splits;
    const int  begin  = (is_hot ? split - p.n_cold_splits : split) * p.split_keys;
    const int  end    = min_of(begin + p.split_keys, is_hot ? p.n_hot() : p.cold.n);
    const prefill_keys_reader<d> reader{ p,
                                         stream,
                                         head_kv,
                                         row0,
                                         is_hot,
                                         end,
                                         is_hot ? p.first_hot_key : 0,
                                         is_hot ? stored_type::f16 : type_k,
                                         is_hot ? stored_type::f16 : type_v,
                                         shared_memory() };
    attend_tiles<d>(p, reader, begin, sums);

#pragma unroll
    for (int m = 0; m < m_tiles; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row   = row0 + (warp * m_tiles + m) * 16 + 8 * half + g;
            const int token = row / group, head = head_kv * group + row % group;
            float     l     = sums.l[m][half];
            l += shuffle_xor(l, 1);
            l += shuffle_xor(l, 2);
            if (token >= p.n_tokens) {
                continue;
            }
            const int64_t at = ((int64_t(stream) * p.n_tokens + token) * p.n_head + head) * p.n_splits + split;
#pragma unroll
            for (int j = 0; j < d / 8; j++) {
                *reinterpret_cast<words<2> *>(p.sums + at * d + 8 * j + 2 * t) = { { float_bits(sums.o[m][j][2 * half]),
                                                                                     float_bits(sums.o[m][j][2 * half + 1]) } };
            }
            if (t == 0) {
                p.weights[2 * at]     = sums.m[m][half];
                p.weights[2 * at + 1] = l;
            }
        }
    }
}

} // namespace cuda
} // namespace mixedkv
