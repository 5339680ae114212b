// Attention of few query rows: a warp takes strips of keys, dequantises their rows for tensor cores as they lie, and
// keeps a softmax of its own. Each key is read once for all heads that share it.
//
// A block has one KV head, a tile of query rows and one split of the keys. Its warps take the split's strips in turn,
// and nobody waits for another before the end: a warp copies its next strip to shared memory while it works on one.
// Strips that no row sees are not read.
//
// Scores are K Q^T and values V^T P^T, so that keys and elements lie along the 16 rows of a product and the query rows
// along its 8 columns.

#pragma once

#include "problem.h"
#include "rows.h"

namespace mixedkv {
namespace cuda {

constexpr int decode_warps = 8;

// How a warp has strips of such rows in shared memory
template <class K, class V, int d_k, int d_v, bool is_hot>
struct strip_layout {
    static constexpr int k_bytes = row_bytes<K>(d_k);
    static constexpr int v_bytes = row_bytes<V>(d_v);

    // rows that lie apart by a multiple of 128 bytes would share banks
    MIXEDKV_SHARED(int) pitch_of(int bytes) {
        return bytes % 16 ? (bytes + 3) / 4 * 4 : bytes % 128 ? bytes : bytes + 16;
    }

    static constexpr int k_pitch = pitch_of(k_bytes);
    static constexpr int v_pitch = pitch_of(v_bytes);

    static constexpr int keys   = k_pitch + v_pitch <= 160 ? 32 : 16;
    static constexpr int stages = is_hot ? 1 : 2;
    static constexpr int k_size = keys * k_pitch;
    static constexpr int stage  = (k_size + keys * v_pitch + 15) / 16 * 16;
    static constexpr int bytes  = decode_warps * stages * stage;
};

// Floats from a warp's sums of one row to those of the next, which lie in other banks
MIXEDKV_SHARED(int) sums_pitch(int d_v) {
    return d_v + 4;
}

// What a block of this shape has in shared memory
template <class K, class V, int d_k, int d_v, int n_tiles>
struct decode_layout {
    static constexpr int rows = 8 * n_tiles;

    using cold = strip_layout<K, V, d_k, d_v, false>;
    using hot  = strip_layout<f16_rows, f16_rows, d_k, d_v, true>;

    static constexpr int sums    = decode_warps * rows * (sums_pitch(d_v) + 2) * 4;
    static constexpr int queries = rows * d_k * 4;

    MIXEDKV_SHARED(int) larger(int a, int b) { return a > b ? a : b; }
    static constexpr int strips =
        larger(cold::bytes, hot::bytes); // the queries lie behind: strips are on their way first
    static constexpr int bytes = larger(strips + queries, sums);
};

// Query rows of a tile, as the second operand of a product, in the order in which rows of type K are dequantised
template <class K, int d_k, int n_tiles>
struct query_words {
    uint32_t at[d_k / 32][n_tiles][4]; // unit: words 0 and 1 of the first step, 2 and 3 of the second

    // from F32 [8 * n_tiles, d_k] in shared memory
    MIXEDKV_DEVICE_MEMBER void load(const float * q) {
        const int g = lane() / 4, t = lane() % 4;
#pragma unroll
        for (int unit = 0; unit < d_k / 32; unit++) {
#pragma unroll
            for (int tile = 0; tile < n_tiles; tile++) {
                const float * row = q + (8 * tile + g) * d_k + 32 * unit;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    at[unit][tile][i] = pack_f16x2(row[K::element_k(t, i, 0)], row[K::element_k(t, i, 1)]);
                }
            }
        }
    }
};

// Writes the queries of a tile, scaled and rotated, to shared memory.
template <int d_k>
MIXEDKV_DEVICE void load_queries(const attention_problem & p, int stream, int head_kv, int row0, int n_rows,
                                 float * q) {
    for (int row = thread() / warp_size; row < n_rows; row += decode_warps) {
        float x[d_k / warp_size];
        load_query(p, stream, head_kv, row0 + row, x);
#pragma unroll
        for (int i = 0; i < d_k / warp_size; i++) {
            q[row * d_k + i * warp_size + lane()] = x[i];
        }
    }
}

// Keys of a split of one kind of rows, and what the rows of a tile see of them
template <class Layout, bool is_hot>
struct strip_reader {
    static constexpr int keys  = Layout::keys;
    static constexpr int parts = keys / 16;

