// Prefill on AMX over rows of a scale and integers, with Q and the weights in 16 bits: tiles of bytes multiply the
// integers that decode multiplies (vnni_decode.h), a high and a low byte of each in turn. Sums are exact and scales are
// applied in the same order, so a query has the same bits in both.
//
// Time at head size 128, Sapphire Rapids: a product of tiles takes 16 cycles for 16 rows, a store of sums as long. Sums
// of scores are stored for each block of 32 elements, which has a scale of its own; those of values for each 64 keys.

#pragma once

#include "amx_tiles.h"
#include "attention/integers/integer_prefill.h"
#include "vnni_bytes.h"

namespace mixedkv {
namespace {

struct amx_integers {
    using L      = avx512;
    using decode = vnni;
    using floats = float __attribute__((vector_size(64)));

    static constexpr int  most_rows = 16; // of a tile
    static constexpr bool pads_rows = true;

    // Tile registers 0, 1: sums, 16 x 16, of high and of low bytes; 2, 3: 16 rows of Q, a block of elements, high and
    // low; 4: that of 16 keys; 5, 6: weights of 16 rows by 64 keys, high and low; 7: 16 elements of these keys' V

    // 16 rows of Q, a block of 32 elements: integers are 256 times the high byte, which has a sign, and the low one
    struct query_tile {
        int8_t  high[16][32];
        uint8_t low[16][32];
        float   scale[16];
    };

    static query_tile * queries_of(const attention_args & a, const item_memory & m, int row) {
        char * p = static_cast<char *>(m.q) + m.rows_padded * round_up(a.d_k, 128) * 4;
        return reinterpret_cast<query_tile *>(p) + row / 16 * (a.d_k / 32);
    }

    // Rows first .. first + 3, with the integers that decode has
    static void pack_rows(const attention_args & a, const item_memory & m, int first) {
        for (int row = first; row < first + 4; row++) {
            const float * q  = static_cast<const float *>(m.q) + row * round_up(a.d_k, 16);
            query_tile *  to = queries_of(a, m, row);
            for (int b = 0; b < a.d_k / 32; b++, q += 32) {
                __m512i n[2];
                to[b].scale[row % 16] = vnni::round_block(q, n);
                for (int i = 0; i < 2; i++) {
                    const __m128i high = _mm512_cvtepi32_epi8(_mm512_srai_epi32(n[i], 8));
                    const __m128i low  = _mm512_cvtepi32_epi8(n[i]);
                    _mm_storeu_si128(reinterpret_cast<__m128i *>(to[b].high[row % 16]) + i, high);
                    _mm_storeu_si128(reinterpret_cast<__m128i *>(to[b].low[row % 16]) + i, low);
                }
            }
        }
    }

    // Block b of 16 keys, the group-th: [block, group] tiles of 8 times 4 elements of the keys
    template <row_type type>
    static void unpack_keys(const char * p, int64_t row, int, int b, int group, float * panel) {
        const __m512i          offset = _mm512_set1_epi8(char(integer_rows<type>::offset));
        __m512i *              to     = reinterpret_cast<__m512i *>(panel) + 8 * (4 * b + group);
        vnni::columns_of_block x;
        vnni::columns<type>(p, row, x);
        for (int i = 0; i < 8; i++) {
            _mm512_store_si512(to + i, _mm512_sub_epi8(x[i], offset));
        }
    }

    // Sums of 16 rows: of high bytes, then of low ones
    struct tile_sums {
        alignas(64) int32_t high[16][16];
        alignas(64) int32_t low[16][16];

        void multiply_keys(const query_tile & q, const __m512i * k) {
            _tile_loadd(2, q.high, 32);
            _tile_loadd(3, q.low, 32);
            _tile_loadd(4, k, 64);
            _tile_zero(0);
            _tile_zero(1);
            _tile_dpbssd(0, 2, 4);
            _tile_dpbusd(1, 3, 4);
            store();
        }

        // Weights are in their registers
        void multiply_values(const __m512i * v) {
            _tile_loadd(7, v, 64);
            _tile_zero(0);
            _tile_zero(1);
            _tile_dpbssd(0, 5, 7);
            _tile_dpbusd(1, 6, 7);
            store();
        }

        __m512 of(int row) const {
            const __m512i x = _mm512_slli_epi32(_mm512_load_si512(high[row]), 8);
            return _mm512_cvtepi32_ps(_mm512_add_epi32(x, _mm512_load_si512(low[row])));
        }

      private:
        void store() {
            _tile_stored(0, high, 64);
            _tile_stored(1, low, 64);
        }
    };

