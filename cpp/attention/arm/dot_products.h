// Decode and prefill on ARM with FEAT_DotProd over rows of a scale and integers (integers.h): an instruction multiplies
// four bytes in each of four lanes. Q and the weights are bytes where `bytes` says so (attention_args::rounding), else
// 16-bit integers in two parts, high * 256 + low, both with signs: what the high ones sum up to is shifted, and the low
// ones are added. Sums are exact in 32 bits; scales are applied to them in F32.
//
// Scores: 16 keys are transposed so that each is a column of fours of elements. Output: a dword has an element of four
// keys, times the weights of these keys. Nibbles of q4_0 stay unsigned: what is 8 too much is known from Q, or from the
// weights. Weights in bytes have no sign, so neither has what they are multiplied with: where a scale of V is negative,
// its integers are, which turns all bits of x = value + offset and takes one from the offset.

#pragma once

#include "attention/integers/integer_prefill.h"
#include "attention/integers/key_columns.h"
#include "attention/simd/vector_neon.h"

namespace mixedkv {
namespace {

template <bool bytes>
struct dot_products : key_columns<neon, dot_products<bytes>> {
    using L      = neon;
    using V      = typename L::V;
    using decode = dot_products;

    static constexpr bool in_bytes      = bytes;
    static constexpr int  keys_together = 4;
    static constexpr int  parts         = bytes ? 1 : 2;

    // Scales of a block of keys by up to 4 blocks of elements: without their signs, which are all bits of a key's byte
    struct signed_scales {
        alignas(16) float size[4][key_block];
        alignas(16) uint8_t negative[4][key_block];

        signed_scales() = default;
        explicit signed_scales(const key_scales & scales) {
            for (int b = 0; b < 4; b++) {
                const uint16_t * half = scales.half[b];
                for (int i = 0; i < key_block; i += L::width) {
                    L::store(size[b] + i, L::abs(L::load_half(half + i)));
                }
                for (int i = 0; i < key_block; i += 16) {
                    const uint8x16_t high = vuzp2q_u8(load_bytes(half + i), load_bytes(half + i + 8));
                    vst1q_u8(negative[b] + i, vreinterpretq_u8_s8(vshrq_n_s8(vreinterpretq_s8_u8(high), 7)));
                }
            }
        }
    };
    using value_scales = std::conditional_t<bytes, signed_scales, key_scales>;

    // Four rows of Q, one block of 32 elements
    struct quad {
        int32_t ints[parts][8][4]; // 4 elements, row
        int32_t sum[4];            // of the integers
        float   scale[4];
    };

    using columns_of_block = int8x16_t[8][4]; // four elements each of four keys

    // Values of 64 keys, one block of 32 elements, and what is to be taken from each: nothing where the integers come
    // with signs
    struct values_of_block {
        uint8x16_t x[key_block / 4][8];
        uint8x16_t offset[key_block / 16];
    };

    static uint8x16_t load_bytes(const void * p) { return vld1q_u8(static_cast<const uint8_t *>(p)); }

    // Sums of fours of bytes: in Q and K with signs, in weights and V as keys_of_four() has them
    static int32x4_t add_fours(int32x4_t sum, uint8x16_t weights, uint8x16_t x) {
        if constexpr (bytes) {
            return vreinterpretq_s32_u32(vdotq_u32(vreinterpretq_u32_s32(sum), weights, x));
        } else {
            return vdotq_s32(sum, vreinterpretq_s8_u8(weights), vreinterpretq_s8_u8(x));
        }
    }
    template <int lane>
    static int32x4_t add_fours(int32x4_t sum, uint8x16_t x, uint8x16_t weights, std::integral_constant<int, lane>) {
        if constexpr (bytes) {
            return vreinterpretq_s32_u32(vdotq_laneq_u32(vreinterpretq_u32_s32(sum), x, weights, lane));
        } else {
            return vdotq_laneq_s32(sum, vreinterpretq_s8_u8(x), vreinterpretq_s8_u8(weights), lane);
        }
    }

    // 16 integers as a high part of bytes, and a low one
    static void split(int16x8_t a, int16x8_t b, int8x16_t & high, int8x16_t & low) {
        high = vrshrn_high_n_s16(vrshrn_n_s16(a, 8), b, 8);
        low  = vmovn_high_s16(vmovn_s16(a), b);
    }

