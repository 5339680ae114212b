// Vector layer of tile.h for NEON (aarch64).

#pragma once

#include "attention/row_types.h"

#include <arm_neon.h>

namespace mixedkv {
namespace {

struct neon : plain_blocks {
    using V                     = float32x4_t;
    static constexpr int  width = 4;
    static constexpr int  rows = 6; // of a product tile: 6 x 4 accumulators, 4 columns and a broadcast fit 32 registers
    static constexpr int  cols = 4;
    static constexpr int  dot_keys         = 4; // times 4 rows: 16 accumulators
    static constexpr bool updates_together = false;

    static V    zero() { return vdupq_n_f32(0.0f); }
    static V    set(float x) { return vdupq_n_f32(x); }
    static V    load(const float * p) { return vld1q_f32(p); }
    static void store(float * p, V v) { vst1q_f32(p, v); }
    static V    load_half(const void * p) {
        uint16x4_t h;
        std::memcpy(&h, p, 8);
        return vcvt_f32_f16(vreinterpret_f16_u16(h));
    }
    static V add(V a, V b) { return vaddq_f32(a, b); }
    static V sub(V a, V b) { return vsubq_f32(a, b); }
    static V mul(V a, V b) { return vmulq_f32(a, b); }
    static V div(V a, V b) { return vdivq_f32(a, b); }
    static V fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
    static V max(V a, V b) { return vmaxq_f32(a, b); }
    static V abs(V a) { return vabsq_f32(a); }
    static V where(uint32_t bits, V a) { // zero elsewhere
        const uint32_t each[4] = { 1, 2, 4, 8 };
        return vreinterpretq_f32_u32(
            vandq_u32(vtstq_u32(vdupq_n_u32(bits), vld1q_u32(each)), vreinterpretq_u32_f32(a)));
    }
    static int16x8_t to_int16(V a, V b) { // in order
        return vqmovn_high_s32(vqmovn_s32(vcvtnq_s32_f32(a)), vcvtnq_s32_f32(b));
    }
    static float sum(V v) { return vaddvq_f32(v); }
    // The sums of 4 vectors
    static void  sums(const V * v, float * out) {
        vst1q_f32(out, vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])));
    }
    // 16 sums of 4 neighbours
    static void sum_fours(const float * in, float * out) {
        for (int i = 0; i < 4; i++, in += 16) {
            const V v[4] = { load(in), load(in + 4), load(in + 8), load(in + 12) };
            sums(v, out + 4 * i);
        }
    }
    // See sketch.h. Sums of 16 bits hold what eight groups add to them: 3 * 127 * 64.
    template <int R>
    static void sum_strip(const uint8_t * bits, int groups, const int32_t (*ints)[4][4], float * sums) {
        for (int quarter = 0; quarter < 4; quarter++) { // of the keys
            int32x4_t sum[R];
            for (int32x4_t & x : sum) {
                x = vdupq_n_s32(0);
            }
            for (int first = 0; first < groups; first += 8) {
                int16x8_t short_sum[R];
                for (int16x8_t & x : short_sum) {
                    x = vdupq_n_s16(0);
                }
                for (int g = first; g < groups && g < first + 8; g++) {
                    const uint8x16_t x = vld1q_u8(bits + 64 * g + 16 * quarter);
                    for (int s = 0; s < 4; s++) {
                        const int8x16_t y =
                            vreinterpretq_s8_u8(vandq_u8(vshlq_u8(x, vdupq_n_s8(int8_t(-2 * s))), vdupq_n_u8(3)));
                        for (int r = 0; r < R; r++) {
                            const int8x16_t q    = vreinterpretq_s8_s32(vdupq_n_s32(ints[g][s][r]));
                            const int16x8_t low  = vmull_s8(vget_low_s8(y), vget_low_s8(q));
                            const int16x8_t high = vmull_high_s8(y, q);
                            short_sum[r]         = vaddq_s16(short_sum[r], vpaddq_s16(low, high));
                        }
                    }
                }
                for (int r = 0; r < R; r++) {
                    sum[r] = vpadalq_s16(sum[r], short_sum[r]);
                }
            }
            for (int r = 0; r < R; r++) {
                store(sums + 16 * r + 4 * quarter, vcvtq_f32_s32(sum[r]));
            }
        }
    }
    // As that of avx512
    static V rough_exp2(V x) {
        const V y = fma(max(x, set(-126.0f)), set(0x1p23f), set(rough_exp2_bias));
        return vreinterpretq_f32_s32(vcvtnq_s32_f32(y));
    }
    static V     min(V a, V b) { return vminnmq_f32(a, b); } // b where a is NaN
    static float highest(V v) { return vmaxvq_f32(v); }
    static V     at_least(V a, float x) { // zero elsewhere
        return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a), vcltq_f32(a, set(x))));
    }
    static uint32_t nonzero(V a) {
        const uint32_t each[4] = { 1, 2, 4, 8 };
        return vaddvq_u32(vbicq_u32(vld1q_u32(each), vceqq_f32(a, zero())));
    }
    static float scale_of(const void * block) { return half_at(block); }

    // 2^x with a relative error below 2e-7; 0 below -126, 2^127 above 127, NaN if x is.
    static V exp2(V x) {
        const V          floor = set(-126.0f);
        const uint32x4_t live  = vmvnq_u32(vcltq_f32(x, floor));
        x                      = vminq_f32(vmaxq_f32(x, floor), set(127.0f));
        const V n              = vrndnq_f32(x);
        const V f              = vsubq_f32(x, n);
        V       p              = fma(f, set(0.0013276470f), set(0.0096755410f));
        p                      = fma(p, f, set(0.0555071346f));
        p                      = fma(p, f, set(0.2402212024f));
        p                      = fma(p, f, set(0.6931469440f));
        p                      = fma(p, f, set(1.0f));
        const int32x4_t bits   = vaddq_s32(vreinterpretq_s32_f32(p), vshlq_n_s32(vcvtq_s32_f32(n), 23));
        return vreinterpretq_f32_u32(vandq_u32(live, vreinterpretq_u32_s32(bits)));
    }

    // 16 integers times d
    static void scaled(int8x16_t x, V d, float * out) {
        const int16x8_t half[2] = { vmovl_s8(vget_low_s8(x)), vmovl_s8(vget_high_s8(x)) };
        for (int i = 0; i < 2; i++) {
            store(out + 8 * i, mul(d, vcvtq_f32_s32(vmovl_s16(vget_low_s16(half[i])))));
            store(out + 8 * i + 4, mul(d, vcvtq_f32_s32(vmovl_s16(vget_high_s16(half[i])))));
        }
    }

    using plain_blocks::dequantise;

    static void dequantise(type_constant<row_type::q8_0>, const char * block, float * out) {
        const int8_t * q = reinterpret_cast<const int8_t *>(block + 2);
        const V        d = set(scale_of(block));
        scaled(vld1q_s8(q), d, out);
        scaled(vld1q_s8(q + 16), d, out + 16);
    }

    // 32 elements
    template <class Values>
    static void look_up(float scale, const char * nibbles, float * out) {
        const uint8x16_t q      = vld1q_u8(reinterpret_cast<const uint8_t *>(nibbles));
        const V          d      = set(scale);
        const int8x16_t  values = vld1q_s8(Values::at);
        scaled(vqtbl1q_s8(values, vandq_u8(q, vdupq_n_u8(15))), d, out);
        scaled(vqtbl1q_s8(values, vshrq_n_u8(q, 4)), d, out + 16);
    }
    static void dequantise(type_constant<row_type::q4_0>, const char * p, float * out) {
        look_up<q4_0_values>(scale_of(p), p + 2, out);
    }
    static void dequantise(type_constant<row_type::lm4>, const char * p, float * out) {
        look_up<lm4_values>(scale_of(p), p + 2, out);
        look_up<lm4_values>(scale_of(p), p + 18, out + 32);
    }

    // out[j * out_stride + i] = in[i * in_stride + j] for 4 x 4
    static void transpose(const float * in, int64_t in_stride, float * out, int64_t out_stride) {
        const V a = load(in), b = load(in + in_stride), c = load(in + 2 * in_stride), d = load(in + 3 * in_stride);
        const float64x2_t ab0 = vreinterpretq_f64_f32(vtrn1q_f32(a, b)), ab1 = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
        const float64x2_t cd0 = vreinterpretq_f64_f32(vtrn1q_f32(c, d)), cd1 = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
        store(out, vreinterpretq_f32_f64(vtrn1q_f64(ab0, cd0)));
        store(out + out_stride, vreinterpretq_f32_f64(vtrn1q_f64(ab1, cd1)));
        store(out + 2 * out_stride, vreinterpretq_f32_f64(vtrn2q_f64(ab0, cd0)));
        store(out + 3 * out_stride, vreinterpretq_f32_f64(vtrn2q_f64(ab1, cd1)));
    }
};

} // namespace
} // namespace mixedkv
