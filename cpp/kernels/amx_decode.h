// Decode on AMX over q4_0 and q8_0 rows: their integers are multiplied as they are, Q and the weights as 16-bit integers
// in two signed bytes (high * 256 + low). Sums are exact in 32 bits; scales are applied to them in F32.
//
// Scores: K is the left operand, 16 keys by 64 bytes. A block's scale differs from key to key, so the four blocks of
// 128 elements get their own columns of the right operand (column = 4 * block + row, zero outside of the block).
// Output: the weights times the scales of V are the left operand, so each block of V has its own.

#pragma once

#include "amx_tiles.h"
#include "tile.h"

namespace mixedkv {
namespace {

constexpr int   lane_blocks = 4;      // blocks of 32 elements per 512-bit register
constexpr float int16_limit = 32512;  // 127 * 256: both bytes stay within [-128, 127]

inline bool is_quantised(row_type t) {
    return t == row_type::q8_0 || t == row_type::q4_0;
}

inline int block_bytes(row_type t) {
    return t == row_type::q8_0 ? q8_0_bytes : q4_0_bytes;
}

// 16 bytes from each of 4 places
inline __m512i load_lanes(const char * a, const char * b, const char * c, const char * d) {
    const auto at = [](const char * p) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p)); };
    __m512i    x  = _mm512_castsi128_si512(at(a));
    x             = _mm512_mask_broadcast_i32x4(x, 0x00f0, at(b));
    x             = _mm512_mask_broadcast_i32x4(x, 0x0f00, at(c));
    return _mm512_mask_broadcast_i32x4(x, 0xf000, at(d));
}

// Nibble n of each byte to the signed byte n - 8: bits 0..2 stay, bits 3..7 become the inverse of bit 3.
// Byte 7 - i of the matrix selects the source of bit i.
inline __m512i low_nibbles(__m512i x) {
    return _mm512_gf2p8affine_epi64_epi8(x, _mm512_set1_epi64(0x0102040808080808), 0xf8);
}
inline __m512i high_nibbles(__m512i x) {
    return _mm512_gf2p8affine_epi64_epi8(x, _mm512_set1_epi64(0x1020408080808080), 0xf8);
}

struct amx_decode {
    using base = tile<avx512>;

    static int64_t groups(int64_t d) { return (d + 127) / 128; } // of 4 blocks

    // The packed queries: F32 rows for segments of other types, then for each quad of rows and group of blocks 4 tiles
    // (first half high, low; second half high, low) and 16 scales.
    struct quad {
        char *  tiles;
        float * scales;
    };
    static quad quad_of(const attention_args & a, const item_memory & m, int q, int64_t g) {
        const int64_t d128 = round_up(a.d_k, 128);
        char *        p    = static_cast<char *>(m.q) + m.rows_padded * d128 * 4;
        char *        s    = p + m.rows_padded / 4 * groups(a.d_k) * 4 * tile_bytes;
        const int64_t i    = q * groups(a.d_k) + g;
        return { p + i * 4 * tile_bytes, reinterpret_cast<float *>(s) + i * 16 };
    }

    static void pack_block(const float * x, int block, int row, const quad & out) {
        float largest = 0.0f;
        for (int i = 0; i < 32; i++) {
            largest = std::fabs(x[i]) > largest ? std::fabs(x[i]) : largest;
        }
        const float to_int               = largest > 0.0f ? int16_limit / largest : 0.0f;
        out.scales[4 * block + row] = largest / int16_limit;
        for (int i = 0; i < 32; i++) {
            const int n    = int(std::lrint(x[i] * to_int));
            const int high = (n + 128) >> 8;
            char *    at   = out.tiles + i / 16 * 2 * tile_bytes + (4 * block + i % 16 / 4) * 64 + (4 * block + row) * 4;
            at[i % 4]              = char(high);
            at[tile_bytes + i % 4] = char(n - 256 * high);
        }
    }

    // After base::pack_queries
    static void pack_queries(const attention_args & a, const item_memory & m) {
        const int64_t d = round_up(a.d_k, 16);
        for (int q = 0; 4 * q < m.rows; q++) {
            for (int64_t g = 0; g < groups(a.d_k); g++) {
                const quad out = quad_of(a, m, q, g);
                std::memset(out.tiles, 0, 4 * tile_bytes);
                std::memset(out.scales, 0, 16 * sizeof(float));
                for (int row = 4 * q; row < 4 * q + 4 && row < m.rows; row++) {
                    for (int b = 0; b < lane_blocks && 128 * g + 32 * b < a.d_k; b++) {
                        pack_block(static_cast<const float *>(m.q) + row * d + 128 * g + 32 * b, b, row % 4, out);
                    }
                }
            }
        }
    }

