// A sketch of K: two bits of each element, 0..3 for -3, -1, 1 and 3 times half a step, and the half step of each key.
// It is kept in strips of 16 keys of a KV head. What a query scores a key with is estimated from that.
//
// A strip has 64 bytes for every 16 elements, 4 for each key: bits 2 s and 2 s + 1 of byte b are those of element 4 s +
// b. So four masks make of a vector what integers of Q can be multiplied with. Behind the last element all are zero.

#pragma once

#include "attention/row_types.h"

#include <cmath>

namespace mixedkv {
namespace {

constexpr int sketch_groups(int d) {
    return (d + 15) / 16;
}

// What two bits of an element lose, the variance in units of the squared half step, for normally distributed elements:
// their best four equidistant levels are odd multiples of 0.498 of the standard deviation, and lose 0.1188 of the
// variance.
constexpr float sketch_half_step = 0.498f;
constexpr float sketch_loss      = 0.1188f / (sketch_half_step * sketch_half_step);

// Four rows of Q in bytes. A row's score of a key is half_step * (factor * sum + bias), where sum is that of integers
// times the two bits of each element.
struct sketch_query {
    float factor[4];
    float bias[4];
    int32_t (*ints)[4][4]; // [groups][s][row], four elements each

    // Quantises four rows of Q to 8 bits with a scale of their own. Rows have d elements and are `ld` floats apart
    void pack(const float * q, int64_t ld, int d) {
        for (int r = 0; r < 4; r++, q += ld) {
            float largest = 0.0f;
            for (int i = 0; i < d; i++) {
                const float x = q[i] < 0.0f ? -q[i] : q[i];
                largest       = x > largest ? x : largest; // NaN is spread elsewhere
            }
            const float to_int = largest > 1e-35f && largest < INFINITY ? 127.0f / largest : 0.0f; // it is finite
            int32_t     sum    = 0;
            for (int g = 0; g < sketch_groups(d); g++) {
                int8_t bytes[16] = {};
                for (int i = 0; i < 16 && 16 * g + i < d; i++) {
                    const float x = q[16 * g + i] * to_int;
                    bytes[i]      = x == x ? int8_t(x + (x < 0.0f ? -0.5f : 0.5f)) : 0;
                    sum += bytes[i];
                }
                for (int s = 0; s < 4; s++) {
                    std::memcpy(&ints[g][s][r], bytes + 4 * s, 4);
                }
            }
            factor[r] = 2.0f * largest / 127.0f;
            bias[r]   = -1.5f * factor[r] * float(sum);
        }
    }
};

} // namespace
} // namespace mixedkv
