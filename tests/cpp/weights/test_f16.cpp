// A body of products with rows in 16 bits: near those in F64, with the same bits in any batch.
//
//     test_f16 ISA

#include "support.h"

#include "check.h"

#include <cmath>

namespace {

using namespace test;

const weights_kernels * body;

// Whether products are those in F64 of columns rounded to 16 bits, as llama.cpp rounds them, but for so much of what
// their terms sum up to
void check(const f16_problem & p, double most) {
    const std::vector<float> got = p.run(*body);
    for (int64_t c = 0; c < p.n_columns; c++) {
        for (int64_t r = 0; r < p.n_rows; r++) {
            double sum = 0.0, sizes = 0.0;
            for (int64_t i = 0; i < p.n_elements; i++) {
                const double x = value_of(p.type, bits_of(p.type, p.columns[c * p.n_elements + i]));
                const double w = value_of(p.type, p.rows[r * p.n_elements + i]);
                sum += x * w;
                sizes += std::fabs(x * w);
            }
            CHECK(std::fabs(got[c * p.n_rows + r] - sum) <= most * sizes);
        }
    }
}

void products_are_near_those_in_f64(int type) {
    for (const int64_t n_blocks : { 1, 3, 8, 17, 48 }) {
        for (const int64_t n_rows : { 1, 15, 16, 33, 128, 161 }) {
            for (const int64_t n_columns : { 1, 2, 16, 17, 40 }) {
                const f16_problem p(type, n_blocks * WEIGHTS_BLOCK, n_rows, n_columns);
                check(p, 5e-6);
            }
        }
    }
}

void a_column_has_the_same_bits_in_any_batch(int type) {
    const f16_problem        p(type, 608, 70, 40);
    const std::vector<float> together = p.run(*body);
    for (int64_t first = 0; first < 40; first += 3) {
        for (int64_t n = 1; n <= 40 - first; n += 4) {
            const std::vector<float> some = p.run(*body, first, n, 70);
            CHECK(std::equal(some.begin(), some.end(), together.begin() + first * 70));
        }
    }
}

void rows_may_be_drawn_by_many_threads(int type) {
    const f16_problem p(type, 768, 333, 37);
    for (const int64_t at_once : { 32, 64, 96, 160 }) {
        CHECK(p.run(*body, 0, 37, at_once) == p.run(*body));
    }
}

// Numbers that F16 holds without a leading one, large ones, and zeros
void numbers_of_all_sizes(int type) {
    f16_problem p(type, 256, 40, 20);
    for (size_t i = 0; i < p.rows.size(); i++) {
        p.rows[i] = bits_of(type, std::ldexp(float(i % 2048) - 1024.0f, -int(i % 35)));
    }
    for (size_t i = 0; i < p.columns.size(); i++) {
        p.columns[i] = std::ldexp(float(i % 4096) - 2048.0f, -int(i % 30));
    }
    check(p, 1.6e-5);
}

// Whatever its bits are: memory that was never written may hold any
void nan_stays_nan(int type) {
    for (const uint32_t bits : { 0x7fffffffu, 0x7f800001u, 0x7fc00000u, 0xffffffffu, 0xff800001u }) {
        f16_problem p(type, 64, 3, 2);
        std::memcpy(&p.columns[37], &bits, sizeof(bits));
        const std::vector<float> got = p.run(*body);
        for (size_t i = 0; i < got.size(); i++) {
            CHECK(std::isnan(got[i]) == (i < 3));
        }
    }
}

void whole_numbers_are_exact(int type) {
    f16_problem p(type, 128, 48, 33);
    for (size_t i = 0; i < p.rows.size(); i++) {
        p.rows[i] = bits_of(type, float(i * 7 % 255) - 127.0f);
    }
    for (size_t i = 0; i < p.columns.size(); i++) {
        p.columns[i] = float(i * 11 % 255) - 127.0f;
    }
    check(p, 0.0);
}

} // namespace

int main(int argc, char ** argv) {
    CHECK(argc == 2);
    body = mixedkv::find_weights(argv[1], true);
    if (!body) {
        std::printf("%s: not on this machine\n", argv[1]);
        return 77;
    }
    for (const int type : { int(WEIGHTS_F16), int(WEIGHTS_BF16) }) {
        products_are_near_those_in_f64(type);
        a_column_has_the_same_bits_in_any_batch(type);
        rows_may_be_drawn_by_many_threads(type);
        numbers_of_all_sizes(type);
        nan_stays_nan(type);
        whole_numbers_are_exact(type);
    }
}
