// Decode on AMX over q4_0 and q8_0 rows: their integers are multiplied as they are, Q and the weights as 16-bit integers
// in two signed bytes (high * 256 + low). Sums are exact in 32 bits; scales are applied to them in F32.
//
// Scores: the left operand is K, 16 keys by 64 bytes, two blocks of 32 elements. Their scales differ from key to key, so
// each block has its own columns of the right operand: (block 0 high, block 0 low, block 1 high, block 1 low) by 4 rows,
// zero where the block is the other one. Summing the four 128-bit lanes of a scaled result ends the score of a key.
// Output: the weights times the scales of V are the left operand, 4 rows by (high, low), so each block of V has its own.
//
// Bounds per key and KV head, 4 rows of size 128 over q4_0, data in the first cache: see docs of the benchmark.

#pragma once

#include "amx_tiles.h"
#include "tile.h"

namespace mixedkv {
namespace {

constexpr float int16_limit = 32512; // 127 * 256: both bytes stay within [-128, 127]

inline bool is_quantised(row_type t) {
    return t == row_type::q8_0 || t == row_type::q4_0;
}

constexpr int block_bytes(row_type t) {
    return t == row_type::q8_0 ? q8_0_bytes : q4_0_bytes;
}

inline __m128i load_16(const char * p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
}

inline __m256i load_32(const char * p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
}

// Turns nibble n of a byte into the signed byte n - 8: bits 0..2 stay, bits 3..7 become the inverse of bit 3.
// Byte 7 - i of the matrix selects the source of bit i.
constexpr int64_t low_nibble  = 0x0102040808080808;
constexpr int64_t high_nibble = 0x1020408080808080;

inline __m512i nibbles(__m512i x, __m512i which) {
    return _mm512_gf2p8affine_epi64_epi8(x, which, 0xf8);
}

template <class T, T v> struct constant {
    static constexpr T value = v;
};

template <class F> void with_type(row_type type, F f) {
    type == row_type::q4_0 ? f(constant<row_type, row_type::q4_0>{}) : f(constant<row_type, row_type::q8_0>{});
}

using tile_sums = int32_t[2][tile_bytes / 4]; // two result tiles

// K: scores of one KV head's rows, four at a time (a quad), against a block of keys
struct amx_scores {
    // Right operands for one quad and two pairs of blocks (128 elements): a tile and 16 scales for each pair.
    struct quad {
        char *  tiles;
        float * scales;
    };

    static int64_t groups(int64_t d) { return (d + 127) / 128; }

    // Behind the F32 queries that other types need
    static quad quad_of(const attention_args & a, const item_memory & m, int q, int64_t g) {
        const int64_t d128 = round_up(a.d_k, 128);
        char *        p    = static_cast<char *>(m.q) + m.rows_padded * d128 * 4;
        char *        s    = p + m.rows_padded / 4 * groups(a.d_k) * 2 * tile_bytes;
        const int64_t i    = q * groups(a.d_k) + g;
        return { p + i * 2 * tile_bytes, reinterpret_cast<float *>(s) + i * 32 };
    }

