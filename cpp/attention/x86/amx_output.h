// Decode on AMX: weights times the integers of q4_0 and q8_0 values. See amx_decode.h.

#pragma once

#include "amx_integers.h"

namespace mixedkv {
namespace {

// V: the weights s[rows][key_block] times a block of rows, added to the item's sums
struct amx_output {
    struct panel {
        alignas(64) char ints[4][2][tile_bytes]; // block, half: 64 keys by 16 columns
        key_scales scales;
    };

    // The same 16 bytes of 4 keys, the keys of each byte side by side
    static __m512i interleave(const char * p, int64_t row) {
        alignas(64) static constexpr uint8_t order[64] = { 0,  16, 32, 48, 1,  17, 33, 49, 2,  18, 34, 50, 3,
                                                           19, 35, 51, 4,  20, 36, 52, 5,  21, 37, 53, 6,  22,
                                                           38, 54, 7,  23, 39, 55, 8,  24, 40, 56, 9,  25, 41,
                                                           57, 10, 26, 42, 58, 11, 27, 43, 59, 12, 28, 44, 60,
                                                           13, 29, 45, 61, 14, 30, 46, 62, 15, 31, 47, 63 };
        return _mm512_permutexvar_epi8(_mm512_load_si512(order), load_lanes(p, row));
    }

    // 4 keys, as row `at / 64` of the tiles
    template <row_type type>
    static void unpack_keys(const char * p, int64_t row, int n_blocks, int key, int at, panel & v) {
        for (int b = 0; b < n_blocks; b++) {
            const __m512i x = interleave(p + integers_at(type, b), row);
            if constexpr (integer_rows<type>::nibbles) {
                _mm512_store_si512(v.ints[b][0] + at, values_of<type>(x, _mm512_set1_epi64(low_nibble)));
                _mm512_store_si512(v.ints[b][1] + at, values_of<type>(x, _mm512_set1_epi64(high_nibble)));
            } else {
                _mm512_store_si512(v.ints[b][0] + at, x);
                _mm512_store_si512(v.ints[b][1] + at, interleave(p + integers_at(type, b) + 16, row));
            }
        }
        v.scales.load<type>(p, row, n_blocks, key);
    }

    // A row of a tile holds 4 consecutive keys; row 4 l + i has those from 16 i + 4 l on, which is the order in which
    // pack_weights leaves them. Past the last key the last one is repeated: its weight is zero.
    template <row_type type>
    static void unpack(const char * p, const attention_rows & rows, prefetcher & ahead, int n, int n_blocks,
                       panel & v) {
        constexpr int64_t most = 4 * most_block_bytes;
        for (int j = 0; j < key_block; j += 4) {
            const int at = 64 * (j % 16 + j / 16);
            if (j + 4 <= n) {
                const char * from = p + j * rows.row;
                ahead.step(2);
                unpack_keys<type>(from, rows.row, n_blocks, j, at, v);
                continue;
            }
            char local[4 * most];
            for (int i = 0; i < 4; i++) {
                const int key = j + i < n ? j + i : n - 1;
                std::memcpy(local + i * most, p + key * rows.row, scale_at(type, n_blocks));
            }
            unpack_keys<type>(local, most, n_blocks, j, at, v);
        }
    }

    // Times the scales of a block: a row of high bytes, a row of low bytes
    static void pack_weights(const block_weights<avx512> & p, const weight_unit<avx512> & unit, char * rows) {
        const __m512i half = _mm512_set1_epi16(128);
        const __m512i byte = _mm512_set1_epi16(255);
        __m512i       n[2];
        unit.apply(p, n);
        _mm512_store_si512(rows, _mm512_packs_epi16(_mm512_srai_epi16(_mm512_add_epi16(n[0], half), 8),
                                                    _mm512_srai_epi16(_mm512_add_epi16(n[1], half), 8)));
        _mm512_store_si512(rows + 64, _mm512_packus_epi16(_mm512_and_si512(n[0], byte), _mm512_and_si512(n[1], byte)));
    }