    const attention_problem & p;
    const int                 stream, head_kv;
    const int                 end; // of the split's keys, within their kind
    char * const              memory;
    const char * const        cold_k; // the first key
    const char * const        cold_v;

    // Lanes that follow each other copy what follows each other, as many as a power of two of a row; what is left of
    // rows has a lane each. Keys behind the last are those that nobody sees: the last one's row serves.
    template <int bytes, int pitch>
    MIXEDKV_DEVICE_MEMBER void copy_rows(int key0, bool is_v, char * to) const {
        constexpr int width = copy_bytes(bytes), chunks = bytes / width;
        constexpr int lanes = chunks >= 32 ? 32 : chunks >= 16 ? 16 : chunks >= 8 ? 8 : 4, rows = warp_size / lanes;
        const int64_t pitch_from = is_v ? p.cold.v.row : p.cold.k.row;
        const char * const first = (is_v ? cold_v : cold_k) + key0 * pitch_from;
        const auto         copy  = [&](int row, int chunk) {
            const uint32_t     key = uint32_t(min_of(row, end - 1 - key0)); // 32 bits: one instruction
            const char * const from =
                is_hot ? find_row(p, stream, head_kv, key0 + int(key), true, is_v) : first + key * uint32_t(pitch_from);
            copy_async<width>(to + row * pitch + chunk * width, from + chunk * width);
        };
#pragma unroll
        for (int i = 0; i < keys / rows; i++) {
#pragma unroll
            for (int j = 0; j + lanes <= chunks; j += lanes) {
                copy(i * rows + lane() / lanes, j + lane() % lanes);
            }
        }
#pragma unroll
        for (int chunk = chunks / lanes * lanes; chunk < chunks; chunk++) {
            if (keys == warp_size || lane() < keys) {
                copy(lane(), chunk);
            }
        }
    }

    MIXEDKV_DEVICE_MEMBER void copy(int key0, int stage) const {
        char * to = memory + stage * Layout::stage;
        copy_rows<Layout::k_bytes, Layout::k_pitch>(key0, false, to);
        copy_rows<Layout::v_bytes, Layout::v_pitch>(key0, true, to + Layout::k_size);
    }
};

// A thread's share of the mask of a strip: of its keys 8 i + g what its query rows 8 tile + 2 t and the next see
template <int parts, int n_tiles>
struct strip_mask {
    uint32_t at[2 * parts][n_tiles];

    static constexpr uint32_t both_hidden = hidden | uint32_t(hidden) << 16;

    // row0: of the tile; key0, end: within their kind, whose first key has the column `first_key`
    MIXEDKV_DEVICE_MEMBER void load(const attention_problem & p, int stream, int row0, int key0, int first_key,
                                    int end) {
        const int g = lane() / 4, t = lane() % 4, group = p.group();
#pragma unroll
        for (int tile = 0; tile < n_tiles; tile++) {
            const int        first_row = row0 + 8 * tile + 2 * t;
            const int        token = first_row / group, second = (first_row + 1) / group;
            const uint16_t * column     = p.mask + stream * p.mask_stream + first_key + key0 + g;
            const uint16_t * row        = column + token * p.mask_token;
            const uint16_t * next       = column + second * p.mask_token;
            const bool       reads_next = second != token && second < p.n_tokens;
#pragma unroll
            for (int i = 0; i < 2 * parts; i++) {
                const bool is_key = key0 + 8 * i + g < end;
                uint32_t   low = hidden, high = hidden;
                if (is_key && token < p.n_tokens) {
                    low = row[8 * i];
                }
                if (is_key && reads_next) {
                    high = next[8 * i];
                }
                at[i][tile] = low | (second == token ? low : high) << 16;
            }
        }
    }

