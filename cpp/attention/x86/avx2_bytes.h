// Decode and prefill on AVX2 over rows of q4_0 with Q and the weights in 8 bits (attention_args::rounding), where
// avx2_decode.h and avx2_prefill.h have 16: half the products, four elements or four keys in a dword. Sums of 16 bits
// hold a block of 32 elements or 32 keys: 8 times 2 * 15 * 127 or 2 * 8 * 255. AVX-VNNI sums up in 32 bits at once.
//
// Scores: nibbles of K times signed bytes of Q. Output: weights without a sign times signed integers of V, which take
// the sign of their scale.

#pragma once

#include "avx2_prefill.h"

namespace mixedkv {
namespace {

struct avx2_bytes : key_columns<avx2, avx2_bytes> {
    using decode = avx2_bytes;

    static constexpr bool in_bytes      = true;
    static constexpr int  keys_together = 4;

    // Other types of integers are longer, and no faster in bytes than in 16 bits.
    static bool fits(const attention_args & a) {
        const auto is_taken = [](row_type type) { return type == row_type::q4_0 || !has_integers_or_unpacked(type); };
        bool       res      = a.rounding == 8;
        for (int i = 0; i < a.n_segments; i++) {
            res = res && is_taken(a.segments[i].k.type) && is_taken(a.segments[i].v.type);
        }
        return res;
    }