    // Block 0..3 of a group, row 0..3 of a quad
    static void pack_block(const float * x, int block, int row, const quad & out) {
        const __m512 half[2] = { _mm512_loadu_ps(x), _mm512_loadu_ps(x + 16) };
        const float  largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(half[0]), _mm512_abs_ps(half[1])));
        const __m512 to_int  = _mm512_set1_ps(largest > 0.0f ? int16_limit / largest : 0.0f);
        const int    column  = block % 2 * 8 + row;
        float *      scales  = out.scales + block / 2 * 16;
        scales[column]       = 256 * largest / int16_limit;
        scales[column + 4]   = largest / int16_limit;
        for (int i = 0; i < 2; i++) {
            const __m512i n    = _mm512_cvtps_epi32(_mm512_mul_ps(half[i], to_int));
            const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(128)), 8);
            char *        at   = out.tiles + block / 2 * tile_bytes + (block % 2 * 8 + i * 4) * 64 + 4 * column;
            scatter_dwords(_mm512_cvtepi32_epi8(high), at);
            scatter_dwords(_mm512_cvtepi32_epi8(n), at + 16);
        }
    }

    // 4 dwords into a column of a tile
    static void scatter_dwords(__m128i x, char * at) {
        alignas(16) int32_t dwords[4];
        _mm_store_si128(reinterpret_cast<__m128i *>(dwords), x);
        for (int i = 0; i < 4; i++) {
            std::memcpy(at + 64 * i, dwords + i, 4);
        }
    }

    // From the F32 queries
    static void pack_queries(const attention_args & a, const item_memory & m) {
        const int64_t d = round_up(a.d_k, 16);
        for (int q = 0; 4 * q < m.rows; q++) {
            for (int64_t g = 0; g < groups(a.d_k); g++) {
                const quad out = quad_of(a, m, q, g);
                std::memset(out.tiles, 0, 2 * tile_bytes);
                std::memset(out.scales, 0, 32 * sizeof(float));
                for (int row = 4 * q; row < 4 * q + 4 && row < m.rows; row++) {
                    for (int b = 0; b < 4 && 128 * g + 32 * b < a.d_k; b++) {
                        pack_block(static_cast<const float *>(m.q) + row * d + 128 * g + 32 * b, b, row % 4, out);
                    }
                }
            }
        }
    }

    struct panel {
        alignas(64) char  ints[key_block / 16][2][tile_bytes]; // pair of blocks
        alignas(64) float scales[key_block][4];                // blocks of the group
    };

    // Two blocks in order of their elements
    template <row_type type> static __m512i unpack_pair(const char * a, const char * b) {
        if (type == row_type::q8_0) {
            return _mm512_inserti64x4(_mm512_castsi256_si512(load_32(a + 2)), load_32(b + 2), 1);
        }
        const __m512i x = _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(load_16(a + 2)), 0xff00, load_16(b + 2));
        const __m512i which = _mm512_setr_epi64(low_nibble, low_nibble, high_nibble, high_nibble, low_nibble, low_nibble,
                                                high_nibble, high_nibble);
        return nibbles(x, which);
    }

    // 16 keys of a group of n_blocks <= 4; absent blocks repeat the last one and meet zeros of Q.
    template <row_type type>
    static void unpack(const char * p, const attention_rows & rows, prefetcher & ahead, int n, int n_blocks, panel & k, int tile) {
        constexpr int bytes = block_bytes(type);
        const int     last  = (n_blocks - 1) * bytes;
        const int     b1    = bytes < last ? bytes : last;
        const int     b2    = 2 * bytes < last ? 2 * bytes : last;
        const int     b3    = 3 * bytes < last ? 3 * bytes : last;
        char *        ints  = k.ints[tile][0];
        float *       scale = k.scales[16 * tile];
        for (int j = 0; j < n; j++, p += rows.row, ints += 64, scale += 4) {
            ahead.step();
            _mm512_store_si512(ints, unpack_pair<type>(p, p + b1));
            _mm512_store_si512(ints + tile_bytes, unpack_pair<type>(p + b2, p + b3));
            _mm_store_ps(scale, _mm_cvtph_ps(four_scales<type>(p, n_blocks, b1, b2, b3)));
        }
    }

    // F16 in the lower 64 bits
    template <row_type type> static __m128i four_scales(const char * p, int n_blocks, int b1, int b2, int b3) {
        if (type == row_type::q4_0 && n_blocks == 4) { // all within the first 64 of 72 bytes
            const __m512i at = _mm512_castsi128_si512(_mm_setr_epi8(0, 1, 18, 19, 36, 37, 54, 55, 0, 0, 0, 0, 0, 0, 0, 0));
            return _mm512_castsi512_si128(_mm512_permutexvar_epi8(at, _mm512_loadu_si512(p)));
        }
        const auto at = [&](int i) {
            uint16_t h;
            std::memcpy(&h, p + i, 2);
            return uint64_t(h);
        };
        return _mm_cvtsi64_si128(int64_t(at(0) | at(b1) << 16 | at(b2) << 32 | at(b3) << 48));
    }

    // Tile registers 4, 5: the quad's right operands
    static void multiply(const panel & k, int tile, tile_sums & sums) {
        _tile_zero(0);
        _tile_loadd(2, k.ints[tile][0], 64);
        _tile_dpbssd(0, 2, 4);
        _tile_zero(1);
        _tile_loadd(2, k.ints[tile][1], 64);
        _tile_dpbssd(1, 2, 5);
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
    }

    // One key: both pairs of blocks, scaled and added; lanes are still to be summed
    static __m512 scaled(const int32_t * first, const int32_t * second, const float * scales, __m512 q0, __m512 q1) {
        const __m512 d  = _mm512_broadcast_f32x4(_mm_load_ps(scales));
        const __m512 d0 = _mm512_permutevar_ps(d, _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1));
        const __m512 d1 = _mm512_permutevar_ps(d, _mm512_setr_epi32(2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3));
        const __m512 s0 = _mm512_cvtepi32_ps(_mm512_load_si512(first));
        const __m512 s1 = _mm512_cvtepi32_ps(_mm512_load_si512(second));
        return _mm512_fmadd_ps(_mm512_mul_ps(d0, q0), s0, _mm512_mul_ps(_mm512_mul_ps(d1, q1), s1));
    }

    // Sums over the four lanes of each: lane i of the result comes from argument i
    static __m512 sum_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
        const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
        return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    }

    // s[row][16 keys] (+)= the scores of 16 keys
    static void finish(const tile_sums & sums, const float (*scales)[4], const quad & queries, bool add, int rows, float * s) {
        const __m512 q0 = _mm512_loadu_ps(queries.scales);
        const __m512 q1 = _mm512_loadu_ps(queries.scales + 16);
        __m512       x[4];
        for (int i = 0; i < 4; i++) { // lane j: key 4 j + i
            __m512 key[4];
            for (int j = 0; j < 4; j++) {
                const int n = 4 * j + i;
                key[j]      = scaled(sums[0] + 16 * n, sums[1] + 16 * n, scales[n], q0, q1);
            }
            x[i] = sum_lanes(key[0], key[1], key[2], key[3]);
        }
        const __m512 t0 = _mm512_unpacklo_ps(x[0], x[1]), t1 = _mm512_unpackhi_ps(x[0], x[1]);
        const __m512 t2 = _mm512_unpacklo_ps(x[2], x[3]), t3 = _mm512_unpackhi_ps(x[2], x[3]);
        const __m512 row[4] = { _mm512_shuffle_ps(t0, t2, 0x44), _mm512_shuffle_ps(t0, t2, 0xee),
                                _mm512_shuffle_ps(t1, t3, 0x44), _mm512_shuffle_ps(t1, t3, 0xee) };
        for (int r = 0; r < rows; r++) {
            float * out = s + r * key_block;
            _mm512_store_ps(out, add ? _mm512_add_ps(_mm512_load_ps(out), row[r]) : row[r]);
        }
    }

    template <row_type type>
    static void score_group(const attention_item & w, int head, const item_memory & m, const key_span & span, int64_t g,
                            float * s) {
        const attention_rows & rows     = span.segment->k;
        prefetcher             ahead(w, rows, span, head, key_block);
        const char *           p        = key_row(rows, span.first, head) + g * 4 * block_bytes(type);
        const int              left     = w.args->d_k / 32 - int(g) * 4;
        const int              n_blocks = left < 4 ? left : 4;
        const int              tiles    = (span.n + 15) / 16;
        panel                  k;
        alignas(64) tile_sums  sums[key_block / 16];
        for (int t = 0; t < tiles; t++) {
            const int n = span.n - 16 * t < 16 ? span.n - 16 * t : 16;
            if (n_blocks == 4) { // twice, so that one of them is compiled for 4
                unpack<type>(p + 16 * t * rows.row, rows, ahead, n, 4, k, t);
            } else {
                unpack<type>(p + 16 * t * rows.row, rows, ahead, n, n_blocks, k, t);
            }
        }
        for (int q = 0; 4 * q < m.rows; q++) {
            const quad queries = quad_of(*w.args, m, q, g);
            _tile_loadd(4, queries.tiles, 64);
            _tile_loadd(5, queries.tiles + tile_bytes, 64);
            for (int t = 0; t < tiles; t++) {
                multiply(k, t, sums[t]);
            }
            for (int t = 0; t < tiles; t++) {
                finish(sums[t], k.scales + 16 * t, queries, g > 0, m.rows - 4 * q < 4 ? m.rows - 4 * q : 4,
                       s + 4 * q * key_block + 16 * t);
            }
        }
    }

    static void run(const attention_item & w, int head, const item_memory & m, const key_span & span, float * s) {
        for (int64_t g = 0; g < groups(w.args->d_k); g++) {
            with_type(span.segment->k.type,
                      [&](auto type) { score_group<decltype(type)::value>(w, head, m, span, g, s); });
        }
    }
};

