// The twin that the others are compared with, bit by bit.

#include "bodies.h"

#include <cmath>

namespace mixedkv {
namespace {

float product_q4_1(const row_q4_1 * row, const column_block * column, int64_t n_blocks) {
    float sum = 0.0f;
    for (int64_t b = 0; b < n_blocks; b++) {
        int32_t whole = 0;
        for (int i = 0; i < WEIGHTS_BLOCK / 2; i++) {
            whole += (row[b].nibbles[i] & 15) * column[b].values[i];
            whole += (row[b].nibbles[i] >> 4) * column[b].values[i + WEIGHTS_BLOCK / 2];
        }
        sum = std::fma(float(whole), half_to_float(row[b].scale) * column[b].scale, sum);
        sum = std::fma(half_to_float(row[b].least), column[b].sum, sum);
    }
    return sum;
}

void run(const weights_product & p, int64_t row_0, int64_t row_1) {
    const int64_t n_blocks = p.n_elements / WEIGHTS_BLOCK;
    const size_t  bytes    = weights_column_bytes(p.type, p.n_elements);
    for (int64_t c = 0; c < p.n_columns; c++) {
        const auto * column = reinterpret_cast<const column_block *>(static_cast<const char *>(p.columns) + c * bytes);
        auto *       out    = reinterpret_cast<float *>(reinterpret_cast<char *>(p.out) + c * p.out_bytes);
        for (int64_t r = row_0; r < row_1; r++) {
            const char * row = static_cast<const char *>(p.rows) + r * p.row_bytes;
            out[r]           = product_q4_1(reinterpret_cast<const row_q4_1 *>(row), column, n_blocks);
        }
    }
}

bool supported() {
    return true;
}

} // namespace

const weights_kernels * weights_scalar() {
    static const weights_kernels kernels = { "scalar", supported, run };
    return &kernels;
}

} // namespace mixedkv
