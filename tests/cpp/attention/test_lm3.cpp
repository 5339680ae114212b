// The conversion to lm3 and back: its error, and what it does with rows that no model has.

#include "attention/lm3.h"

#include "check.h"
#include "packed_rows.h"

#include <cmath>
#include <cstring>
#include <vector>

namespace {

constexpr test::packed_rows<LM3_ELEMENTS, LM3_BYTES> rows{ lm3_from_float, lm3_to_float };

// Mean squared error by mean square, of elements [first, last) of each block
double error_of(const std::vector<float> & x, int first, int last) {
    const std::vector<float> y     = rows.unpack(rows.pack(x));
    double                   error = 0.0, size = 0.0;
    for (size_t i = 0; i < x.size(); i++) {
        const int at = int(i % LM3_ELEMENTS);
        if (first <= at && at < last) {
            error += (double(x[i]) - y[i]) * (double(x[i]) - y[i]);
            size += double(x[i]) * x[i];
        }
    }
    return error / size;
}

// What the best levels for Gaussian numbers leave, 2.5e-3, 9.5e-3, 3.45e-2, 0.118 and 0.363, and little more
void test_error() {
    for (const float size : { 1e-3f, 1.0f, 100.0f }) {
        const std::vector<float> x = test::gauss(512 * LM3_ELEMENTS, size);
        CHECK(error_of(x, 0, 8) < 3.3e-3);
        CHECK(error_of(x, 8, 16) < 1.1e-2);
        CHECK(error_of(x, 16, 32) < 3.8e-2);
        CHECK(error_of(x, 32, 48) < 0.125);
        CHECK(error_of(x, 48, 56) < 0.39);
        CHECK(error_of(x, 56, 64) == 1.0);
    }
}

// Where the header says that they lie
int bits_of(const uint8_t * bytes, int byte, int bit, int n) {
    return bytes[2 + byte] >> bit & ((1 << n) - 1);
}

void test_layout() {
    const int levels[5][32] = {
        { LM3_LEVELS_5 }, { LM3_LEVELS_4 }, { LM3_LEVELS_3 }, { LM3_LEVELS_2 }, { LM3_LEVELS_1 }
    };
    for (int turn = 0; turn < 256; turn++) {
        std::vector<uint8_t> block(LM3_BYTES);
        const uint16_t       one = test::to_half(1.0f);
        std::memcpy(block.data(), &one, 2);
        for (int i = 0; i < 20; i++) {
            block[2 + i] = uint8_t(turn + 37 * i);
        }
        const std::vector<float> x = rows.unpack(block);
        const uint8_t *          b = block.data();
        for (int i = 0; i < 8; i++) {
            CHECK(x[i] == float(levels[0][bits_of(b, i, 0, 5)]));
            CHECK(x[8 + i] == float(levels[1][bits_of(b, 8 + i, 0, 4)]));
            CHECK(x[16 + i] == float(levels[2][bits_of(b, i, 5, 3)]));
            CHECK(x[24 + i] == float(levels[2][bits_of(b, 8 + i, 4, 3)]));
            CHECK(x[48 + i] == float(levels[4][bits_of(b, 8 + i, 7, 1)]));
            CHECK(x[56 + i] == 0.0f);
        }
        for (int i = 0; i < 16; i++) {
            CHECK(x[32 + i] == float(levels[3][bits_of(b, 16 + i % 4, i / 4 * 2, 2)]));
        }
    }
}

void test_odd_rows() {
    const std::vector<float> zeros(2 * LM3_ELEMENTS);
    CHECK(rows.unpack(rows.pack(zeros)) == zeros);

    std::vector<float> last(LM3_ELEMENTS); // nothing but what has no bits
    last[60] = 5.0f;
    CHECK(rows.unpack(rows.pack(last)) == std::vector<float>(LM3_ELEMENTS));

    for (const float x : { 65504.0f, -65504.0f, 1e-7f }) {
        for (const float y : rows.unpack(rows.pack(std::vector<float>(LM3_ELEMENTS, x)))) {
            CHECK(std::isfinite(y));
        }
    }
    for (const float odd : { NAN, INFINITY }) { // its block alone is lost
        std::vector<float> x = test::gauss(2 * LM3_ELEMENTS, 1.0f);
        const auto         y = rows.unpack(rows.pack(x));
        x[3]                 = odd;
        const auto z         = rows.unpack(rows.pack(x));
        CHECK(std::memcmp(&y[LM3_ELEMENTS], &z[LM3_ELEMENTS], LM3_ELEMENTS * sizeof(float)) == 0);
    }
}

} // namespace

int main() {
    test_error();
    test_layout();
    test_odd_rows();
    return 0;
}