    MIXEDKV_DEVICE_MEMBER uint16_t get(int part, int half, int tile, int column) const {
        return uint16_t(at[2 * part + half][tile] >> 16 * column);
    }

    // some key is hidden from some row, or is to be weighed by its distance
    MIXEDKV_DEVICE_MEMBER bool is_any() const {
        uint32_t res = 0;
#pragma unroll
        for (int i = 0; i < 2 * parts; i++) {
#pragma unroll
            for (int tile = 0; tile < n_tiles; tile++) {
                res |= at[i][tile];
            }
        }
        return any_lane(res != 0);
    }

    MIXEDKV_DEVICE_MEMBER bool is_visible() const {
        bool res = false;
#pragma unroll
        for (int i = 0; i < 2 * parts; i++) {
#pragma unroll
            for (int tile = 0; tile < n_tiles; tile++) {
                res |= at[i][tile] != both_hidden;
            }
        }
        return any_lane(res);
    }
};

// The sums of one warp over the strips that it has seen
template <int d_v, int n_tiles>
struct warp_sums {
    float m[n_tiles][2];           // largest score of the thread's columns so far, in bits
    float l[n_tiles][2];           // the thread's share of the sum of weights
    float o[d_v / 16][n_tiles][4]; // values times weights: elements in the order of dequantise_v, columns

    MIXEDKV_DEVICE_MEMBER void clear() {
#pragma unroll
        for (int tile = 0; tile < n_tiles; tile++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                m[tile][i / 2] = -INFINITY;
                l[tile][i / 2] = 0.0f;
#pragma unroll
                for (int j = 0; j < d_v / 16; j++) {
                    o[j][tile][i] = 0.0f;
                }
            }
        }
    }

    // The largest score of a column is at least this: sums so far are brought to it.
    MIXEDKV_DEVICE_MEMBER void raise(const float (&largest)[n_tiles][2]) {
        bool grows = false;
#pragma unroll
        for (int tile = 0; tile < n_tiles; tile++) {
            grows |= largest[tile][0] > m[tile][0] || largest[tile][1] > m[tile][1];
        }
        if (!any_lane(grows)) {
            return;
        }
#pragma unroll
        for (int tile = 0; tile < n_tiles; tile++) {
            float factor[2];
#pragma unroll
            for (int column = 0; column < 2; column++) {
                const float now = max_of(m[tile][column], largest[tile][column]);
                factor[column]  = now == -INFINITY ? 1.0f : exp2_of(m[tile][column] - now);
                m[tile][column] = now;
                l[tile][column] *= factor[column];
            }
#pragma unroll
            for (int j = 0; j < d_v / 16; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    o[j][tile][i] *= factor[i % 2];
                }
            }
        }
    }
};