    static void pack_block(const float * q, int row, quad & out) {
        constexpr float limit = bytes ? 127.0f : int16_limit;
        V               most  = L::zero();
        for (int i = 0; i < 32; i += 4) {
            most = L::max(most, L::abs(L::load(q + i)));
        }
        const float top    = L::highest(most);
        const V     to_int = L::set(top > 0x1p-100f ? limit / top : 0.0f);
        out.scale[row]     = top / limit;
        out.sum[row]       = 0;
        for (int half = 0; half < 2; half++, q += 16) {
            int16x8_t n[2];
            for (int i = 0; i < 2; i++) {
                n[i] = L::to_int16(L::mul(L::load(q + 8 * i), to_int), L::mul(L::load(q + 8 * i + 4), to_int));
                out.sum[row] += vaddlvq_s16(n[i]);
            }
            int8x16_t part[2];
            split(n[0], n[1], part[0], part[1]);
            for (int p = 0; p < parts; p++) {
                alignas(16) int32_t fours[4];
                vst1q_s8(reinterpret_cast<int8_t *>(fours), part[bytes ? 1 : p]);
                for (int i = 0; i < 4; i++) {
                    out.ints[p][4 * half + i][row] = fours[i];
                }
            }
        }
    }

    template <row_type type>
    static constexpr bool unsigned_nibbles() {
        if constexpr (integer_rows<type>::nibbles) {
            return integer_rows<type>::even;
        }
        return false;
    }

    // What 16 nibbles stand for: themselves in q4_0, and else a value that has a sign
    template <row_type type>
    static uint8x16_t look_up(uint8x16_t nibbles) {
        if constexpr (unsigned_nibbles<type>()) {
            return nibbles;
        } else {
            return vqtbl1q_u8(load_bytes(integer_rows<type>::at), nibbles);
        }
    }

    template <row_type type>
    static void columns(const char * p, int64_t row, columns_of_block & x) {
        using rows = integer_rows<type>;
        for (int g = 0; g < 4; g++, p += 4 * row) {
            for (int part = 0; part < (rows::nibbles ? 1 : 2); part++) {
                uint32x4_t r[4], t[4];
                for (int i = 0; i < 4; i++) {
                    r[i] = vreinterpretq_u32_u8(load_bytes(p + i * row + 16 * part));
                }
                transpose(r, t);
                for (int i = 0; i < 4; i++) {
                    const uint8x16_t y = vreinterpretq_u8_u32(t[i]);
                    if constexpr (rows::nibbles) {
                        x[i][g]     = vreinterpretq_s8_u8(look_up<type>(vandq_u8(y, vdupq_n_u8(15))));
                        x[i + 4][g] = vreinterpretq_s8_u8(look_up<type>(vshrq_n_u8(y, 4)));
                    } else {
                        x[4 * part + i][g] = vreinterpretq_s8_u8(y);
                    }
                }
            }
        }
    }

    static void transpose(const uint32x4_t (&r)[4], uint32x4_t (&t)[4]) {
        const auto       pairs = [](uint32x4_t a) { return vreinterpretq_u64_u32(a); };
        const uint64x2_t a = pairs(vtrn1q_u32(r[0], r[1])), b = pairs(vtrn2q_u32(r[0], r[1]));
        const uint64x2_t c = pairs(vtrn1q_u32(r[2], r[3])), d = pairs(vtrn2q_u32(r[2], r[3]));
        t[0] = vreinterpretq_u32_u64(vtrn1q_u64(a, c));
        t[1] = vreinterpretq_u32_u64(vtrn1q_u64(b, d));
        t[2] = vreinterpretq_u32_u64(vtrn2q_u64(a, c));
        t[3] = vreinterpretq_u32_u64(vtrn2q_u64(b, d));
    }

