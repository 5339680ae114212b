// Prefill on AMX. Every F32 operand is the sum of two BF16 parts, and a product is the sum of three tile products
// (high*high, low*high, high*low): the error is that of 16-bit significands, the sums are F32.
//
// Time at head size 128, Sapphire Rapids: 40% tile products (18 cycles each, their bound), 10% tile loads and stores of
// sums, 30% softmax and splitting the weights, 12% dequantising K and V, 5% scanning the mask.

#pragma once

#include "amx_tiles.h"
#include "attention/tile.h"

namespace mixedkv {
namespace {

// Operands are sequences of 1 KiB tiles, high and low part in turn. Elements i and i + 16 of each 32 along the summed
// dimension share a dword, on both sides of a product: no shuffle is needed to pair them.
struct amx_prefill {
    using base = tile<avx512>;

    static int64_t steps(int64_t n) { return (n + 31) / 32; }

    static bool fits(const attention_args & a) { return a.d_k <= 512 && a.d_v <= 512; }

    static int block_keys(const attention_args & a) {
        const int64_t d = round_up(a.d_k > a.d_v ? a.d_k : a.d_v, 32);
        return d <= 128 ? 128 : d <= 256 ? 64 : 32;
    }

    // n F32 of one row, n a multiple of 32, as row `row` of n / 32 pairs of tiles
    static void pack_row(const float * x, int64_t n, char * tiles, int row) {
        for (int64_t i = 0; i < n; i += 32, tiles += 2 * tile_bytes) {
            split_pair(_mm512_loadu_ps(x + i), _mm512_loadu_ps(x + i + 16), tiles + 64 * row,
                       tiles + tile_bytes + 64 * row);
        }
    }

    // a row of K or V, zeros up to a multiple of 32
    static void dequantise(const attention_rows & rows, int64_t key, int head, int n, float * out) {
        base::dequantise(rows, key, head, n, out);
        if ((n - 1) % 32 < 16) {
            _mm512_storeu_ps(out + round_up(n, 16), _mm512_setzero_ps());
        }
    }

    static void pack_queries(const attention_item & w, int head, const item_memory & m) {
        const attention_args & a     = *w.args;
        const int              group = a.n_head / a.n_head_kv;
        const int64_t          d     = round_up(a.d_k, 32);
        alignas(64) float      x[512];
        for (int row = 0; row < m.rows_padded; row++) {
            std::memset(x, 0, d * sizeof(float));
            if (row < m.rows) {
                load_query(a, w.q0 + row / group, head * group + row % group, query_factor(a), x);
            }
            pack_row(x, d, static_cast<char *>(m.q) + row / 16 * steps(d) * 2 * tile_bytes, row % 16);
        }
    }

    // K of 16 keys per sequence of tiles, transposed so that keys are columns. Rows go through the panel of V.
    static void pack_keys(const attention_item & w, int head, const key_span & span, char * panel) {
        const int64_t     d = round_up(w.args->d_k, 32);
        alignas(64) float x[512];
        char *            rows = reinterpret_cast<char *>(w.panels->v);
        for (int j = 0; j < span.n; j += 16) {
            for (int i = 0; i < 16; i++) { // past the last key, repeat it: its scores are set to -inf later
                const int key = j + i < span.n ? j + i : span.n - 1;
                dequantise(span.segment->k, span.first + key, head, w.args->d_k, x);
                pack_row(x, d, rows, i);
            }
            for (int64_t t = 0; t < 2 * steps(d); t++, panel += tile_bytes) {
                avx512::transpose(reinterpret_cast<float *>(rows + t * tile_bytes), 16,
                                  reinterpret_cast<float *>(panel), 16);
            }
        }
        if (((span.n - 1) & 31) < 16) { // tiles are used in pairs
            std::memset(panel, 0, 2 * steps(d) * tile_bytes);
        }
    }

    // V of 32 keys per sequence of tiles, columns as they are
    static void pack_values(const attention_item & w, int head, const key_span & span, char * panel) {
        const int64_t     d = round_up(w.args->d_v, 32);
        alignas(64) float x[2][512];
        for (int j = 0; j < round_up(span.n, 32); j += 32) {
            for (int i = 0; i < 16; i++) {
                for (int half = 0; half < 2; half++) {
                    const int key = j + i + 16 * half;
                    if (key < span.n) {
                        dequantise(span.segment->v, span.first + key, head, w.args->d_v, x[half]);
                    } else {
                        std::memset(x[half], 0, d * sizeof(float));
                    }
                }
                for (int64_t c = 0; c < d; c += 16) {
                    char * tile = panel + c / 16 * 2 * tile_bytes + 64 * i;
                    split_pair(_mm512_load_ps(x[0] + c), _mm512_load_ps(x[1] + c), tile, tile + tile_bytes);
                }
            }
            panel += d / 16 * 2 * tile_bytes;
        }
    }

