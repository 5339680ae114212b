// The conversion to tc3 and back: its error, its layout, and what it does with rows that no model has.

#include "attention/tc3.h"

#include "check.h"
#include "packed_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace {

constexpr test::packed_rows<TC3_ELEMENTS, TC3_BYTES> rows{ tc3_from_float, tc3_to_float };

// Eight levels for each element, with the best of five scales, leave 2.96e-2
void error_of_gaussian_rows() {
    for (const float size : { 1e-3f, 1.0f, -1.0f, 3e3f }) {
        const auto x = test::gauss(1 << 16, size);
        CHECK(test::relative_error(x, rows.stored(x)) < 2.25e-2);
    }
}

// As the header has it, word by word
void layout_is_that_of_the_header() {
    const int levels[16] = { TC3_LEVELS };
    for (int turn = 0; turn < 256; turn++) {
        std::vector<uint8_t> block(TC3_BYTES);
        const uint16_t       one = test::to_half(1.0f);
        std::memcpy(block.data(), &one, 2);
        for (int i = 2; i < TC3_BYTES; i++) {
            block[i] = uint8_t(turn * i * i + 37 * i);
        }
        const std::vector<float> x = rows.dequantise(block);
        for (int half = 0; half < 2; half++) {
            const uint8_t * fields = &block[half ? 18 : 2];
            const uint8_t * path   = &block[half ? 14 : 10];
            const auto      bit    = [&](int t) { return t < 0 ? 0 : path[t / 8] >> t % 8 & 1; };
            for (int t = 0; t < 32; t++) {
                const int position = t % 8;
                const int column   = (position & 4) | (position & 1) << 1 | (position & 2) >> 1;
                const int field    = fields[(position & 1) * 4 + t / 8] >> (position & 6) & 3;
                const int index    = 4 * field + 2 * (bit(t) ^ bit(t - 2)) + bit(t - 1);
                CHECK(x[32 * half + 4 * column + t / 8] == float(levels[index]));
            }
        }
    }
}

void rows_that_no_model_has() {
    const std::vector<float> zeros(2 * TC3_ELEMENTS);
    CHECK(rows.stored(zeros) == zeros);

    std::vector<float> one = zeros; // the other block stays zero
    one[70]                = 3.0f;
    const auto back        = rows.stored(one);
    CHECK(std::fabs(back[70] - 3.0f) < 2.0f && std::equal(zeros.begin(), zeros.begin() + TC3_ELEMENTS, back.begin()));

    for (const float x : { 65504.0f, -65504.0f, 1e-7f }) {
        for (const float y : rows.stored(std::vector<float>(TC3_ELEMENTS, x))) {
            CHECK(std::isfinite(y) && std::fabs(y - x) <= 0.3f * std::fabs(x) + 3e-8f * 127);
        }
    }
    for (const float odd : { NAN, INFINITY }) { // its block alone is lost
        std::vector<float> x = test::gauss(2 * TC3_ELEMENTS, 1.0f);
        const auto         y = rows.stored(x);
        x[3]                 = odd;
        const auto z         = rows.stored(x);
        CHECK(std::memcmp(&y[TC3_ELEMENTS], &z[TC3_ELEMENTS], TC3_ELEMENTS * sizeof(float)) == 0);
        for (const float value : z) {
            CHECK(std::isfinite(value));
        }
    }
}

} // namespace

int main() {
    error_of_gaussian_rows();
    layout_is_that_of_the_header();
    rows_that_no_model_has();
    CHECK(rows.dot_is_that_of_the_stored_row(tc3_dot));
    return 0;
}