template <class K, class V, int d_k, int d_v, int n_tiles>
struct decode_products {
    // Scores of 16 keys: rows g and g + 8, columns 2 t and 2 t + 1
    template <int unit>
    MIXEDKV_DEVICE void add_products(const char * row_g, const char * row_g8, const query_words<K, d_k, n_tiles> & q,
                                     float (&score)[n_tiles][4]) {
        const int t = lane() % 4;
        uint32_t  low[4], high[4];
        K::template unpack_k<unit>(row_g, t, low);
        K::template unpack_k<unit>(row_g8, t, high);
        float sum[n_tiles][4] = {};
#pragma unroll
        for (int step = 0; step < 2; step++) {
            const uint32_t a[4] = { low[2 * step], high[2 * step], low[2 * step + 1], high[2 * step + 1] };
#pragma unroll
            for (int tile = 0; tile < n_tiles; tile++) {
                multiply_16x8x16(K::has_scale ? sum[tile] : score[tile], a, q.at[unit][tile][2 * step],
                                 q.at[unit][tile][2 * step + 1]);
            }
        }
        if constexpr (K::has_scale) {
            const float d_g = K::template scale<unit>(row_g), d_g8 = K::template scale<unit>(row_g8);
#pragma unroll
            for (int tile = 0; tile < n_tiles; tile++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    score[tile][i] += sum[tile][i] * (i < 2 ? d_g : d_g8);
                }
            }
        }
        if constexpr (unit + 1 < d_k / 32) {
            add_products<unit + 1>(row_g, row_g8, q, score);
        }
    }

    // Values of 16 keys, of which the thread dequantises 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, times their weights
    template <int unit>
    MIXEDKV_DEVICE void add_values(const char * rows, int pitch, const uint32_t (&weight)[n_tiles][2],
                                   float (&o)[d_v / 16][n_tiles][4]) {
        const int    g = lane() / 4, t = lane() % 4;
        const char * first = rows + 2 * t * pitch;
        uint32_t     low[4], high[4];
        V::template dequantise_v<unit>(first, first + pitch, g, low);
        V::template dequantise_v<unit>(first + 8 * pitch, first + 9 * pitch, g, high);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t a[4] = { low[2 * half], low[2 * half + 1], high[2 * half], high[2 * half + 1] };
#pragma unroll
            for (int tile = 0; tile < n_tiles; tile++) {
                multiply_16x8x16(o[2 * unit + half][tile], a, weight[tile][0], weight[tile][1]);
            }
        }
        if constexpr (unit + 1 < d_v / 32) {
            add_values<unit + 1>(rows, pitch, weight, o);
        }
    }
};

// One strip, which lies in shared memory
template <class K, class V, int d_k, int d_v, int n_tiles, class Layout>
MIXEDKV_DEVICE void attend_strip(const attention_problem & p, const char * memory,
                                 const query_words<K, d_k, n_tiles> &           q,
                                 const strip_mask<Layout::keys / 16, n_tiles> & mask, const float (&slope)[n_tiles][2],
                                 warp_sums<d_v, n_tiles> &                      sums) {
    using products      = decode_products<K, V, d_k, d_v, n_tiles>;
    constexpr int parts = Layout::keys / 16;
    const int     g     = lane() / 4;

    float score[parts][n_tiles][4] = {};
    float largest[n_tiles][2];
#pragma unroll
    for (int tile = 0; tile < n_tiles; tile++) {
        largest[tile][0] = largest[tile][1] = -INFINITY;
    }
#pragma unroll
    for (int part = 0; part < parts; part++) {
        const char * row = memory + (16 * part + g) * Layout::k_pitch;
        products::template add_products<0>(row, row + 8 * Layout::k_pitch, q, score[part]);
    }
    const auto for_scores = [&](auto && f) {
#pragma unroll
        for (int part = 0; part < parts; part++) {
#pragma unroll
            for (int tile = 0; tile < n_tiles; tile++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    f(score[part][tile][i], part, tile, i);
                }
            }
        }
    };
    // Each of the two is rare, and branches of their own keep them out of the way.
    if (p.logit_softcap != 0.0f) {
        for_scores([&](float & x, int, int, int) { x = capped_score(p, x); });
    }
    if (mask.is_any()) {
        for_scores([&](float & x, int part, int tile, int i) {
            x = masked_score(x, mask.get(part, i / 2, tile, i % 2), slope[tile][i % 2]);
        });
    }
    for_scores([&](float & x, int, int tile, int i) { largest[tile][i % 2] = max_of(largest[tile][i % 2], x); });
#pragma unroll
    for (int tile = 0; tile < n_tiles; tile++) {
#pragma unroll
        for (int column = 0; column < 2; column++) {
#pragma unroll
            for (int h = 4; h < warp_size; h *= 2) {
                largest[tile][column] = max_of(largest[tile][column], shuffle_xor(largest[tile][column], h));
            }
        }
    }
    sums.raise(largest);