    // Scales of 4 blocks of a row, zero past its end
    static void copy_scales(const char * p, int bytes, int n_blocks, uint16_t * out, int stride) {
        for (int b = 0; b < lane_blocks; b++) {
            if (b < n_blocks) {
                std::memcpy(out + b * stride, p + b * bytes, 2);
            } else {
                out[b * stride] = 0;
            }
        }
    }

    // Integers of 128 elements of one key: first halves of 4 blocks, second halves. Absent blocks meet zeros of Q.
    static void unpack_key(const char * p, row_type type, int n_blocks, char * first, char * second) {
        const int    bytes = block_bytes(type);
        const char * last  = p + (n_blocks - 1) * bytes + 2;
        const char * at[lane_blocks];
        for (int b = 0; b < lane_blocks; b++) {
            at[b] = b < n_blocks ? p + b * bytes + 2 : last;
        }
        const __m512i x = load_lanes(at[0], at[1], at[2], at[3]);
        if (type == row_type::q4_0) {
            _mm512_store_si512(first, low_nibbles(x));
            _mm512_store_si512(second, high_nibbles(x));
        } else {
            _mm512_store_si512(first, x);
            _mm512_store_si512(second, load_lanes(at[0] + 16, at[1] + 16, at[2] + 16, at[3] + 16));
        }
    }

    struct key_panel {
        alignas(64) char     ints[key_block / 16][2][tile_bytes];
        alignas(64) uint16_t scales[key_block][lane_blocks];
    };

    static void unpack_keys(const key_span & span, int head, int64_t g, int n_blocks, key_panel & k) {
        const attention_rows & rows  = span.segment->k;
        const int              bytes = block_bytes(rows.type);
        for (int j = 0; j < span.n; j++) {
            const char * p = key_row(rows, span.first + j, head) + g * lane_blocks * bytes;
            unpack_key(p, rows.type, n_blocks, k.ints[j / 16][0] + j % 16 * 64, k.ints[j / 16][1] + j % 16 * 64);
            copy_scales(p, bytes, n_blocks, k.scales[j], 1);
        }
    }