// V: the weights s[rows][key_block] times a block of rows, added to the item's sums
struct amx_output {
    struct panel {
        alignas(64) char     ints[4][2][tile_bytes];    // block, half: 64 keys by 16 columns
        alignas(64) uint16_t scales[4][key_block];
        alignas(64) float    ratios[4][key_block];      // scale / unit
        float                units[4];
    };

    // The same 16 bytes of 4 keys, the keys of each byte side by side
    static __m512i interleave(const char * p, int64_t row) {
        __m512i x = _mm512_castsi128_si512(load_16(p));
        x         = _mm512_mask_broadcast_i32x4(x, 0x00f0, load_16(p + row));
        x         = _mm512_mask_broadcast_i32x4(x, 0x0f00, load_16(p + 2 * row));
        x         = _mm512_mask_broadcast_i32x4(x, 0xf000, load_16(p + 3 * row));
        alignas(64) static constexpr uint8_t order[64] = {
            0, 16, 32, 48, 1, 17, 33, 49, 2,  18, 34, 50, 3,  19, 35, 51, 4,  20, 36, 52, 5,  21, 37, 53, 6,  22, 38, 54, 7,  23, 39, 55,
            8, 24, 40, 56, 9, 25, 41, 57, 10, 26, 42, 58, 11, 27, 43, 59, 12, 28, 44, 60, 13, 29, 45, 61, 14, 30, 46, 62, 15, 31, 47, 63
        };
        return _mm512_permutexvar_epi8(_mm512_load_si512(order), x);
    }