    // s[row][16 keys] += the scores of one block of elements
    template <row_type type>
    static void score_block(const columns_of_block & x, const uint16_t * scales_f16, const quad & q, int rows,
                            float * s) {
        alignas(16) float scales[16];
        for (int i = 0; i < 16; i += L::width) {
            L::store(scales + i, L::load_half(scales_f16 + i));
        }
        with_rows(rows, [&](auto R) { score_rows<type, R>(x, scales, q, s); });
    }
    template <row_type type, int R>
    static void score_rows(const columns_of_block & x, const float * scales, const quad & q, float * s) {
        int32x4_t sums[4 * R];
        unrolled<4 * R>([&](auto i) __attribute__((always_inline)) {
            sums[i] = vdupq_n_s32(bytes ? score_of_offset<type>(q, i / 4) : 0);
        });
        for (int part = 0; part < parts; part++) {
            if (part > 0) {
                unrolled<4 * R>([&](auto i) __attribute__((always_inline)) {
                    sums[i] = vaddq_s32(vshlq_n_s32(sums[i], 8), vdupq_n_s32(score_of_offset<type>(q, i / 4)));
                });
            }
#pragma GCC unroll 1 // unrolled, GCC 12 runs out of registers
            for (int i = 0; i < 8; i++) {
                const int8x16_t y  = vreinterpretq_s8_s32(vld1q_s32(q.ints[part][i]));
                const int8x16_t k0 = x[i][0], k1 = x[i][1], k2 = x[i][2], k3 = x[i][3];
                unrolled<R>([&](auto r) __attribute__((always_inline)) {
                    constexpr int lane = decltype(r)::value;
                    sums[4 * r]        = vdotq_laneq_s32(sums[4 * r], k0, y, lane);
                    sums[4 * r + 1]    = vdotq_laneq_s32(sums[4 * r + 1], k1, y, lane);
                    sums[4 * r + 2]    = vdotq_laneq_s32(sums[4 * r + 2], k2, y, lane);
                    sums[4 * r + 3]    = vdotq_laneq_s32(sums[4 * r + 3], k3, y, lane);
                });
            }
        }
        unrolled<4 * R>([&](auto i) __attribute__((always_inline)) {
            add_scores(sums[i], L::load(scales + 4 * (i % 4)), q, i / 4, s + i / 4 * key_block + 4 * (i % 4));
        });
    }

    // What lacks where nibbles are multiplied without a sign
    template <row_type type>
    static int32_t score_of_offset(const quad & q, int row) {
        return unsigned_nibbles<type>() ? -integer_rows<type>::offset * q.sum[row] : 0;
    }

    // s[4 keys] += the scores of a row, of which `sum` is the sum of its products
    static void add_scores(int32x4_t sum, V scales, const quad & q, int row, float * s) {
        L::store(s, L::fma(L::mul(scales, L::set(q.scale[row])), vcvtq_f32_s32(sum), L::load(s)));
    }

    static V weighed(const float * s, const float * size, int i) { return L::mul(L::load(s + i), L::load(size + i)); }

    // Weights times the scales of every per-th block of elements, in units of a 255th of the largest product. A weight
    // of zero has no say, as the scale of a key that is not seen may be anything: NaN is no maximum, and becomes 0. Not
    // inlined, so that decode and prefill run the same code.
    template <int per>
    [[gnu::noinline]] static void round_weights(const float * s, const signed_scales & of, int32_t * const (&out)[4],
                                                float (&units)[4]) {
        for (int b = 0; b < 4; b += per) {
            V most = L::zero();
            for (int i = 0; i < key_block; i += 4) {
                most = vmaxnmq_f32(weighed(s, of.size[b], i), most);
            }
            const float top = L::highest(most);
            const V     by  = L::set(top > 0x1p-100f ? 255.0f / top : 0.0f);
            units[b]        = top * (1.0f / 255.0f);
            for (int i = 0; i < key_block; i += 16) {
                int16x8_t n[2];
                for (int half = 0; half < 2; half++) {
                    n[half] = L::to_int16(L::mul(weighed(s, of.size[b], i + 8 * half), by),
                                          L::mul(weighed(s, of.size[b], i + 8 * half + 4), by));
                }
                vst1q_u8(reinterpret_cast<uint8_t *>(out[b]) + i, vqmovun_high_s16(vqmovun_s16(n[0]), n[1]));
            }
        }
    }

    // 64 weights, as weight_unit::apply leaves them: the high parts of all, then the low ones
    static void keep_weights(const int16x8_t * packed, int32_t (&to)[32]) {
        int8_t * p = reinterpret_cast<int8_t *>(to);
        for (int i = 0; i < key_block; i += 16, packed += 2) {
            int8x16_t high, low;
            split(packed[0], packed[1], high, low);
            vst1q_s8(p + i, high);
            vst1q_s8(p + key_block + i, low);
        }
    }

