// Makes the sketches of sketch.h, for a vector layer L.

#pragma once

#include "attention/tile.h"
#include "sketch.h"

#include "attention/simd/half.h"

#include <cmath>

namespace mixedkv {
namespace {

template <class L>
struct sketcher {
    using V = typename L::V;

    // Of a row, zeros behind it up to a multiple of 16. Returns half the step.
    static float sketch_row(const float * x, int d, uint8_t * bits) {
        const int n       = sketch_groups(d) * 16;
        V         squares = L::zero(), dot = L::zero(), norm = L::zero();
        for (int i = 0; i < n; i += L::width) {
            squares = L::fma(L::load(x + i), L::load(x + i), squares);
        }
        const float square = L::sum(squares);
        if (!(square < INFINITY)) {
            return INFINITY; // what is no number is always read
        }
        const float step     = 2.0f * sketch_half_step * sqrtf(square / float(d));
        const V     per_step = L::set(step > 0.0f ? 1.0f / step : 0.0f);
        const V     rounding = L::set(0x1.8p23f); // added, it leaves no bits behind the point
        float       two_bits[attention_max_head_size];
        for (int i = 0; i < n; i += L::width) {
            const V y     = L::fma(L::load(x + i), per_step, L::set(1.5f));
            const V whole = L::sub(L::add(L::min(L::max(y, L::zero()), L::set(3.0f)), rounding), rounding);
            const V level = L::fma(whole, L::set(2.0f), L::set(-3.0f));
            L::store(two_bits + i, whole);
            dot  = L::fma(level, L::load(x + i), dot);
            norm = L::fma(level, level, norm);
        }
        for (int i = d; i < n; i++) {
            two_bits[i] = 0.0f; // where the level was 1
        }
        for (int i = 0; i < n; i += 16, bits += 64) {
            const float * at = two_bits + i;
            for (int b = 0; b < 4; b++) {
                bits[b] = uint8_t(at[b] + 4.0f * at[4 + b] + 16.0f * at[8 + b] + 64.0f * at[12 + b]);
            }
        }
        return L::sum(dot) / (L::sum(norm) - float(n - d));
    }

    // As attention_sketch()
    static void run(const attention_rows & k, int64_t key, int n_head_kv, int d_k, uint8_t * bits, uint16_t * steps,
                    int64_t strips) {
        const int groups = sketch_groups(d_k);
        float     row[attention_max_head_size + 16];
        for (int head = 0; head < n_head_kv; head++) {
            uint8_t * to = bits + head * strips * groups * 64;
            std::memset(to, 0, groups * 64);
            for (int i = 0; i < attention_strip; i++) {
                tile<L>::dequantise(k, key + i, head, d_k, row);
                steps[head * strips * attention_strip + i] = float_to_half(sketch_row(row, d_k, to + 4 * i));
            }
        }
    }
};

} // namespace
} // namespace mixedkv