    // 4 keys, as row `at / 64` of the tiles
    template <row_type type>
    static void unpack_keys(const char * p, int64_t row, int n_blocks, int key, int at, panel & v) {
        constexpr int bytes = block_bytes(type);
        for (int b = 0; b < n_blocks; b++) {
            const __m512i x = interleave(p + b * bytes + 2, row);
            if (type == row_type::q4_0) {
                _mm512_store_si512(v.ints[b][0] + at, nibbles(x, _mm512_set1_epi64(low_nibble)));
                _mm512_store_si512(v.ints[b][1] + at, nibbles(x, _mm512_set1_epi64(high_nibble)));
            } else {
                _mm512_store_si512(v.ints[b][0] + at, x);
                _mm512_store_si512(v.ints[b][1] + at, interleave(p + b * bytes + 18, row));
            }
        }
        __m128i four[4];
        for (int i = 0; i < 4; i++) {
            const int last = (n_blocks - 1) * bytes;
            four[i] = amx_scores::four_scales<type>(p + i * row, n_blocks, bytes < last ? bytes : last,
                                                    2 * bytes < last ? 2 * bytes : last, 3 * bytes < last ? 3 * bytes : last);
        }
        const __m128i ab = _mm_unpacklo_epi16(four[0], four[1]);
        const __m128i cd = _mm_unpacklo_epi16(four[2], four[3]);
        const __m128i lo = _mm_unpacklo_epi32(ab, cd); // 4 keys of block 0, of block 1
        const __m128i hi = _mm_unpackhi_epi32(ab, cd);
        _mm_storel_epi64(reinterpret_cast<__m128i *>(v.scales[0] + key), lo);
        _mm_storeh_pd(reinterpret_cast<double *>(v.scales[1] + key), _mm_castsi128_pd(lo));
        _mm_storel_epi64(reinterpret_cast<__m128i *>(v.scales[2] + key), hi);
        _mm_storeh_pd(reinterpret_cast<double *>(v.scales[3] + key), _mm_castsi128_pd(hi));
    }

