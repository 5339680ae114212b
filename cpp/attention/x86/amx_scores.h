// Decode on AMX: scores from the integers of q4_0 and q8_0 keys. See amx_decode.h.

#pragma once

#include "amx_integers.h"

namespace mixedkv {
namespace {

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
        const __m512 to_int  = _mm512_set1_ps(largest > 0x1p-100f ? int16_limit / largest : 0.0f);
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

    // From the F32 queries, rows first .. first + 3
    static void pack_quad(const attention_args & a, const item_memory & m, int first) {
        const int64_t d = round_up(a.d_k, 16);
        for (int64_t g = 0; g < groups(a.d_k); g++) {
            const quad out = quad_of(a, m, first / 4, g);
            std::memset(out.tiles, 0, 2 * tile_bytes);
            std::memset(out.scales, 0, 32 * sizeof(float));
            for (int row = first; row < first + 4 && row < m.rows; row++) {
                for (int b = 0; b < 4 && 128 * g + 32 * b < a.d_k; b++) {
                    pack_block(static_cast<const float *>(m.q) + row * d + 128 * g + 32 * b, b, row % 4, out);
                }
            }
        }
    }

    struct panel {
        alignas(64) char ints[key_block / 16][2][tile_bytes]; // pair of blocks
        tile_sums sums[key_block / 16];
        alignas(64) float scales[key_block][4]; // blocks of the group
    };

    // Two blocks in order of their elements; a, b: to their integers
    template <row_type type>
    static __m512i unpack_pair(const char * a, const char * b) {
        if constexpr (!integer_rows<type>::nibbles) {
            return _mm512_inserti64x4(_mm512_castsi256_si512(load_32(a)), load_32(b), 1);
        } else {
            const __m512i x     = _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(load_16(a)), 0xff00, load_16(b));
            const __m512i which = _mm512_setr_epi64(low_nibble, low_nibble, high_nibble, high_nibble, low_nibble,
                                                    low_nibble, high_nibble, high_nibble);
            return values_of<type>(x, which);
        }
    }

    // 16 keys of a group of n_blocks <= 2 * pairs; absent blocks repeat the last one and meet zeros of Q.
    template <row_type type, int pairs>
    static void unpack(const char * p, const attention_rows & rows, prefetcher & ahead, int n, int n_blocks, panel & k,
                       int tile) {
        const auto at    = [&](int b) { return integers_at(type, b < n_blocks ? b : n_blocks - 1); };
        char *     ints  = k.ints[tile][0];
        float *    scale = k.scales[16 * tile];
        for (int j = 0; j < n; j++, p += rows.row, ints += 64, scale += 4) {
            ahead.step(j % 3 == 0);
            _mm512_store_si512(ints, unpack_pair<type>(p + at(0), p + at(1)));
            if (pairs == 2) {
                _mm512_store_si512(ints + tile_bytes, unpack_pair<type>(p + at(2), p + at(3)));
            }
            _mm_store_ps(scale,
                         _mm_cvtph_ps(pairs == 2 ? four_scales<type>(p, n_blocks) : two_scales<type>(p, n_blocks)));
        }
    }

    // Tile registers 4, 5: the quad's right operands
    template <int pairs>
    static void multiply(panel & k, int tile) {
        tile_sums & sums = k.sums[tile];
        _tile_zero(0);
        _tile_loadd(2, k.ints[tile][0], 64);
        _tile_dpbssd(0, 2, 4);
        if (pairs == 2) {
            _tile_zero(1);
            _tile_loadd(2, k.ints[tile][1], 64);
            _tile_dpbssd(1, 2, 5);
        }
        _tile_stored(0, sums[0], 64);
        if (pairs == 2) {
            _tile_stored(1, sums[1], 64);
        }
    }

    // One key: the pairs of blocks, scaled and added; lanes are still to be summed
    template <int pairs>
    static __m512 scaled(const int32_t * first, const int32_t * second, const float * scales, __m512 q0, __m512 q1) {
        const __m512 d  = _mm512_broadcast_f32x4(_mm_load_ps(scales));
        const __m512 d0 = _mm512_permutevar_ps(d, _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1));
        const __m512 s0 = _mm512_cvtepi32_ps(_mm512_load_si512(first));
        if (pairs == 1) {
            return _mm512_mul_ps(_mm512_mul_ps(d0, q0), s0);
        }
        const __m512 d1 = _mm512_permutevar_ps(d, _mm512_setr_epi32(2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3));
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
    template <int pairs>
    static void finish(const tile_sums & sums, const float (*scales)[4], const quad & queries, bool add, int rows,
                       float * s) {
        const __m512 q0 = _mm512_loadu_ps(queries.scales);
        const __m512 q1 = _mm512_loadu_ps(queries.scales + 16);
        __m512       x[4];
        for (int i = 0; i < 4; i++) { // lane j: key 4 j + i
            __m512 key[4];
            for (int j = 0; j < 4; j++) {
                const int n = 4 * j + i;
                key[j]      = scaled<pairs>(sums[0] + 16 * n, sums[1] + 16 * n, scales[n], q0, q1);
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

    template <row_type type, int pairs>
    static void score_group(const attention_item & w, int head, const item_memory & m, const key_span & span, int64_t g,
                            int n_blocks, prefetcher & ahead, float * s) {
        const attention_rows & rows  = span.segment->k;
        const char *           p     = key_row(rows, span.first, head) + scale_at(type, int(4 * g));
        const int              tiles = (span.n + 15) / 16;
        panel                  k;
        for (int t = 0; t < tiles; t++) {
            const int n = span.n - 16 * t < 16 ? span.n - 16 * t : 16;
            if (n_blocks == 2 * pairs) { // twice, so that one of them is compiled for it
                unpack<type, pairs>(p + 16 * t * rows.row, rows, ahead, n, 2 * pairs, k, t);
            } else {
                unpack<type, pairs>(p + 16 * t * rows.row, rows, ahead, n, n_blocks, k, t);
            }
        }
        for (int q = 0; 4 * q < m.rows; q++) {
            if (!any_visible(w, span, 4 * q, 4)) {
                continue;
            }
            const quad queries = quad_of(*w.args, m, q, g);
            _tile_loadd(4, queries.tiles, 64);
            if (pairs == 2) {
                _tile_loadd(5, queries.tiles + tile_bytes, 64);
            }
            for (int t = 0; t < tiles; t++) {
                multiply<pairs>(k, t);
                ahead.step(3);
            }
            for (int t = 0; t < tiles; t++) {
                ahead.step(5);
                finish<pairs>(k.sums[t], k.scales + 16 * t, queries, g > 0, m.rows - 4 * q < 4 ? m.rows - 4 * q : 4,
                              s + 4 * q * key_block + 16 * t);
            }
        }
    }

    static void run(const attention_item & w, int head, const item_memory & m, const key_span & span,
                    prefetcher & ahead, float * s) {
        for (int64_t g = 0; g < groups(w.args->d_k); g++) {
            const int left = w.args->d_k / 32 - int(g) * 4;
            with_integers(span.segment->k.type, [&](auto type) {
                if (left > 2) {
                    score_group<decltype(type)::value, 2>(w, head, m, span, g, left < 4 ? left : 4, ahead, s);
                } else {
                    score_group<decltype(type)::value, 1>(w, head, m, span, g, left, ahead, s);
                }
            });
        }
    }
};

} // namespace
} // namespace mixedkv
