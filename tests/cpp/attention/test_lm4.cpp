// The conversion to lm4 and back: its error, and what it does with rows that no model has.

#include "attention/lm4.h"

#include "check.h"
#include "packed_rows.h"

#include <cmath>
#include <cstring>
#include <vector>

namespace {

constexpr test::packed_rows<LM4_ELEMENTS, LM4_BYTES> rows{ lm4_from_float, lm4_to_float };

// Q4_0 has 7.4e-3 at 4.5 bits, IQ4_NL 6.4e-3
void error_of_gaussian_rows() {
    for (const float size : { 1e-3f, 1.0f, -1.0f, 3e3f }) {
        const auto x = test::gauss(1 << 16, size);
        CHECK(test::relative_error(x, rows.stored(x)) < 6.8e-3);
    }
}

void levels_come_back() {
    const int          levels[16] = { LM4_LEVELS };
    std::vector<float> x(LM4_ELEMENTS);
    for (const float scale : { 0.5f, -0.5f }) {
        for (int i = 0; i < LM4_ELEMENTS; i++) {
            x[i] = scale * float(levels[i * 7 % 16]);
        }
        CHECK(rows.stored(x) == x);
    }
}

void rows_that_no_model_has() {
    const std::vector<float> zeros(2 * LM4_ELEMENTS);
    CHECK(rows.stored(zeros) == zeros);

    std::vector<float> one = zeros;
    one[70]                = 3.0f;
    for (size_t i = 0; i < one.size(); i++) { // no level is 0
        CHECK(std::fabs(rows.stored(one)[i] - one[i]) <= (i < LM4_ELEMENTS ? 0.0f : 0.06f));
    }

    for (const float x : { 65504.0f, -65504.0f, 1e-7f }) {
        for (const float y : rows.stored(std::vector<float>(LM4_ELEMENTS, x))) {
            CHECK(std::fabs(y - x) <= 0.02f * std::fabs(x) + 3e-8f * 127);
        }
    }

    for (const float odd : { NAN, INFINITY }) { // any numbers, and the other block as it was
        std::vector<float> x = test::gauss(2 * LM4_ELEMENTS, 1.0f);
        const auto         y = rows.stored(x);
        x[5]                 = odd;
        const auto z         = rows.stored(x);
        CHECK(std::memcmp(&y[LM4_ELEMENTS], &z[LM4_ELEMENTS], LM4_ELEMENTS * sizeof(float)) == 0);
    }
}

} // namespace

int main() {
    error_of_gaussian_rows();
    levels_come_back();
    rows_that_no_model_has();
    CHECK(rows.dot_is_that_of_the_stored_row(lm4_dot));
    return 0;
}