    // A row of a tile holds 4 consecutive keys; row 4 l + i has those from 16 i + 4 l on, which is the order in which
    // pack_weights leaves them. Past the last key the last one is repeated: its weight is zero.
    template <row_type type>
    static void unpack(const char * p, const attention_rows & rows, prefetcher & ahead, int n, int n_blocks, panel & v) {
        constexpr int64_t most = 4 * q8_0_bytes;
        for (int j = 0; j < key_block; j += 4) {
            const int at = 64 * (j % 16 + j / 16);
            if (j + 4 <= n) {
                const char * from = p + j * rows.row;
                for (int i = 0; i < 4; i++) {
                    ahead.step();
                }
                unpack_keys<type>(from, rows.row, n_blocks, j, at, v);
                continue;
            }
            char local[4 * most];
            for (int i = 0; i < 4; i++) {
                const int key = j + i < n ? j + i : n - 1;
                std::memcpy(local + i * most, p + key * rows.row, n_blocks * block_bytes(type));
            }
            unpack_keys<type>(local, most, n_blocks, j, at, v);
        }
        for (int b = 0; b < n_blocks; b++) {
            find_unit(v, b);
        }
    }

    // The unit in which weight * scale becomes an integer, when the weight is relative to the largest of its row.
    static void find_unit(panel & v, int b) {
        __m512 d[4];
        __m512 largest = _mm512_setzero_ps();
        for (int i = 0; i < 4; i++) {
            d[i]    = avx512::load_half(v.scales[b] + 16 * i);
            largest = _mm512_max_ps(largest, _mm512_abs_ps(d[i]));
        }
        const float top = _mm512_reduce_max_ps(largest);
        v.units[b]      = top / int16_limit;
        for (int i = 0; i < 4; i++) {
            _mm512_store_ps(v.ratios[b] + 16 * i, _mm512_mul_ps(d[i], _mm512_set1_ps(top > 0.0f ? int16_limit / top : 0.0f)));
        }
    }