    // Tile registers 0..3: 32 x 32 sums; 4, 5: rows; 6, 7: columns.
    // a0, a1: rows; b0, b1: columns; each a pair (high, low) of tiles. R is 1 or 2 row tiles.
    template <int R>
    static void add_product(const char * a0, const char * a1, const char * b0, const char * b1) {
        _tile_loadd(4, a0, 64);
        _tile_loadd(6, b0 + tile_bytes, 64);
        _tile_loadd(7, b1 + tile_bytes, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (R == 2) {
            _tile_loadd(5, a1, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_loadd(6, b0, 64);
        _tile_loadd(7, b1, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (R == 2) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_loadd(4, a0 + tile_bytes, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (R == 2) {
            _tile_loadd(5, a1 + tile_bytes, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }

    template <int R>
    static void store_sums(float * c, int64_t ldc) {
        _tile_stored(0, c, ldc * sizeof(float));
        _tile_stored(1, c + 16, ldc * sizeof(float));
        if (R == 2) {
            _tile_stored(2, c + 16 * ldc, ldc * sizeof(float));
            _tile_stored(3, c + 16 * ldc + 16, ldc * sizeof(float));
        }
    }

    // s[16 R, keys] = q k
    template <int R>
    static void score(const char * q, int64_t n_steps, const char * k, int keys, float * s) {
        const int64_t pair = 2 * tile_bytes;
        for (int j = 0; j < keys; j += 32, k += 2 * n_steps * pair) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t i = 0; i < n_steps; i++) {
                add_product<R>(q + i * pair, q + (n_steps + i) * pair, k + i * pair, k + (n_steps + i) * pair);
            }
            store_sums<R>(s + j, most_keys);
        }
    }

    // acc[16 R, d_v] += p v
    template <int R>
    static void accumulate(const char * p, int keys, const char * v, int64_t d_v, float * acc) {
        const int64_t pair    = 2 * tile_bytes;
        const int64_t n_steps = keys / 32;
        for (int64_t c = 0; c < d_v; c += 32) {
            _tile_loadd(0, acc + c, d_v * sizeof(float));
            _tile_loadd(1, acc + c + 16, d_v * sizeof(float));
            if (R == 2) {
                _tile_loadd(2, acc + 16 * d_v + c, d_v * sizeof(float));
                _tile_loadd(3, acc + 16 * d_v + c + 16, d_v * sizeof(float));
            }
            for (int64_t i = 0; i < n_steps; i++) {
                const char * column = v + (i * (d_v / 16) + c / 16) * pair;
                add_product<R>(p + i * pair, p + (n_steps + i) * pair, column, column + pair);
            }
            store_sums<R>(acc + c, d_v);
        }
    }

    // 16 R rows from `row` on against the block
    template <int R>
    static void tile_row(const attention_item & w, int head, const item_memory & m, const key_span & span,
                         const char * k, const char * v, int row) {
        const attention_args & a       = *w.args;
        const int              group   = a.n_head / a.n_head_kv;
        const int64_t          n_steps = steps(a.d_k);
        const int              keys    = int(round_up(span.n, 32));
        alignas(64) float      s[16 * R * most_keys];
        alignas(64) char       p[16 * R * most_keys * 4];
        if (!any_visible(w, span, row, 16 * R)) {
            return;
        }
        score<R>(static_cast<const char *>(m.q) + row / 16 * n_steps * 2 * tile_bytes, n_steps, k, keys, s);
        for (int r = 0; r < 16 * R; r++) {
            float * weights = s + r * most_keys;
            int     used    = 0;
            if (row + r < m.rows && span.states[(row + r) / group] != all_hidden) {
                base::add_pairs(w, head, span, row + r, weights);
                base::softmax::update(rule_of(w, span, head, row + r), weights, span.n, m.max[row + r], m.sum[row + r],
                                      m.acc + (row + r) * m.d_v_padded, m.d_v_padded);
                used = int(round_up(span.n, 16));
            }
            for (; used < keys; used += 16) {
                _mm512_store_ps(weights + used, _mm512_setzero_ps());
            }
            pack_row(weights, keys, p + r / 16 * (keys / 32) * 2 * tile_bytes, r % 16);
        }
        accumulate<R>(p, keys, v, m.d_v_padded, m.acc + row * m.d_v_padded);
    }

    // as tile<>::prefill_block
    [[gnu::noinline]] static void block(const attention_item & w, int head, const item_memory & m,
                                        const key_span & span) {
        char * const k = reinterpret_cast<char *>(w.panels->k);
        char * const v = reinterpret_cast<char *>(w.panels->v);
        pack_keys(w, head, span, k);
        pack_values(w, head, span, v);
        int64_t row = 0;
        for (; row + 32 <= m.rows_padded; row += 32) {
            tile_row<2>(w, head, m, span, k, v, int(row));
        }
        if (row < m.rows_padded) {
            tile_row<1>(w, head, m, span, k, v, int(row));
        }
    }

    static void run(const attention_item & w) {
        const tile_session session;
        const item_memory  m(*w.args, w.decode, w.n_queries, w.memory, 0);
        std::memset(m.acc, 0, m.rows_padded * m.d_v_padded * sizeof(float)); // tiles load the padding too
        pack_queries(w, w.head0, m);
        base::prefill_splits(w, block_keys(*w.args),
                             [&](const item_memory & m, const key_span & span) { block(w, w.head0, m, span); });
    }
};

} // namespace
} // namespace mixedkv
