// A body of products with weights: the same bits as the scalar twin for each type, in any batch.
// tests/python/model/test_weight_products.py compares the types with products in F32.
//
//     test_weights ISA

#include "support.h"

#include "check.h"

#include <cmath>

namespace {

using test::problem;

const mixedkv::weights_kernels * body;

void equals_the_twin(int type) {
    int64_t unit = 32;
    mixedkv::with_row_type(type, [&](auto * row) { unit *= mixedkv::traits<mixedkv::row_of<decltype(row)>>.blocks; });
    for (const int64_t n_units : { 1, 3, 16, 17, 48 }) {
        for (const int64_t n_rows : { 1, 7, 16, 17, 32, 47 }) {
            for (const int64_t n_columns : { 1, 2, 3, 4, 5, 11, 24, 40 }) {
                const problem p(type, unit * (unit == 32 ? n_units : n_units % 7), n_rows, n_columns);
                CHECK(p.run(*body) == p.run(*mixedkv::weights_scalar()));
            }
        }
    }
}

void a_column_has_the_same_bits_in_any_batch(int type) {
    const problem            p(type, 1280, 40, 70);
    const std::vector<float> together = p.run(*body);
    for (int64_t n = 1; n <= 70; n++) {
        const int64_t            first = n * 13 % (71 - n);
        const std::vector<float> some  = p.run(*body, first, n, 40);
        CHECK(std::equal(some.begin(), some.end(), together.begin() + first * 40));
    }
}

void columns_may_be_chosen(int type) {
    const problem            p(type, 768, 40, 270);
    const std::vector<float> all = p.run(*body);
    for (const int64_t n : { 1, 2, 9, 16, 41, 270 }) {
        const std::vector<float> some = p.run_chosen(*body, n);
        for (int64_t c = 0; c < n; c++) {
            CHECK(std::equal(some.begin() + c * 40, some.begin() + (c + 1) * 40, all.begin() + (269 - c) * 40));
        }
    }
}

void rows_may_be_drawn_by_many_threads(int type) {
    for (const int64_t n_columns : { 1, 5, 33 }) {
        const problem p(type, 768, 147, n_columns);
        CHECK(p.run(*body) == p.run(*body, 0, n_columns, 16));
        CHECK(p.run(*body) == p.run(*body, 0, n_columns, 32));
    }
}

// The integers of a block are as large as they get, with either sign.
void the_largest_integers_do_not_overflow(int type) {
    for (const char byte : { char(0xff), char(0x80), char(0x7f), char(0) }) {
        problem p(type, 512, 16, 18);
        std::fill(p.rows.begin(), p.rows.end(), byte);
        p.set_scales([] { return mixedkv::float_to_half(0.01f); }, [] { return mixedkv::float_to_half(0.1f); });
        for (size_t i = 0; i < p.columns.size(); i++) {
            std::memset(p.columns[i].values, i % 2 ? 127 : -127, WEIGHTS_BLOCK);
        }
        CHECK(p.run(*body) == p.run(*mixedkv::weights_scalar()));
    }
}

void scales_below_the_normal_ones(int type) {
    problem p(type, 768, 8, 16);
    p.set_scales([] { return uint16_t(3); }, [] { return uint16_t(0x8001); }); // 1.8e-7
    CHECK(p.run(*body) == p.run(*mixedkv::weights_scalar()));
    CHECK(p.run(*body)[0] != 0.0f);
}

void sums_are_near_those_in_double_precision(int type) {
    std::mt19937 random(unsigned(77 + type));
    for (int i = 0; i < 4; i++) {
        const int64_t            n_elements = 256 * int64_t(1 + random() % 4);
        const problem            p(type, n_elements, int64_t(1 + random() % 40), int64_t(1 + random() % 20));
        const std::vector<float> elements = p.elements(), out = p.run(*body);
        for (int64_t c = 0; c < p.n_columns; c++) {
            for (int64_t r = 0; r < p.n_rows; r++) {
                double sum = 0.0, most = 0.0;
                for (int64_t e = 0; e < n_elements; e++) {
                    const auto & block = p.columns[c * p.n_blocks() + e / WEIGHTS_BLOCK];
                    const double x = double(elements[e * p.n_rows + r]) * double(mixedkv::half_to_float(block.scale)) *
                                     block.values[e % WEIGHTS_BLOCK];
                    sum += x;
                    most += std::fabs(x);
                }
                CHECK(std::fabs(out[c * p.n_rows + r] - sum) < 1e-6 * most);
            }
        }
    }
}

// Of the twin: what it adds up, in whole numbers that F32 holds
void the_twin_adds_what_rows_hold() {
    problem p(WEIGHTS_Q4_1, 64, 1, 1);
    std::fill(p.rows.begin(), p.rows.end(), char(0x21));
    p.set_scales([] { return mixedkv::float_to_half(2.0f); }, [] { return mixedkv::float_to_half(-4.0f); });
    for (auto & block : p.columns) {
        block.scale = mixedkv::float_to_half(0.5f);
        std::memset(block.values, 3, WEIGHTS_BLOCK);
    }
    // 2 blocks of 16 elements of 1 and of 2, times 2, minus 4; times 1.5
    CHECK(p.run(*mixedkv::weights_scalar())[0] == 2 * 16 * 1.5f * (2 + 4 - 8));
}

} // namespace

int main(int argc, char ** argv) {
    CHECK(argc == 2);
    body = test::find_body(argv[1]);
    if (!body) {
        std::printf("%s: not on this machine\n", argv[1]);
        return 77;
    }
    for (const test::named_type & of : test::types) {
        if (!of.is_read_by(*body)) {
            continue;
        }
        const int type = of.type;
        std::printf("%s\n", of.name);
        equals_the_twin(type);
        a_column_has_the_same_bits_in_any_batch(type);
        columns_may_be_chosen(type);
        rows_may_be_drawn_by_many_threads(type);
        the_largest_integers_do_not_overflow(type);
        scales_below_the_normal_ones(type);
        sums_are_near_those_in_double_precision(type);
    }
    the_twin_adds_what_rows_hold();
}