#pragma unroll
    for (int part = 0; part < parts; part++) {
        uint32_t weight[n_tiles][2];
#pragma unroll
        for (int tile = 0; tile < n_tiles; tile++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float w[2];
#pragma unroll
                for (int column = 0; column < 2; column++) {
                    w[column] = exp2_of(score[part][tile][2 * half + column] - base_of(sums.m[tile][column]));
                    sums.l[tile][column] += w[column];
                }
                weight[tile][half] = transpose_8x8(pack_f16x2(w[0], w[1]));
            }
        }
        const char * rows = memory + Layout::k_size + 16 * part * Layout::v_pitch;
        products::template add_values<0>(rows, Layout::v_pitch, weight, sums.o);
    }
}

// All strips of the warp in the keys [begin, end) of one kind; first_key: of that kind, as columns of the mask count
template <class K, class V, int d_k, int d_v, int n_tiles, bool is_hot>
MIXEDKV_DEVICE void attend_keys(const attention_problem & p, int stream, int head_kv, int row0, int begin, int end,
                                int first_key, float * queries, char * memory, warp_sums<d_v, n_tiles> & sums) {
    using layout            = strip_layout<K, V, d_k, d_v, is_hot>;
    constexpr int step_keys = decode_warps * layout::keys;
    const int     warp      = thread() / warp_size;
    const bool    is_busy   = begin + warp * layout::keys < end;

    const strip_reader<layout, is_hot>     reader{ p,
                                                   stream,
                                                   head_kv,
                                                   end,
                                                   memory + warp * layout::stages * layout::stage,
                                                   find_row(p, stream, head_kv, 0, false, false),
                                                   find_row(p, stream, head_kv, 0, false, true) };
    strip_mask<layout::keys / 16, n_tiles> mask, next;

    // Queries and masks are there before the kernel that stores the micro-batch has run.
    int key = begin + warp * layout::keys;
    mask.load(p, stream, row0, key, first_key, end);
    next.load(p, stream, row0, key + step_keys, first_key, end);
    load_queries<d_k>(p, stream, head_kv, row0, 8 * n_tiles, queries);

    wait_for_previous();
    start_next();
    if (is_busy) {
        reader.copy(key, 0);
    }
    commit_copies();
    float slope[n_tiles][2];
#pragma unroll
    for (int tile = 0; tile < n_tiles; tile++) {
#pragma unroll
        for (int column = 0; column < 2; column++) {
            const int row       = row0 + 8 * tile + 2 * (lane() % 4) + column;
            slope[tile][column] = alibi_slope(p, head_kv * p.group() + row % p.group());
        }
    }
    sync_block();
    query_words<K, d_k, n_tiles> q;
    q.load(queries);

    bool sees = mask.is_visible();
    for (int stage = 0; key < end; key += step_keys) {
        strip_mask<layout::keys / 16, n_tiles> after; // is on its way while the strip is worked on
        after.load(p, stream, row0, key + 2 * step_keys, first_key, end);
        const bool sees_next = next.is_visible();
        if (layout::stages > 1) {
            if (sees_next) {
                reader.copy(key + step_keys, stage ^ 1);
            }
            commit_copies();
        }
        wait_copies<layout::stages - 1>();
        sync_warp();
        if (sees) {
            attend_strip<K, V, d_k, d_v, n_tiles, layout>(p, reader.memory + stage * layout::stage, q, mask, slope,
                                                          sums);
        }
        sync_warp(); // the stage is free
        if (layout::stages > 1) {
            stage ^= 1;
        } else {
            if (sees_next) {
                reader.copy(key + step_keys, 0);
            }
            commit_copies();
        }
        mask = next;
        next = after;
        sees = sees_next;
    }
    wait_copies<0>();
}

