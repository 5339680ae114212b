// A body of products with weights: the same bits as the scalar twin, in any batch, and near the product in double.
//
//     test_weights ISA

#include "support.h"

#include "check.h"

#include <cmath>

namespace {

using test::problem;

const mixedkv::weights_kernels * body;

void equals_the_twin_and_is_near_the_exact_product() {
    for (const int64_t n_elements : { 32, 96, 512, 544, 1536 }) {
        for (const int64_t n_rows : { 1, 7, 16, 17, 47 }) {
            for (const int64_t n_columns : { 1, 2, 3, 4, 5, 11 }) {
                const problem            p(n_elements, n_rows, n_columns);
                const std::vector<float> out = p.run(*body, 0, n_columns, n_rows);
                CHECK(out == p.run(*mixedkv::weights_scalar(), 0, n_columns, n_rows));
                for (int64_t i = 0; i < n_rows * n_columns; i++) {
                    const auto [sum, size] = p.exact(i % n_rows, i / n_rows);
                    CHECK(std::fabs(out[i] - sum) <= 1e-6 * size);
                }
            }
        }
    }
}

void a_column_has_the_same_bits_in_any_batch() {
    const problem            p(1088, 40, 9);
    const std::vector<float> together = p.run(*body, 0, 9, 40);
    for (int64_t first = 0; first < 9; first++) {
        for (int64_t n = 1; n <= 9 - first; n++) {
            const std::vector<float> some = p.run(*body, first, n, 40);
            CHECK(std::equal(some.begin(), some.end(), together.begin() + first * 40));
        }
    }
}

void rows_may_be_drawn_by_many_threads() {
    const problem p(544, 77, 5);
    CHECK(p.run(*body, 0, 5, 77) == p.run(*body, 0, 5, 16));
    CHECK(p.run(*body, 0, 5, 77) == p.run(*body, 0, 5, 32));
}

// 16 bits hold the sum of 8 pairs of products
void the_largest_integers_do_not_overflow() {
    problem p(64, 16, 4);
    for (auto & block : p.rows) {
        std::memset(block.nibbles, 0xff, sizeof(block.nibbles));
    }
    for (size_t i = 0; i < p.columns.size(); i++) {
        std::memset(p.columns[i].values, i % 2 ? 127 : -127, WEIGHTS_BLOCK);
    }
    const std::vector<float> out = p.run(*body, 0, 4, 16);
    for (int64_t i = 0; i < 64; i++) {
        const auto [sum, size] = p.exact(i % 16, i / 16);
        CHECK(std::fabs(out[i] - sum) <= 1e-6 * size);
    }
}

void scales_below_the_normal_ones() {
    problem p(96, 8, 2);
    for (auto & block : p.rows) {
        block.scale = 3; // 1.8e-7
        block.least = 0x8001;
    }
    CHECK(p.run(*body, 0, 2, 8) == p.run(*mixedkv::weights_scalar(), 0, 2, 8));
    CHECK(p.run(*body, 0, 2, 8)[0] != 0.0f);
}

} // namespace

int main(int argc, char ** argv) {
    CHECK(argc == 2);
    body = test::find_body(argv[1]);
    if (!body) {
        std::printf("%s: not on this machine\n", argv[1]);
        return 77;
    }
    equals_the_twin_and_is_near_the_exact_product();
    a_column_has_the_same_bits_in_any_batch();
    rows_may_be_drawn_by_many_threads();
    the_largest_integers_do_not_overflow();
    scales_below_the_normal_ones();
}