    // Tile registers with 8 rows: 3 left, 6 and 7 sums
    static void multiply(const char * left, const char * first, const char * second, tile_sums & sums) {
        _tile_zero(6);
        _tile_zero(7);
        _tile_loadd(3, left, 64);
        _tile_loadd(4, first, 64);
        _tile_dpbssd(6, 3, 4);
        _tile_loadd(5, second, 64);
        _tile_dpbssd(7, 3, 5);
        _tile_stored(6, sums[0], 64);
        _tile_stored(7, sums[1], 64);
    }

    static void finish(const tile_sums & sums, float unit, const float * top, int rows, float * acc, int64_t ld) {
        for (int r = 0; r < rows; r++, acc += ld) {
            const __m512 scale = _mm512_set1_ps(unit * top[r]);
            for (int half = 0; half < 2; half++) {
                const __m512i high = _mm512_load_si512(sums[half] + 32 * r);
                const __m512i n =
                    _mm512_add_epi32(_mm512_slli_epi32(high, 8), _mm512_load_si512(sums[half] + 32 * r + 16));
                const __m512 y = _mm512_load_ps(acc + 16 * half);
                _mm512_store_ps(acc + 16 * half, _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(n), y));
            }
        }
    }

    // Up to 4 rows
    static void add(const panel & v, prefetcher & ahead, int n_blocks, int rows, const float * s, float * acc,
                    int64_t ld) {
        alignas(64) char      left[4][tile_bytes / 2];
        alignas(64) tile_sums sums[4];  // first half of a block, second half
        weight_unit<avx512>   units[4]; // by block
        float                 top[4];
        const uint64_t        used = used_keys<avx512>(s, rows, key_block);
        if (!used) {
            return;
        }
        bool extreme = false;
        for (int b = 0; b < n_blocks; b++) {
            units[b].find(v.scales.half[b], used);
            extreme |= units[b].is_extreme();
        }
        if (extreme && rows > 1) {
            for (int r = 0; r < rows; r++) {
                add(v, ahead, n_blocks, 1, s + r * key_block, acc + r * ld, ld);
            }
            return;
        }
        for (int r = 0; r < rows; r++) {
            block_weights<avx512> p;
            ahead.step(3);
            top[r] = relative_weights<avx512>(s + r * key_block, p);
            for (int b = 0; b < n_blocks; b++) {
                pack_weights(p, units[b], left[b] + 128 * r);
            }
        }
        for (int b = 0; b < n_blocks; b++) {
            ahead.step(2);
            multiply(left[b], v.ints[b][0], v.ints[b][1], sums[b]);
        }
        for (int b = 0; b < n_blocks; b++) {
            ahead.step(3);
            finish(sums[b], units[b].unit, top, rows, acc + 32 * b, ld);
        }
    }

    static void run(const attention_item & w, int head, const item_memory & m, const key_span & span,
                    prefetcher & ahead, float * s) {
        const attention_rows & rows = span.segment->v;
        panel                  v;
        clear_rest(m, span.n, s);
        for (int64_t g = 0; 128 * g < w.args->d_v; g++) {
            const int    left     = w.args->d_v / 32 - int(g) * 4;
            const int    n_blocks = left < 4 ? left : 4;
            const char * p        = key_row(rows, span.first, head) + scale_at(rows.type, int(4 * g));
            with_integers(rows.type, [&](auto type) {
                if (n_blocks == 4) { // twice, so that one of them is compiled for 4
                    unpack<decltype(type)::value>(p, rows, ahead, span.n, 4, v);
                } else {
                    unpack<decltype(type)::value>(p, rows, ahead, span.n, n_blocks, v);
                }
            });
            for (int row = 0; row < m.rows; row += 4) {
                add(v, ahead, n_blocks, m.rows - row < 4 ? m.rows - row : 4, s + row * key_block,
                    m.acc + row * m.d_v_padded + 128 * g, m.d_v_padded);
            }
        }
    }
};

} // namespace
} // namespace mixedkv
