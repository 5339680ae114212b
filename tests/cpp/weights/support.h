// Random rows and columns, and their product in double precision.

#pragma once

#include "weights/bodies.h"

#include <random>
#include <string>
#include <vector>

namespace test {
namespace {

using namespace mixedkv;

// Null for a name that this machine has no body for
inline const weights_kernels * find_body(const std::string & name) {
    for (const weights_kernels * body : { weights_avx2(), weights_scalar() }) {
        if (body && body->supported() && name == body->name) {
            return body;
        }
    }
    return nullptr;
}

struct problem {
    int64_t                  n_elements, n_rows, n_columns;
    std::vector<row_q4_1>    rows;
    std::vector<column_q8_1> columns;

    int64_t n_blocks() const { return n_elements / WEIGHTS_BLOCK; }

    problem(int64_t elements, int64_t rows_, int64_t columns_) :
        n_elements(elements), n_rows(rows_), n_columns(columns_), rows(n_blocks() * rows_),
        columns(n_blocks() * columns_) {
        std::mt19937                          random(unsigned(elements * 31 + rows_ * 7 + columns_));
        std::uniform_real_distribution<float> size(0.01f, 1.0f);
        for (row_q4_1 & block : rows) {
            block.scale = float_to_half(0.05f * size(random));
            block.least = float_to_half(-0.4f * size(random));
            for (uint8_t & pair : block.nibbles) {
                pair = uint8_t(random());
            }
        }
        for (column_q8_1 & block : columns) {
            const float scale = 0.02f * size(random);
            int         sum   = 0;
            for (int8_t & value : block.values) {
                value = int8_t(int(random() % 255) - 127);
                sum += value;
            }
            block.scale = float_to_half(scale);
            block.sum   = float_to_half(scale * float(sum));
        }
    }

    std::vector<column_block> packed() const {
        std::vector<column_block> out(columns.size());
        weights_pack(WEIGHTS_Q4_1, columns.data(), out.data(), int64_t(out.size()));
        return out;
    }

    // Of `n` columns from `first` on, in calls of `at_once` rows
    std::vector<float> run(const weights_kernels & body, int64_t first, int64_t n, int64_t at_once) const {
        const std::vector<column_block> all = packed();
        std::vector<float>              out(n * n_rows, -1e30f);
        const weights_product           product = { WEIGHTS_Q4_1,
                                                    n_elements,
                                                    n_rows,
                                                    n,
                                                    rows.data(),
                                                    n_blocks() * sizeof(row_q4_1),
                                                    all.data() + first * n_blocks(),
                                                    out.data(),
                                                    n_rows * sizeof(float) };
        for (int64_t r = 0; r < n_rows; r += at_once) {
            body.run(product, r, std::min(r + at_once, n_rows));
        }
        return out;
    }

    // The product, and what its terms add up to without their signs
    std::pair<double, double> exact(int64_t row, int64_t column) const {
        double sum = 0.0, size = 0.0;
        for (int64_t b = 0; b < n_blocks(); b++) {
            const row_q4_1 &    w     = rows[row * n_blocks() + b];
            const column_q8_1 & x     = columns[column * n_blocks() + b];
            int                 whole = 0;
            for (int i = 0; i < WEIGHTS_BLOCK; i++) {
                const int nibble = i < 16 ? w.nibbles[i] & 15 : w.nibbles[i - 16] >> 4;
                whole += nibble * x.values[i];
            }
            const double product = double(half_to_float(w.scale)) * half_to_float(x.scale) * whole;
            const double offset  = double(half_to_float(w.least)) * half_to_float(x.sum);
            sum += product + offset;
            size += std::abs(product) + std::abs(offset);
        }
        return { sum, size };
    }
};

} // namespace
} // namespace test