    // A block of n <= 4 keys as dwords of four keys: four elements each
    template <row_type type>
    static void keys_of_four(const char * p, int64_t row, int n, const uint8_t * negative, uint8x16_t (&x)[8]) {
        using rows = integer_rows<type>;
        uint32_t turned;
        std::memcpy(&turned, negative, 4);
        const uint8x16_t turn = vreinterpretq_u8_u32(vdupq_n_u32(turned));
        for (int part = 0; part < (rows::nibbles ? 1 : 2); part++, p += 16) {
            const uint8x16_t k0 = load_bytes(p), k1 = load_bytes(p + (n > 1 ? row : 0)); // past the last, weight 0
            const uint8x16_t k2 = load_bytes(p + (n > 2 ? 2 * row : 0)), k3 = load_bytes(p + (n > 3 ? 3 * row : 0));
            const uint16x8_t a = vreinterpretq_u16_u8(vzip1q_u8(k0, k1)), b = vreinterpretq_u16_u8(vzip2q_u8(k0, k1));
            const uint16x8_t c = vreinterpretq_u16_u8(vzip1q_u8(k2, k3)), d = vreinterpretq_u16_u8(vzip2q_u8(k2, k3));
            const uint8x16_t fours[4] = { vreinterpretq_u8_u16(vzip1q_u16(a, c)),
                                          vreinterpretq_u8_u16(vzip2q_u16(a, c)),
                                          vreinterpretq_u8_u16(vzip1q_u16(b, d)),
                                          vreinterpretq_u8_u16(vzip2q_u16(b, d)) };
            for (int i = 0; i < 4; i++) {
                if constexpr (unsigned_nibbles<type>()) { // turned as they are packed
                    const uint8x16_t y = bytes ? veorq_u8(fours[i], turn) : fours[i];
                    x[i]               = vandq_u8(y, vdupq_n_u8(15));
                    x[i + 4]           = vshrq_n_u8(y, 4);
                } else if constexpr (rows::nibbles) {
                    x[i]     = as_weighed(look_up<type>(vandq_u8(fours[i], vdupq_n_u8(15))), turn);
                    x[i + 4] = as_weighed(look_up<type>(vshrq_n_u8(fours[i], 4)), turn);
                } else {
                    x[4 * part + i] = as_weighed(fours[i], turn);
                }
            }
        }
    }
    // Integers with signs as weights take them
    static uint8x16_t as_weighed(uint8x16_t x, uint8x16_t turn) {
        return bytes ? veorq_u8(x, veorq_u8(turn, vdupq_n_u8(128))) : x;
    }

    // What is to be taken from each integer of 64 keys
    template <row_type type>
    static void take_offsets(const uint8_t * negative, uint8x16_t (&offset)[key_block / 16]) {
        for (int i = 0; i < key_block / 16; i++) {
            if constexpr (bytes) {
                offset[i] = vaddq_u8(vdupq_n_u8(integer_rows<type>::offset), load_bytes(negative + 16 * i));
            } else {
                offset[i] = vdupq_n_u8(unsigned_nibbles<type>() ? integer_rows<type>::offset : 0);
            }
        }
    }

    // The weights of keys 16 j .. 16 j + 15, one part of them
    template <class Ints>
    static uint8x16_t weights_at(const Ints & ints, int part, int j) {
        return load_bytes(reinterpret_cast<const uint8_t *>(ints) + key_block * part + 16 * j);
    }

    // What the offsets of 64 keys make of a row's sums
    template <class Ints>
    static int32_t sum_offsets(const Ints & ints, const uint8x16_t (&offset)[key_block / 16]) {
        int32_t sum = 0;
        for (int part = 0; part < parts; part++) {
            int32x4_t fours = vdupq_n_s32(0);
            for (int j = 0; j < key_block / 16; j++) {
                fours = add_fours(fours, weights_at(ints, part, j), offset[j]);
            }
            sum = (sum << 8) + vaddvq_s32(fours);
        }
        return sum;
    }

    // acc[R][32] += weights times values of n keys
    template <int R, class Ints>
    [[gnu::noinline]] static void add_products(const values_of_block & v, int n, const Ints * ints,
                                               const float * scales, float * acc, int64_t ld) {
        int32_t offsets[R];
        for (int r = 0; r < R; r++) {
            offsets[r] = sum_offsets(ints[r], v.offset);
        }
        for (int half = 0; half < 2; half++, acc += 16) {
            int32x4_t sums[4 * R];
            unrolled<4 * R>([&](auto i) __attribute__((always_inline)) { sums[i] = vdupq_n_s32(0); });
            for (int part = 0; part < parts; part++) {
                if (part > 0) {
                    unrolled<4 * R>([&](auto i) __attribute__((always_inline)) { sums[i] = vshlq_n_s32(sums[i], 8); });
                }
                for (int j = 0; 16 * j < n; j++) {
                    uint8x16_t weights[R];
                    unrolled<R>([&](auto r)
                                    __attribute__((always_inline)) { weights[r] = weights_at(ints[r], part, j); });
                    unrolled<4>([&](auto lane) __attribute__((always_inline)) {
                        const uint8x16_t * x  = v.x[4 * j + lane] + 4 * half;
                        const uint8x16_t   x0 = x[0], x1 = x[1], x2 = x[2], x3 = x[3];
                        unrolled<R>([&](auto r) __attribute__((always_inline)) {
                            sums[4 * r]     = add_fours(sums[4 * r], x0, weights[r], lane);
                            sums[4 * r + 1] = add_fours(sums[4 * r + 1], x1, weights[r], lane);
                            sums[4 * r + 2] = add_fours(sums[4 * r + 2], x2, weights[r], lane);
                            sums[4 * r + 3] = add_fours(sums[4 * r + 3], x3, weights[r], lane);
                        });
                    });
                }
            }
            unrolled<4 * R>([&](auto i) __attribute__((always_inline)) {
                add_values_to(sums[i], offsets[i / 4], scales[i / 4], acc + i / 4 * ld + 4 * (i % 4));
            });
        }
    }