    // s[16][key_block] of the rows from `row` on
    template <row_type type, int R>
    [[gnu::noinline]] static void score(const attention_args & a, const item_memory & m, int row, const float * panel,
                                        const float (*scales)[key_block], float * s) {
        static_assert(R == 16);
        const int          n_blocks = a.d_k / 32;
        const query_tile * q        = queries_of(a, m, row);
        const __m512i *    k        = reinterpret_cast<const __m512i *>(panel);
        tile_sums          sums[2]; // tiles multiply the next block meanwhile
        memory_is_used();
        sums[0].multiply_keys(q[0], k);
        for (int group = 0, i = 0; group < 4; group++) {
            floats y[16];
            unrolled<16>([&](auto r) __attribute__((always_inline)) { y[r] = floats{}; });
            for (int b = 0; b < n_blocks; b++, i++) {
                const tile_sums & ready = sums[i % 2];
                if (b + 1 < n_blocks) {
                    sums[(i + 1) % 2].multiply_keys(q[b + 1], k + 8 * (4 * (b + 1) + group));
                } else if (group + 1 < 4) {
                    sums[(i + 1) % 2].multiply_keys(q[0], k + 8 * (group + 1));
                }
                const __m512 scale = _mm512_load_ps(scales[b] + 16 * group);
                unrolled<16>([&](auto r) __attribute__((always_inline)) {
                    const __m512 by = _mm512_mul_ps(scale, _mm512_set1_ps(q[b].scale[r]));
                    y[r]            = floats(_mm512_fmadd_ps(by, ready.of(r), __m512(y[r])));
                });
            }
            unrolled<16>([&](auto r) __attribute__((always_inline)) {
                _mm512_store_ps(s + r * key_block + 16 * group, __m512(y[r]));
            });
        }
    }

    // Block b of n keys: [block, half] tiles of 16 times four keys. Past the last of them weights are zero.
    template <row_type type>
    static void unpack_values(const char * p, int64_t row, int n, int b, const key_scales &, float * panel) {
        __m512i * to = reinterpret_cast<__m512i *>(panel) + 32 * b;
        for (int i = 0; 4 * i < n; i++) {
            vnni_bytes::four<type>(p + 4 * i * row, row, n - 4 * i, 0, to[i], to[16 + i]);
        }
    }

    // 64 weights of row r as weight_unit::apply() leaves them become its bytes in ints: high ones of all rows, then low
    template <int R>
    static void keep_weights(const __m512i * packed, int r, int32_t (*ints)[32]) {
        static_assert(R == 16);
        const __m512i low  = _mm512_load_si512(low_bytes);
        const __m512i high = _mm512_or_si512(low, _mm512_set1_epi8(1));
        __m512i *     to   = reinterpret_cast<__m512i *>(ints) + r;
        _mm512_store_si512(to, _mm512_permutex2var_epi8(packed[0], high, packed[1]));
        _mm512_store_si512(to + 16, _mm512_permutex2var_epi8(packed[0], low, packed[1]));
    }

    // acc[16][32] += weights times block b of n keys
    template <row_type, int R>
    [[gnu::noinline]] static void add_values(const float * panel, int, int b, const int32_t (*ints)[32],
                                             const float * scales, float * acc, int64_t ld) {
        static_assert(R == 16);
        const __m512i * v = reinterpret_cast<const __m512i *>(panel) + 32 * b;
        tile_sums       sums[2];
        memory_is_used();
        _tile_loadd(5, ints, 64);
        _tile_loadd(6, ints + 8, 64);
        sums[0].multiply_values(v);
        sums[1].multiply_values(v + 16);
        for (int half = 0; half < 2; half++) {
            unrolled<16>([&](auto r) __attribute__((always_inline)) {
                float * y = acc + r * ld + 16 * half;
                _mm512_store_ps(y, _mm512_fmadd_ps(_mm512_set1_ps(scales[r]), sums[half].of(r), _mm512_load_ps(y)));
            });
        }
    }

    static void run(const attention_item & w) {
        const tile_session session({ {}, {}, { 16, 32 }, { 16, 32 }, { 8, 64 }, {}, {}, {} });
        const item_memory  m(*w.args, w.decode, w.n_queries, w.memory, 0);
        std::memset(m.acc, 0, m.rows_padded * m.d_v_padded * sizeof(float)); // a tile's rows beyond the last as well
        integer_prefill<amx_integers>::run(w);
    }

  private:
    // Low bytes of the weights of keys 0, 1 .. 63, as avx512::to_int16 orders them: by lanes of four keys of each half
    alignas(64) static constexpr uint8_t low_bytes[64] = { 0,  2,  4,  6,   16,  18,  20,  22,  32,  34,  36,  38, 48,
                                                           50, 52, 54, 8,   10,  12,  14,  24,  26,  28,  30,  40, 42,
                                                           44, 46, 56, 58,  60,  62,  64,  66,  68,  70,  80,  82, 84,
                                                           86, 96, 98, 100, 102, 112, 114, 116, 118, 72,  74,  76, 78,
                                                           88, 90, 92, 94,  104, 106, 108, 110, 120, 122, 124, 126 };
};

} // namespace
} // namespace mixedkv