// Puts the sums of the block's warps together and writes those of the split.
template <class V, int d_v, int n_tiles>
MIXEDKV_DEVICE void write_sums(const attention_problem & p, int stream, int head_kv, int row0, int split,
                               warp_sums<d_v, n_tiles> & sums, float * memory) {
    constexpr int rows = 8 * n_tiles, pitch = sums_pitch(d_v);
    const int     warp = thread() / warp_size, g = lane() / 4, t = lane() % 4;

    float * const all_m = memory + decode_warps * rows * pitch; // [warps, rows]
    float * const all_l = all_m + decode_warps * rows;

    sync_block(); // strips are done with
#pragma unroll
    for (int tile = 0; tile < n_tiles; tile++) {
#pragma unroll
        for (int column = 0; column < 2; column++) {
            const int row = 8 * tile + 2 * t + column;
            float     l   = sums.l[tile][column];
            for (int h = 4; h < warp_size; h *= 2) {
                l += shuffle_xor(l, h);
            }
            if (g == 0) {
                all_m[warp * rows + row] = sums.m[tile][column];
                all_l[warp * rows + row] = l;
            }
#pragma unroll
            for (int j = 0; j < d_v / 16; j++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int d                             = j / 2 * 32 + V::element_v(g, 2 * (j % 2) + half);
                    memory[(warp * rows + row) * pitch + d] = sums.o[j][tile][2 * half + column];
                }
            }
        }
    }
    sync_block();

    const int group = p.group();
    for (int row = warp; row < rows; row += decode_warps) {
        const int token = (row0 + row) / group, head = head_kv * group + (row0 + row) % group;
        if (token >= p.n_tokens) {
            return;
        }
        float m = -INFINITY, l = 0.0f, factor[decode_warps];
#pragma unroll
        for (int w = 0; w < decode_warps; w++) {
            m = max_of(m, all_m[w * rows + row]);
        }
#pragma unroll
        for (int w = 0; w < decode_warps; w++) {
            factor[w] = m == -INFINITY ? 0.0f : exp2_of(all_m[w * rows + row] - m);
            l += factor[w] * all_l[w * rows + row];
        }
        const int64_t at = ((int64_t(stream) * p.n_tokens + token) * p.n_head + head) * p.n_splits + split;
        for (int d = lane(); d < d_v; d += warp_size) {
            float o = 0.0f;
#pragma unroll
            for (int w = 0; w < decode_warps; w++) {
                o += factor[w] * memory[(w * rows + row) * pitch + d];
            }
            p.sums[at * d_v + d] = o;
        }
        if (lane() == 0) {
            p.weights[2 * at]     = m;
            p.weights[2 * at + 1] = l;
        }
    }
}

// Grid: KV heads x tiles of 8 * n_tiles query rows, splits, streams. Block: decode_warps warps.
template <class K, class V, int d_k, int d_v, int n_tiles>
MIXEDKV_KERNEL(decode_warps * warp_size, d_v > 128 ? 1 : 2)
decode_kernel(const attention_problem p) {
    const int head_kv = block_x() % p.n_head_kv, split = block_y(), stream = block_z();
    const int row0 = block_x() / p.n_head_kv * 8 * n_tiles;

    char * const  memory  = shared_memory();
    float * const queries = reinterpret_cast<float *>(memory + decode_layout<K, V, d_k, d_v, n_tiles>::strips);

    warp_sums<d_v, n_tiles> sums;
    sums.clear();
    if (split < p.n_cold_splits) {
        const int begin = split * p.split_keys;
        const int end   = min_of(begin + p.split_keys, p.cold.n);
        attend_keys<K, V, d_k, d_v, n_tiles, false>(p, stream, head_kv, row0, begin, end, 0, queries, memory, sums);
        write_sums<V, d_v, n_tiles>(p, stream, head_kv, row0, split, sums, reinterpret_cast<float *>(memory));
    } else {
        const int begin = (split - p.n_cold_splits) * p.hot_keys;
        const int end   = min_of(begin + p.hot_keys, p.n_hot());
        attend_keys<f16_rows, f16_rows, d_k, d_v, n_tiles, true>(p, stream, head_kv, row0, begin, end, p.first_hot_key,
                                                                 queries, memory, sums);
        write_sums<f16_rows, d_v, n_tiles>(p, stream, head_kv, row0, split, sums, reinterpret_cast<float *>(memory));
    }
}

} // namespace cuda
} // namespace mixedkv