    // acc[4] += a row's sums, less the offsets, times its scale
    static void add_values_to(int32x4_t sum, int32_t offset, float scale, float * acc) {
        const V y = vcvtq_f32_s32(vsubq_s32(sum, vdupq_n_s32(offset)));
        L::store(acc, L::fma(L::set(scale), y, L::load(acc)));
    }

    // Decode: acc[R][32] += weights times one block of elements of n keys, of which `fours` have weights
    template <row_type type, int R>
    static void add_fours_of(const char * p, int64_t row, int n, const key_groups<4> & fours, const uint8_t * negative,
                             prefetcher & ahead, const int32_t (*ints)[32 / (bytes ? 2 : 1)], const float * scales,
                             float * acc, int64_t ld) {
        values_of_block v;
        if (fours.n < key_block / 4) {
            std::memset(v.x, 0, sizeof(v.x));
        }
        fours.for_each([&](int i) {
            ahead.step(1);
            keys_of_four<type>(p + 4 * i * row, row, n - 4 * i, negative + 4 * i, v.x[i]);
        });
        take_offsets<type>(negative, v.offset);
        add_products<R>(v, n, ints, scales, acc, ld);
    }
    template <row_type type, int R>
    static void add_block(const char * p, int64_t row, int n, const key_groups<4> & fours, const uint8_t * negative,
                          prefetcher & ahead, const int32_t (*ints)[16], const float * scales, float * acc,
                          int64_t ld) {
        add_fours_of<type, R>(p, row, n, fours, negative, ahead, ints, scales, acc, ld);
    }
    template <row_type type, int R>
    static void add_block(const char * p, int64_t row, int n, const key_groups<4> & fours, prefetcher & ahead,
                          const int32_t (*ints)[32], const float * scales, float * acc, int64_t ld) {
        add_fours_of<type, R>(p, row, n, fours, none_negative, ahead, ints, scales, acc, ld);
    }

    static constexpr uint8_t none_negative[key_block] = {};

    static const uint8_t * negative_of(const key_scales &, int) { return none_negative; }
    static const uint8_t * negative_of(const signed_scales & of, int b) { return of.negative[b]; }

    // --- prefill

    template <int R>
    static void keep_weights(const int16x8_t * packed, int r, int32_t (*ints)[32]) {
        keep_weights(packed, ints[r]);
    }

    // Block b of n keys
    template <row_type type>
    static void unpack_values(const char * p, int64_t row, int n, int b, const value_scales & of, float * panel) {
        constexpr int     per      = block_elements(type) / 32;
        const uint8_t *   negative = negative_of(of, b % 4 / per * per);
        values_of_block & v        = reinterpret_cast<values_of_block *>(panel)[b];
        for (int i = 0; i < key_block / 4; i++) {
            if (4 * i < n) {
                keys_of_four<type>(p + 4 * i * row, row, n - 4 * i, negative + 4 * i, v.x[i]);
            } else {
                std::memset(v.x[i], 0, sizeof(v.x[i]));
            }
        }
        take_offsets<type>(negative, v.offset);
    }

    // acc[R][32] += weights times block b of n keys
    template <row_type, int R, class Ints>
    static void add_values(const float * panel, int n, int b, const Ints * ints, const float * scales, float * acc,
                           int64_t ld) {
        add_products<R>(reinterpret_cast<const values_of_block *>(panel)[b], n, ints, scales, acc, ld);
    }
};

} // namespace
} // namespace mixedkv