    // 64 weights of a row relative to the largest, which is returned
    static float relative_weights(const float * s, __m512 * p) {
        for (int i = 0; i < 4; i++) {
            p[i] = _mm512_load_ps(s + 16 * i);
        }
        const float  top     = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(p[0], p[1]), _mm512_max_ps(p[2], p[3])));
        const __m512 inverse = _mm512_set1_ps(top > 0x1p-100f ? 1.0f / top : 0.0f);
        for (int i = 0; i < 4; i++) {
            p[i] = _mm512_mul_ps(p[i], inverse);
        }
        return top;
    }

    // Times the scales of a block: a row of high bytes, a row of low bytes
    static void pack_weights(const __m512 * p, const float * ratios, char * rows) {
        __m512i n[4];
        for (int i = 0; i < 4; i++) {
            n[i] = _mm512_cvtps_epi32(_mm512_mul_ps(p[i], _mm512_load_ps(ratios + 16 * i)));
        }
        const __m512i half = _mm512_set1_epi16(128);
        const __m512i byte = _mm512_set1_epi16(255);
        const __m512i a    = _mm512_packs_epi32(n[0], n[1]);
        const __m512i b    = _mm512_packs_epi32(n[2], n[3]);
        _mm512_store_si512(rows, _mm512_packs_epi16(_mm512_srai_epi16(_mm512_add_epi16(a, half), 8),
                                                    _mm512_srai_epi16(_mm512_add_epi16(b, half), 8)));
        _mm512_store_si512(rows + 64, _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte)));
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
                const __m512i n    = _mm512_add_epi32(_mm512_slli_epi32(high, 8), _mm512_load_si512(sums[half] + 32 * r + 16));
                const __m512  y    = _mm512_load_ps(acc + 16 * half);
                _mm512_store_ps(acc + 16 * half, _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(n), y));
            }
        }
    }

    // Up to 4 rows
    static void add(const panel & v, int n_blocks, int rows, const float * s, float * acc, int64_t ld) {
        alignas(64) char      left[4][tile_bytes / 2];
        alignas(64) tile_sums sums[4]; // first half of a block, second half
        float                 top[4];
        for (int r = 0; r < rows; r++) {
            __m512 p[4];
            top[r] = relative_weights(s + r * key_block, p);
            for (int b = 0; b < n_blocks; b++) {
                pack_weights(p, v.ratios[b], left[b] + 128 * r);
            }
        }
        for (int b = 0; b < n_blocks; b++) {
            multiply(left[b], v.ints[b][0], v.ints[b][1], sums[b]);
        }
        for (int b = 0; b < n_blocks; b++) {
            finish(sums[b], v.units[b], top, rows, acc + 32 * b, ld);
        }
    }

    static void run(const attention_item & w, int head, const item_memory & m, const key_span & span, float * s) {
        const attention_rows & rows  = span.segment->v;
        prefetcher             ahead(w, rows, span, head, key_block);
        panel                  v;
        for (int r = 0; r < m.rows; r++) {
            for (int64_t j = round_up(span.n, 16); j < key_block; j += 16) {
                _mm512_store_ps(s + r * key_block + j, _mm512_setzero_ps());
            }
        }
        for (int64_t g = 0; 128 * g < w.args->d_v; g++) {
            const int    left     = w.args->d_v / 32 - int(g) * 4;
            const int    n_blocks = left < 4 ? left : 4;
            const char * p        = key_row(rows, span.first, head) + g * 4 * block_bytes(rows.type);
            with_type(rows.type, [&](auto type) {
                if (n_blocks == 4) { // twice, so that one of them is compiled for 4
                    unpack<decltype(type)::value>(p, rows, ahead, span.n, 4, v);
                } else {
                    unpack<decltype(type)::value>(p, rows, ahead, span.n, n_blocks, v);
                }
            });
            for (int row = 0; row < m.rows; row += 4) {
                add(v, n_blocks, m.rows - row < 4 ? m.rows - row : 4, s + row * key_block,
                    m.acc + row * m.d_v_padded + 128 * g, m.d_v_padded);
            }
        }
    }
};

struct amx_decode {
    using base = tile<avx512>;

    static bool fits(const attention_args & a) { return a.d_k <= 256 && a.d_v <= 256; }

    static constexpr unsigned half_tiles = 1u << 3 | 1u << 6 | 1u << 7;

    static void block(const attention_item & w, int head, const item_memory & m, const key_span & span) {
        alignas(64) float s[few_rows * key_block];
        if (is_quantised(span.segment->k.type)) {
            amx_scores::run(w, head, m, span, s);
        } else {
            base::score_rows(w, head, m, span, s);
        }
        for (int row = 0; row < m.rows; row++) {
            base::weigh_row(w, head, m, span, row, s + row * key_block);
        }
        if (is_quantised(span.segment->v.type)) {
            amx_output::run(w, head, m, span, s);
        } else {
            base::add_values(w, head, m, span, s);
        }
    }

    static void run(const attention_item & w) {
        const attention_args & a = *w.args;
        const tile_session     session(half_tiles);
        for (int i = 0; i < w.n_head; i++) {
            const item_memory m(a, w.few, w.n_queries, w.memory, i);
            base::clear(m);
            base::pack_queries(w, w.head0 + i, m);
            if (a.d_k % 32 == 0) {
                amx_scores::pack_queries(a, m);
            }
        }
        for_each_block(w, key_block, [&](const key_span & span) {
            for (int i = 0; i < w.n_head; i++) {
                block(w, w.head0 + i, item_memory(a, w.few, w.n_queries, w.memory, i), span);
            }
        });
    }
};

} // namespace
} // namespace mixedkv
