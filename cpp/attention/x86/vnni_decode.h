// Decode on AVX-512 VNNI over rows of a scale and integers (integers.h): their integers are multiplied as they are,
// with Q and the weights as 16-bit integers. Sums are exact in 32 bits; scales are applied to them in F32.
//
// Scores: 16 keys are turned so that each is a column of dwords (4 elements). Bytes are multiplied unsigned by signed:
// K gets an offset, whose share of the sum is known from Q alone, and Q comes in two signed bytes (high * 256 + low).
// Output: pairs of keys share a dword, as do their weights times the scales of V, by 16-bit products.

#pragma once

#include "integers.h"

namespace mixedkv {
namespace {

struct vnni_decode {
    using base = tile<avx512>;

    static constexpr int max_row_bytes = 256 / 32 * most_block_bytes;

    // Four rows of Q, one block of 32 elements
    struct quad {
        int32_t ints[8][4][2]; // 4 elements, row, high and low bytes
        int32_t sum[4];        // of the integers
        float   scale[4];
    };

    // Behind the F32 queries that other types need
    static quad * quads(const attention_args & a, const item_memory & m) {
        return reinterpret_cast<quad *>(static_cast<char *>(m.q) + m.rows_padded * round_up(a.d_k, 128) * 4);
    }

    static void pack_block(const float * q, int row, quad & out) {
        const __m512 half[2] = { _mm512_loadu_ps(q), _mm512_loadu_ps(q + 16) };
        const float  largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(half[0]), _mm512_abs_ps(half[1])));
        const __m512 to_int  = _mm512_set1_ps(largest > 0.0f ? int16_limit / largest : 0.0f);
        out.scale[row]       = largest / int16_limit;
        out.sum[row]         = 0;
        for (int i = 0; i < 2; i++) {
            alignas(16) int32_t high[4], low[4];
            const __m512        x = _mm512_mul_ps(half[i], to_int);
            const __m512i       n = _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), x); // else INT_MIN
            const __m512i       h = _mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(128)), 8);
            _mm_store_si128(reinterpret_cast<__m128i *>(high), _mm512_cvtepi32_epi8(h));
            _mm_store_si128(reinterpret_cast<__m128i *>(low), _mm512_cvtepi32_epi8(n));
            for (int j = 0; j < 4; j++) {
                out.ints[4 * i + j][row][0] = high[j];
                out.ints[4 * i + j][row][1] = low[j];
            }
            out.sum[row] += _mm512_reduce_add_epi32(n);
        }
    }

    // From the F32 queries, rows first .. first + 3, which are padded with zeros
    static void pack_quad(const attention_args & a, const item_memory & m, int first) {
        const int64_t d   = round_up(a.d_k, 16);
        quad *        out = quads(a, m) + first / 4 * (a.d_k / 32);
        for (int b = 0; 32 * b < a.d_k; b++, out++) {
            for (int r = 0; r < 4; r++) {
                pack_block(static_cast<const float *>(m.q) + (first + r) * d + 32 * b, r, *out);
            }
        }
    }

    // Elements 4 i .. 4 i + 3 of a block of 16 keys, plus the offset, as unsigned bytes in x[i]
    template <row_type type>
    static void columns(const char * p, int64_t row, __m512i * x) {
        using rows = integer_rows<type>;
        for (int part = 0; part < (rows::nibbles ? 1 : 2); part++) {
            __m512i r[4]; // keys i, 4 + i, 8 + i, 12 + i
            for (int i = 0; i < 4; i++) {
                r[i] = load_lanes(p + i * row + 2 + 16 * part, 4 * row);
            }
            const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
            const __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
            const __m512i t[4] = { _mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c),
                                   _mm512_unpacklo_epi64(b, d), _mm512_unpackhi_epi64(b, d) };
            for (int i = 0; i < 4; i++) {
                if constexpr (rows::nibbles) {
                    const __m512i nibble = _mm512_set1_epi8(15);
                    x[i]                 = _mm512_and_si512(t[i], nibble);
                    x[i + 4]             = _mm512_and_si512(_mm512_srli_epi16(t[i], 4), nibble);
                    if constexpr (!rows::even) {
                        const __m512i values = in_lanes(rows::at, rows::offset);
                        x[i]                 = _mm512_shuffle_epi8(values, x[i]);
                        x[i + 4]             = _mm512_shuffle_epi8(values, x[i + 4]);
                    }
                } else {
                    x[4 * part + i] = _mm512_xor_si512(t[i], _mm512_set1_epi8(-128));
                }
            }
        }
    }

    // s[row][16 keys] += the scores of one block of elements
    template <row_type type>
    static void score_block(const __m512i * x, __m512 scales, const quad & q, int rows, float * s) {
        __m512i high[4], low[4];
        for (int r = 0; r < 4; r++) {
            high[r] = _mm512_setzero_si512();
            low[r]  = _mm512_set1_epi32(-integer_rows<type>::offset * q.sum[r]);
        }
        for (int i = 0; i < 8; i++) {
            for (int r = 0; r < 4; r++) {
                high[r] = _mm512_dpbusd_epi32(high[r], x[i], _mm512_set1_epi32(q.ints[i][r][0]));
                low[r]  = _mm512_dpbusd_epi32(low[r], x[i], _mm512_set1_epi32(q.ints[i][r][1]));
            }
        }
        for (int r = 0; r < rows; r++, s += key_block) {
            const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[r], 8), low[r]));
            const __m512 by  = _mm512_mul_ps(scales, _mm512_set1_ps(q.scale[r]));
            _mm512_store_ps(s, _mm512_fmadd_ps(by, sum, _mm512_load_ps(s)));
        }
    }

    // 16 rows of `bytes` from p on, n of them there: past the last one it is repeated, in `local`
    static const char * sixteen(const char * p, int64_t & row, int n, int bytes, char * local) {
        if (n >= 16) {
            return p;
        }
        for (int i = 0; i < 16; i++) {
            std::memcpy(local + i * max_row_bytes, p + (i < n ? i : n - 1) * row, bytes);
        }
        row = max_row_bytes;
        return local;
    }

    template <row_type type>
    static void score_keys(const attention_item & w, int head, const item_memory & m, const key_span & span,
                           prefetcher & ahead, float * s) {
        constexpr int          bytes    = block_bytes(type);
        const attention_rows & rows     = span.segment->k;
        const int              n_blocks = w.args->d_k / 32;
        char                   local[16 * max_row_bytes];
        key_scales             scales;
        __m512i                x[8];
        for (int j = 0; j < span.n; j += 16) {
            int64_t      row = rows.row;
            const char * p   = sixteen(key_row(rows, span.first + j, head), row, span.n - j, n_blocks * bytes, local);
            for (int r = 0; r < m.rows; r++) {
                _mm512_store_ps(s + r * key_block + j, _mm512_setzero_ps());
            }
            for (int b = 0; b < n_blocks; b++) {
                for (int i = 0; b % 4 == 0 && i < 16; i += 4) {
                    const int left = n_blocks - b;
                    scales.load<type>(p + i * row + b * bytes, row, left < 4 ? left : 4, i);
                }
                columns<type>(p + b * bytes, row, x);
                const __m512 d = avx512::load_half(scales.half[b % 4]);
                for (int q = 0; 4 * q < m.rows; q++) {
                    ahead.step(4);
                    if (!any_visible(w, span, 4 * q, 4)) {
                        continue;
                    }
                    score_block<type>(x, d, quads(*w.args, m)[q * n_blocks + b],
                                      m.rows - 4 * q < 4 ? m.rows - 4 * q : 4, s + 4 * q * key_block + j);
                }
            }
        }
    }

    // The first of the pair of keys whose weights weight_unit::apply leaves in dword i
    static constexpr int first_key(int i) { return i / 16 * 32 + i % 4 / 2 * 16 + i % 16 / 4 * 4 + i % 2 * 2; }

    // Elements 0..15 and 16..31 of a block of two keys, as 16-bit integers side by side
    template <row_type type>
    static void pair(const char * p, int64_t row, __m512i & first, __m512i & second) {
        using rows = integer_rows<type>;
        if constexpr (rows::nibbles) {
            const __m256i values = _mm256_cvtepi8_epi16(load_16(reinterpret_cast<const char *>(rows::at)));
            const __m512i table  = _mm512_broadcast_i64x4(values); // bit 4 of an index does nothing
            const __m512i a      = _mm512_cvtepu8_epi32(load_16(p + 2));
            const __m512i b      = _mm512_cvtepu8_epi32(load_16(p + row + 2));
            const __m512i x      = _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
            first                = _mm512_permutexvar_epi16(x, table);
            second               = _mm512_permutexvar_epi16(_mm512_srli_epi16(x, 4), table);
            return;
        }
        const auto both = [&](int i) {
            const __m512i a = _mm512_cvtepi8_epi32(load_16(p + i));
            const __m512i b = _mm512_cvtepi8_epi32(load_16(p + row + i));
            return _mm512_mask_blend_epi16(0xaaaaaaaa, a, _mm512_slli_epi32(b, 16));
        };
        first  = both(2);
        second = both(18);
    }

    // acc[R][32] += weights times one block of elements of n keys; ints[r]: pairs of weights
    template <row_type type, int R>
    static void add_block(const char * p, int64_t row, int n, prefetcher & ahead, const int32_t (*ints)[32],
                          const float * scales, float * acc, int64_t ld) {
        __m512i sum[R][2];
        for (int r = 0; r < R; r++) {
            sum[r][0] = sum[r][1] = _mm512_setzero_si512();
        }
        for (int i = 0; i < 32; i++) {
            const int key = first_key(i);
            if (key >= n) {
                continue;
            }
            ahead.step(i & 1);
            __m512i first, second;
            pair<type>(p + key * row, key + 1 < n ? row : 0, first, second); // the weight of a key past the last is 0
            for (int r = 0; r < R; r++) {
                const __m512i weights = _mm512_set1_epi32(ints[r][i]);
                sum[r][0]             = _mm512_dpwssd_epi32(sum[r][0], first, weights);
                sum[r][1]             = _mm512_dpwssd_epi32(sum[r][1], second, weights);
            }
        }
        for (int r = 0; r < R; r++, acc += ld) {
            for (int half = 0; half < 2; half++) {
                float * y = acc + 16 * half;
                _mm512_store_ps(
                    y, _mm512_fmadd_ps(_mm512_set1_ps(scales[r]), _mm512_cvtepi32_ps(sum[r][half]), _mm512_load_ps(y)));
            }
        }
    }

    // R rows of weights s against up to 4 blocks of n keys
    template <row_type type, int R>
    static void add_rows(const char * p, int64_t row, int n, int n_blocks, prefetcher & ahead,
                         const weight_unit * units, const float * s, float * acc, int64_t ld) {
        alignas(64) int32_t ints[4][R][32];
        float               top[R];
        for (int r = 0; r < R; r++) {
            __m512 weights[4];
            top[r] = relative_weights(s + r * key_block, weights);
            for (int b = 0; b < n_blocks; b++) {
                __m512i first, second;
                units[b].apply(weights, first, second);
                _mm512_store_si512(ints[b][r], first);
                _mm512_store_si512(ints[b][r] + 16, second);
            }
        }
        for (int b = 0; b < n_blocks; b++) {
            float scales[R];
            for (int r = 0; r < R; r++) {
                scales[r] = top[r] * units[b].unit;
            }
            add_block<type, R>(p + b * block_bytes(type), row, n, ahead, ints[b], scales, acc + 32 * b, ld);
        }
    }

    // Up to 4 rows
    template <row_type type>
    static void add_quad(const char * p, int64_t row, int n, int n_blocks, const key_scales & scales,
                         prefetcher & ahead, int rows, const float * weights, float * acc, int64_t ld) {
        const uint64_t used = used_keys(weights, rows);
        if (!used) {
            return;
        }
        weight_unit units[4];
        bool        extreme = false;
        for (int b = 0; b < n_blocks; b++) {
            units[b].find(scales.half[b], used);
            extreme |= units[b].is_extreme();
        }
        if (extreme && rows > 1) {
            for (int r = 0; r < rows; r++) {
                add_quad<type>(p, row, n, n_blocks, scales, ahead, 1, weights + r * key_block, acc + r * ld, ld);
            }
            return;
        }
        switch (rows) {
        case 1:
            add_rows<type, 1>(p, row, n, n_blocks, ahead, units, weights, acc, ld);
            break;
        case 2:
            add_rows<type, 2>(p, row, n, n_blocks, ahead, units, weights, acc, ld);
            break;
        case 3:
            add_rows<type, 3>(p, row, n, n_blocks, ahead, units, weights, acc, ld);
            break;
        default:
            add_rows<type, 4>(p, row, n, n_blocks, ahead, units, weights, acc, ld);
        }
    }

    template <row_type type>
    static void add_values(const attention_item & w, int head, const item_memory & m, const key_span & span,
                           prefetcher & ahead, float * s) {
        const attention_rows & rows = span.segment->v;
        key_scales             scales;
        clear_rest(m, span.n, s);
        for (int g = 0; 128 * g < w.args->d_v; g++) {
            const int    left     = w.args->d_v / 32 - g * 4;
            const int    n_blocks = left < 4 ? left : 4;
            const char * p        = key_row(rows, span.first, head) + g * 4 * block_bytes(type);
            scales.load_all<type>(p, rows.row, span.n, n_blocks);
            for (int row = 0; row < m.rows; row += 4) {
                add_quad<type>(p, rows.row, span.n, n_blocks, scales, ahead, m.rows - row < 4 ? m.rows - row : 4,
                               s + row * key_block, m.acc + row * m.d_v_padded + 128 * g, m.d_v_padded);
            }
        }
    }

    static void block(const attention_item & w, int head, const item_memory & m, const key_span & span) {
        alignas(64) float s[few_rows * key_block];
        prefetcher        keys(w, span.segment->k, span, head, key_block);
        prefetcher        values(w, span.segment->v, span, head, key_block);
        if (!with_integers(span.segment->k.type,
                           [&](auto type) { score_keys<decltype(type)::value>(w, head, m, span, keys, s); })) {
            base::score_rows(w, head, m, span, s);
        }
        for (int row = 0; row < m.rows; row++) {
            base::weigh_row(w, head, m, span, row, s + row * key_block);
        }
        if (!with_integers(span.segment->v.type,
                           [&](auto type) { add_values<decltype(type)::value>(w, head, m, span, values, s); })) {
            base::add_values(w, head, m, span, s);
        }
    }

    static bool fits(const attention_args & a) { return a.d_k <= 256 && a.d_v <= 256; }

    static void run(const attention_item & w) {
        const attention_args & a = *w.args;
        for (int i = 0; i < w.n_head; i++) {
            base::begin(item_memory(a, w.few, w.n_queries, w.memory, i));
        }
        uint32_t ready = 0;
        for_each_block(w, key_block, [&](const key_span & span) {
            base::prepare(w, span, ready, [&](const item_memory & m, int row) {
                if (a.d_k % 32 == 0) {
                    pack_quad(a, m, row);
                }
            });
            for (int i = 0; i < w.n_head; i++) {
                block(w, w.head0 + i, item_memory(a, w.few, w.n_queries, w.memory, i), span);
            }
        });
    }
};

} // namespace
} // namespace mixedkv
