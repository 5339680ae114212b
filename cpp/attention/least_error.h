// Rows of Q4_0 and Q5_0 in scales of their own. ggml gives the largest element of a block the largest integer; of
// rotated rows, which are near Gaussian, the integers of a scale a little off that leave 0.9 of the squared error, in
// the same blocks. With them a block is stored as long as it is.

#pragma once

#include <cstdint>

namespace mixedkv {

// The integers of a block, and what its largest element becomes in the scales that are tried, before it is rounded to
// `low`: so rows that are unpacked and stored again, by ggml too, stay as they are.
struct q4_0_integers {
    static constexpr int   low = -8, high = 7, bytes = 18;
    static constexpr float first = -8.45f, second = -8.15f, third = -7.85f, fourth = -7.55f;
};

struct q5_0_integers {
    static constexpr int   low = -16, high = 15, bytes = 22;
    static constexpr float first = -16.45f, second = -16.15f, third = -15.85f, fourth = -15.55f;
};

// n: elements, a multiple of 32. The same bits on every machine.
void q4_0_from_float(const float * x, void * row, int64_t n);
void q5_0_from_float(const float * x, void * row, int64_t n);

} // namespace mixedkv