    // (high * 256 + low) times the scales of K and Q; one key, 4 blocks by 4 rows
    static __m512 scaled_key(const int32_t * high, const int32_t * low, const uint16_t * scales, __m512 q_scales) {
        const __m512i n = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(high), 8), _mm512_load_si512(low));
        int64_t       four;
        std::memcpy(&four, scales, 8);
        const __m256i each = _mm256_permutexvar_epi16(
            _mm256_setr_epi16(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), _mm256_set1_epi64x(four));
        return _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtph_ps(each), q_scales), _mm512_cvtepi32_ps(n));
    }

    // Sums over the four lanes (blocks) of each: lane i of the result comes from x_i
    static __m512 sum_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
        const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
        return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    }

    // s[row][16 keys] (+)= the scores of 16 keys
    static void finish_scores(const int32_t * high, const int32_t * low, const uint16_t (*scales)[lane_blocks],
                              __m512 q_scales, bool add, int rows, float * s) {
        __m512 x[4];
        for (int i = 0; i < 4; i++) { // lane j: key 4 j + i
            __m512 key[4];
            for (int j = 0; j < 4; j++) {
                key[j] = scaled_key(high + 16 * (4 * j + i), low + 16 * (4 * j + i), scales[4 * j + i], q_scales);
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

    static void score(const attention_item & w, int head, const item_memory & m, const key_span & span, float * s) {
        const attention_args & a = *w.args;
        key_panel              k;
        alignas(64) int32_t    sums[2][tile_bytes / 4];
        for (int64_t g = 0; g < groups(a.d_k); g++) {
            const int64_t left = a.d_k / 32 - g * lane_blocks;
            unpack_keys(span, head, g, int(left < lane_blocks ? left : lane_blocks), k);
            for (int q = 0; 4 * q < m.rows; q++) {
                const quad   queries  = quad_of(a, m, q, g);
                const __m512 q_scales = _mm512_loadu_ps(queries.scales);
                _tile_loadd(4, queries.tiles, 64);
                _tile_loadd(5, queries.tiles + tile_bytes, 64);
                _tile_loadd(6, queries.tiles + 2 * tile_bytes, 64);
                _tile_loadd(7, queries.tiles + 3 * tile_bytes, 64);
                for (int j = 0; j < span.n; j += 16) {
                    _tile_zero(0);
                    _tile_zero(1);
                    _tile_loadd(2, k.ints[j / 16][0], 64);
                    _tile_dpbssd(0, 2, 4);
                    _tile_dpbssd(1, 2, 5);
                    _tile_loadd(3, k.ints[j / 16][1], 64);
                    _tile_dpbssd(0, 3, 6);
                    _tile_dpbssd(1, 3, 7);
                    _tile_stored(0, sums[0], 64);
                    _tile_stored(1, sums[1], 64);
                    finish_scores(sums[0], sums[1], k.scales + j, q_scales, g > 0, m.rows - 4 * q < 4 ? m.rows - 4 * q : 4,
                                  s + 4 * q * key_block + j);
                }
            }
        }
    }

    struct value_panel {
        alignas(64) char     ints[lane_blocks][2][tile_bytes]; // block, half: 64 keys by 16 columns
        alignas(64) uint16_t scales[lane_blocks][key_block];
        alignas(64) float    ratios[lane_blocks][key_block]; // scale / unit
        float                units[lane_blocks];
    };

    // A row of a tile holds 4 consecutive keys; row 4 l + i has those from 16 i + 4 l on, which is the order in which
    // pack_weights leaves them.
    static void unpack_values(const key_span & span, int head, int64_t g, int n_blocks, value_panel & v) {
        const attention_rows & rows  = span.segment->v;
        const int              bytes = block_bytes(rows.type);
        alignas(64) static constexpr uint8_t by_key[64] = {
            0, 16, 32, 48, 1, 17, 33, 49, 2,  18, 34, 50, 3,  19, 35, 51, 4,  20, 36, 52, 5,  21, 37, 53, 6,  22, 38, 54, 7,  23, 39, 55,
            8, 24, 40, 56, 9, 25, 41, 57, 10, 26, 42, 58, 11, 27, 43, 59, 12, 28, 44, 60, 13, 29, 45, 61, 14, 30, 46, 62, 15, 31, 47, 63
        };
        const __m512i order = _mm512_load_si512(by_key);
        for (int j = 0; j < key_block; j += 4) {
            const char * p[4];
            for (int i = 0; i < 4; i++) { // past the last key, repeat it: its weight is zero
                const int key = j + i < span.n ? j + i : span.n - 1;
                p[i]          = key_row(rows, span.first + key, head) + g * lane_blocks * bytes;
                copy_scales(p[i], bytes, n_blocks, &v.scales[0][j + i], key_block);
            }
            const int row = 64 * (j % 16 + j / 16);
            for (int b = 0; b < n_blocks; b++) {
                const int     at = b * bytes + 2;
                const __m512i x  = _mm512_permutexvar_epi8(order, load_lanes(p[0] + at, p[1] + at, p[2] + at, p[3] + at));
                if (rows.type == row_type::q4_0) {
                    _mm512_store_si512(v.ints[b][0] + row, low_nibbles(x));
                    _mm512_store_si512(v.ints[b][1] + row, high_nibbles(x));
                } else {
                    const int next = at + 16;
                    _mm512_store_si512(v.ints[b][0] + row, x);
                    _mm512_store_si512(v.ints[b][1] + row,
                                       _mm512_permutexvar_epi8(order, load_lanes(p[0] + next, p[1] + next, p[2] + next,
                                                                                 p[3] + next)));
                }
            }
        }
        for (int b = 0; b < n_blocks; b++) {
            find_unit(v, b);
        }
    }

    // The unit in which weight * scale becomes an integer, when the weight is relative to the largest of its row.
    static void find_unit(value_panel & v, int b) {
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

    // 64 weights of a row, relative to its largest, times the scales of a block: high bytes, low bytes
    static void pack_weights(const __m512 * p, const float * ratios, char * high, char * low) {
        __m512i n[4];
        for (int i = 0; i < 4; i++) {
            n[i] = _mm512_cvtps_epi32(_mm512_mul_ps(p[i], _mm512_load_ps(ratios + 16 * i)));
        }
        const __m512i half = _mm512_set1_epi16(128);
        const __m512i byte = _mm512_set1_epi16(255);
        const __m512i a    = _mm512_packs_epi32(n[0], n[1]);
        const __m512i b    = _mm512_packs_epi32(n[2], n[3]);
        _mm512_store_si512(high, _mm512_packs_epi16(_mm512_srai_epi16(_mm512_add_epi16(a, half), 8),
                                                    _mm512_srai_epi16(_mm512_add_epi16(b, half), 8)));
        _mm512_store_si512(low, _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte)));
    }

    // acc += s v for up to 8 rows; rows 0..7 of the left tiles hold high bytes, 8..15 low bytes
    static void accumulate(const value_panel & v, int n_blocks, int rows, const float * s, float * acc, int64_t ld) {
        alignas(64) char    left[lane_blocks][tile_bytes];
        alignas(64) int32_t sums[2][tile_bytes / 4];
        float               top[8];
        for (int r = 0; r < rows; r++) {
            __m512 p[4];
            for (int i = 0; i < 4; i++) {
                p[i] = _mm512_load_ps(s + r * key_block + 16 * i);
            }
            top[r] = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(p[0], p[1]), _mm512_max_ps(p[2], p[3])));
            const __m512 inverse = _mm512_set1_ps(top[r] > 0x1p-100f ? 1.0f / top[r] : 0.0f);
            for (int i = 0; i < 4; i++) {
                p[i] = _mm512_mul_ps(p[i], inverse);
            }
            for (int b = 0; b < n_blocks; b++) {
                pack_weights(p, v.ratios[b], left[b] + 64 * r, left[b] + 64 * (8 + r));
            }
        }
        for (int b = 0; b < n_blocks; b++) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_loadd(2, left[b], 64);
            _tile_loadd(4, v.ints[b][0], 64);
            _tile_dpbssd(0, 2, 4);
            _tile_loadd(5, v.ints[b][1], 64);
            _tile_dpbssd(1, 2, 5);
            _tile_stored(0, sums[0], 64);
            _tile_stored(1, sums[1], 64);
            for (int r = 0; r < rows; r++) {
                const __m512 unit = _mm512_set1_ps(v.units[b] * top[r]);
                for (int half = 0; half < 2; half++) {
                    const __m512i n = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(sums[half] + 16 * r), 8),
                                                       _mm512_load_si512(sums[half] + 16 * (8 + r)));
                    float *       y = acc + r * ld + 32 * b + 16 * half;
                    _mm512_store_ps(y, _mm512_fmadd_ps(unit, _mm512_cvtepi32_ps(n), _mm512_load_ps(y)));
                }
            }
        }
    }

    static void add_values(const attention_item & w, int head, const item_memory & m, const key_span & span, float * s) {
        const attention_args & a = *w.args;
        value_panel            v;
        for (int r = 0; r < m.rows; r++) {
            for (int64_t j = round_up(span.n, 16); j < key_block; j += 16) {
                _mm512_store_ps(s + r * key_block + j, _mm512_setzero_ps());
            }
        }
        for (int64_t g = 0; g < groups(a.d_v); g++) {
            const int64_t left     = a.d_v / 32 - g * lane_blocks;
            const int     n_blocks = int(left < lane_blocks ? left : lane_blocks);
            unpack_values(span, head, g, n_blocks, v);
            for (int row = 0; row < m.rows; row += 8) {
                accumulate(v, n_blocks, m.rows - row < 8 ? m.rows - row : 8, s + row * key_block,
                           m.acc + row * m.d_v_padded + 128 * g, m.d_v_padded);
            }
        }
    }

    static void block(const attention_item & w, int head, const item_memory & m, const key_span & span) {
        alignas(64) float s[few_rows * key_block];
        if (is_quantised(span.segment->k.type)) {
            score(w, head, m, span, s);
        } else {
            base::score_rows(w, head, m, span, s);
        }
        for (int row = 0; row < m.rows; row++) {
            base::weigh_row(w, head, m, span, row, s + row * key_block);
        }
        if (is_quantised(span.segment->v.type)) {
            add_values(w, head, m, span, s);
        } else {
            base::add_values(w, head, m, span, s);
        }
    }

    static bool fits(const attention_args & a) { return a.d_k <= 256 && a.d_v <= 256; }

    static void run(const attention_item & w) {
        const attention_args & a = *w.args;
        const tile_session     session;
        for (int i = 0; i < w.n_head; i++) {
            const item_memory m(a, w.few, w.n_queries, w.memory, i);
            base::clear(m);
            base::pack_queries(w, w.head0 + i, m);
            if (a.d_k % 32 == 0) {
                pack_queries(a, m);
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