    // Sums of up to 8 products of fours, and then of these
#ifdef __AVXVNNI__
    static __m256i dot(__m256i sum, __m256i x, __m256i y) { return _mm256_dpbusd_avx_epi32(sum, x, y); }
    static __m256i whole(__m256i sum) { return sum; }
#else
    static __m256i dot(__m256i sum, __m256i x, __m256i y) {
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(x, y));
        // GCC 12 else forms all products of a block before it adds them, and has to store them.
        __asm__ volatile("" : "+x"(sum));
        return sum;
    }
    static __m256i whole(__m256i sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
#endif
    // in registers: see avx2_integers::ints8
    using ints8 = avx2_integers::ints8;

    // Scales of a block of keys by up to 4 blocks of elements: without their signs, which are 1 or -1 in a byte a key
    struct value_scales {
        alignas(32) float size[4][key_block];
        alignas(32) int32_t negative[4][key_block / 4];

        value_scales() = default;
        explicit value_scales(const key_scales & scales) {
            const __m256i one = _mm256_set1_epi8(1);
            for (int b = 0; b < 4; b++) {
                const uint16_t * half = scales.half[b];
                for (int i = 0; i < key_block; i += 8) {
                    L::store(size[b] + i, L::abs(L::load_half(half + i)));
                }
                for (int i = 0; i < key_block; i += 32) {
                    const __m256i * at    = reinterpret_cast<const __m256i *>(half + i);
                    const __m256i   signs = _mm256_packs_epi16(_mm256_srai_epi16(_mm256_loadu_si256(at), 15),
                                                               _mm256_srai_epi16(_mm256_loadu_si256(at + 1), 15));
                    _mm256_store_si256(reinterpret_cast<__m256i *>(negative[b] + i / 4),
                                       _mm256_or_si256(_mm256_permute4x64_epi64(signs, 0xd8), one));
                }
            }
        }
    };

    // Four rows of Q, one block of 32 elements
    struct quad {
        int32_t ints[8][4]; // 4 elements, row
        int32_t sum[4];     // of the integers
        float   scale[4];
    };

    using columns_of_block = __m256i[8][2]; // four elements each of keys 0..7, 8..15

    static void pack_block(const float * q, int row, quad & out) {
        __m256 largest = L::zero();
        for (int i = 0; i < 32; i += 8) {
            largest = L::max(largest, L::abs(L::load(q + i)));
        }
        const float  top    = L::highest(largest);
        const __m256 to_int = L::set(top > 0x1p-100f ? 127.0f / top : 0.0f);
        __m256i      n[4];
        for (int i = 0; i < 4; i++) {
            const __m256 y = L::mul(L::load(q + 8 * i), to_int);
            n[i] = _mm256_cvtps_epi32(_mm256_and_ps(y, _mm256_cmp_ps(y, y, _CMP_ORD_Q))); // NaN would be INT_MIN
        }
        const __m256i       sums  = _mm256_add_epi32(_mm256_add_epi32(n[0], n[1]), _mm256_add_epi32(n[2], n[3]));
        const __m256i       bytes = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
        alignas(32) int32_t fours[8];
        _mm256_store_si256(reinterpret_cast<__m256i *>(fours), bytes);
        for (int i = 0; i < 8; i++) {
            out.ints[i][row] = fours[dword_of(i)];
        }
        out.scale[row] = top / 127.0f;
        out.sum[row]   = avx2_integers::sum(sums);
    }

    template <row_type>
    static void columns(const char * p, int64_t row, columns_of_block & x) {
        const __m256i nibble = _mm256_set1_epi8(15);
        for (int group = 0; group < 2; group++, p += 8 * row) {
            __m256i t[4];
            avx2_integers::transpose(p, row, t);
            for (int i = 0; i < 4; i++) {
                x[i][group]     = _mm256_and_si256(t[i], nibble);
                x[4 + i][group] = _mm256_and_si256(_mm256_srli_epi16(t[i], 4), nibble);
            }
        }
    }

    // s[row][16 keys] += the scores of one block of elements
    template <row_type type>
    static void score_block(const columns_of_block & x, const uint16_t * scales_f16, const quad & q, int rows,
                            float * s) {
        alignas(32) float scales[16];
        L::store(scales, L::load_half(scales_f16));
        L::store(scales + 8, L::load_half(scales_f16 + 8));
        with_rows(rows, [&](auto R) { score_rows<type, R>(x, scales, q, s); });
    }
    template <row_type, int R>
    static void score_rows(const columns_of_block & x, const float * scales, const quad & q, float * s) {
        ints8 sums[R][2];
        for (int r = 0; r < R; r++) {
            sums[r][0] = sums[r][1] = ints8{};
        }
        for (int i = 0; i < 8; i++) {
            for (int r = 0; r < R; r++) {
                const __m256i y = _mm256_set1_epi32(q.ints[i][r]);
                sums[r][0]      = ints8(dot(__m256i(sums[r][0]), x[i][0], y));
                sums[r][1]      = ints8(dot(__m256i(sums[r][1]), x[i][1], y));
            }
        }
        for (int half = 0; half < 2; half++) {
            const __m256 d = L::load(scales + 8 * half);
            for (int r = 0; r < R; r++) {
                float *       to  = s + r * key_block + 8 * half;
                const __m256i all = _mm256_add_epi32(whole(__m256i(sums[r][half])), _mm256_set1_epi32(-8 * q.sum[r]));
                L::store(to, L::fma(L::mul(d, L::set(q.scale[r])), _mm256_cvtepi32_ps(all), L::load(to)));
            }
        }
    }

    // Where packing 32 integers to bytes leaves 4 i .. 4 i + 3 of them
    static constexpr int dword_of(int i) { return i / 8 * 8 + i % 2 * 4 + i % 8 / 2; }

    static __m256 weighed(const float * s, const float * size, int i) {
        return L::mul(L::load(s + 8 * i), L::load(size + 8 * i));
    }

    // Weights times the scales of every per-th block of elements, in units of a 255th of the largest product. A weight
    // of zero has no say, as the scale of a key that is not seen may be anything: NaN is no maximum, and becomes 0. Not
    // inlined, so that decode and prefill run the same code.
    template <int per>
    [[gnu::noinline]] static void round_weights(const float * s, const value_scales & of, int32_t * const (&out)[4],
                                                float (&units)[4]) {
        for (int b = 0; b < 4; b += per) {
            __m256 most = L::zero();
            for (int i = 0; i < 8; i++) {
                most = _mm256_max_ps(weighed(s, of.size[b], i), most);
            }
            const float  top = L::highest(most);
            const __m256 by  = L::set(top > 0x1p-100f ? 255.0f / top : 0.0f);
            units[b]         = top * (1.0f / 255.0f);
            for (int half = 0; half < 2; half++) {
                __m256i n[4];
                for (int i = 0; i < 4; i++) {
                    n[i] = _mm256_cvtps_epi32(L::mul(weighed(s, of.size[b], 4 * half + i), by));
                }
                const __m256i bytes =
                    _mm256_packus_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
                _mm256_store_si256(reinterpret_cast<__m256i *>(out[b] + 8 * half), bytes);
            }
        }
    }

    // A block of n <= 4 keys as dwords of four keys: eight elements each
    static void four(const char * p, int64_t row, int n, int32_t negative, __m256i (&x)[4]) {
        const __m128i k0 = load_16(p), k1 = load_16(p + (n > 1 ? row : 0)); // past the last key, weight 0
        const __m128i k2 = load_16(p + (n > 2 ? 2 * row : 0)), k3 = load_16(p + (n > 3 ? 3 * row : 0));
        const __m128i a = _mm_unpacklo_epi8(k0, k1), b = _mm_unpackhi_epi8(k0, k1);
        const __m128i c = _mm_unpacklo_epi8(k2, k3), d = _mm_unpackhi_epi8(k2, k3);
        const __m256i first  = _mm256_set_m128i(_mm_unpackhi_epi16(a, c), _mm_unpacklo_epi16(a, c));
        const __m256i second = _mm256_set_m128i(_mm_unpackhi_epi16(b, d), _mm_unpacklo_epi16(b, d));
        const __m256i nibble = _mm256_set1_epi8(15), eight = _mm256_set1_epi8(8), sign = _mm256_set1_epi32(negative);
        const auto    value = [&](__m256i y) {
            return _mm256_sign_epi8(_mm256_sub_epi8(_mm256_and_si256(y, nibble), eight), sign);
        };
        x[0] = value(first);
        x[1] = value(second);
        x[2] = value(_mm256_srli_epi16(first, 4));
        x[3] = value(_mm256_srli_epi16(second, 4));
    }

    template <int R>
    static void add_sums(const ints8 (&sums)[R][2], const float * scales, float * acc, int64_t ld) {
        for (int r = 0; r < R; r++) {
            for (int i = 0; i < 2; i++) {
                float * y = acc + r * ld + 8 * i;
                L::store(y, L::fma(L::set(scales[r]), _mm256_cvtepi32_ps(__m256i(sums[r][i])), L::load(y)));
            }
        }
    }

    // all += weights of 32 keys times what two vectors of 8 elements of each four of them hold, `step` vectors apart;
    // those of a four that is not there are zero.
    template <int R>
    static void add_keys(const __m256i * x, int step, const int32_t (*ints)[16], int half, ints8 (&all)[R][2]) {
        ints8 sums[R][2];
        for (int r = 0; r < R; r++) {
            sums[r][0] = sums[r][1] = ints8{};
        }
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const __m256i first = x[step * i], second = x[step * i + 1];
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const __m256i weights = _mm256_set1_epi32(ints[r][8 * half + dword_of(i)]);
                sums[r][0]            = ints8(dot(__m256i(sums[r][0]), weights, first));
                sums[r][1]            = ints8(dot(__m256i(sums[r][1]), weights, second));
            }
        }
        for (int r = 0; r < R; r++) {
            all[r][0] += ints8(whole(__m256i(sums[r][0])));
            all[r][1] += ints8(whole(__m256i(sums[r][1])));
        }
    }

    // acc[R][32] += weights times one block of elements of fours of n keys; ints[r]: fours of weights
    template <row_type, int R>
    static void add_block(const char * p, int64_t row, int n, const key_groups<4> & fours, const int32_t * negative,
                          prefetcher & ahead, const int32_t (*ints)[16], const float * scales, float * acc,
                          int64_t ld) {
        alignas(32) __m256i unpacked[16][4];
        if (fours.n < 16) {
            std::memset(unpacked, 0, sizeof(unpacked));
        }
        fours.for_each([&](int i) {
            ahead.step(1);
            four(p + 4 * i * row, row, n - 4 * i, negative[i], unpacked[i]);
        });
        for (int part = 0; part < 2; part++) {
            ints8 all[R][2];
            for (int r = 0; r < R; r++) {
                all[r][0] = all[r][1] = ints8{};
            }
            add_keys<R>(unpacked[0] + 2 * part, 4, ints, 0, all);
            add_keys<R>(unpacked[8] + 2 * part, 4, ints, 1, all);
            add_sums<R>(all, scales, acc + 16 * part, ld);
        }
    }

    // --- prefill

    // Block b of n keys: [block, part, four keys] two vectors of 8 elements
    template <row_type>
    static void unpack_values(const char * p, int64_t row, int n, int b, const value_scales & of, float * panel) {
        __m256i * to = reinterpret_cast<__m256i *>(panel) + 64 * b;
        for (int i = 0; i < key_block; i += 4, to += 2) {
            __m256i x[4] = {};
            if (i < n) {
                four(p + i * row, row, n - i, of.negative[b % 4][i / 4], x);
            }
            to[0]  = x[0];
            to[1]  = x[1];
            to[32] = x[2];
            to[33] = x[3];
        }
    }

    // acc[R][32] += weights times block b of n keys
    template <row_type, int R>
    static void add_values(const float * panel, int n, int b, const int32_t (*ints)[16], const float * scales,
                           float * acc, int64_t ld) {
        for (int part = 0; part < 2; part++) {
            const __m256i * values = reinterpret_cast<const __m256i *>(panel) + 64 * b + 32 * part;
            ints8           all[R][2];
            for (int r = 0; r < R; r++) {
                all[r][0] = all[r][1] = ints8{};
            }
            for (int half = 0; 32 * half < n; half++) {
                add_keys<R>(values + 16 * half, 2, ints, half, all);
            }
            add_sums<R>(all, scales, acc + 16 * part, ld);
        }
    }
};

inline void run_avx2(const attention_item & w) {
    if (avx2_bytes::fits(*w.args)) {
        return run_integers<avx2_bytes, avx2_bytes>(w);
    }
    run_integers<avx2_integers, avx2_prefill>(w);
}

} // namespace
} // namespace mixedkv
