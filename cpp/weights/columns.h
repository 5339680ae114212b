// Columns for products with quantised rows, one after the other: rounded to Q8_0 by llama.cpp and laid out for the
// type.

#pragma once

#include "bodies.h"

namespace mixedkv {
namespace {

inline size_t column_bytes(int64_t n_elements) {
    return size_t(n_elements) / WEIGHTS_BLOCK * sizeof(column_block);
}

// Column c of a product, as packed
inline const column_block * packed_column(const weights_product & p, int64_t c) {
    const int64_t from = p.chosen ? p.chosen[2 * c] : c;
    return reinterpret_cast<const column_block *>(static_cast<const char *>(p.columns) +
                                                  from * column_bytes(p.n_elements));
}

// Where its products go
inline float * out_column(const weights_product & p, int64_t c) {
    const int64_t to = p.chosen ? p.chosen[2 * c + 1] : c;
    return reinterpret_cast<float *>(reinterpret_cast<char *>(p.out) + to * p.out_bytes);
}

template <class Row>
void pack_block(const column_q8_0 & in, column_block & out) {
    int first = 0, second = 0;
    for (int i = 0; i < WEIGHTS_BLOCK / 2; i++) {
        first += in.values[i];
        second += in.values[i + WEIGHTS_BLOCK / 2];
    }
    out.scale    = half_to_float(in.scale);
    out.sum      = out.scale * float(first + second);
    out.start[0] = -traits<Row>.bias * (traits<Row>.scales == 1 ? first + second : first);
    out.start[1] = -traits<Row>.bias * second;
    std::memset(out.halves, 0, sizeof(out.halves));
    std::memcpy(out.halves[0] + 2, in.values, WEIGHTS_BLOCK / 2);
    std::memcpy(out.halves[1] + 2, in.values + WEIGHTS_BLOCK / 2, WEIGHTS_BLOCK / 2);
}

inline size_t no_work_bytes(int64_t, int64_t) {
    return 0;
}

inline size_t quantised_bytes(int, int64_t n_elements, int64_t n_columns) {
    return size_t(n_columns) * column_bytes(n_elements);
}

// Calls f with each block of x as llama.cpp rounds it.
template <class F>
inline void for_each_rounded(const weights_columns & columns, const float * x, int64_t n_blocks, F && f) {
    constexpr int64_t       at_once = 32;
    alignas(64) column_q8_0 rounded[at_once];

    for (int64_t b = 0, some; b < n_blocks; b += some) {
        some = n_blocks - b < at_once ? n_blocks - b : at_once;
        columns.quantise(x + b * WEIGHTS_BLOCK, rounded, some * WEIGHTS_BLOCK);
        for (int64_t i = 0; i < some; i++) {
            f(b + i, rounded[i]);
        }
    }
}

inline void pack_quantised(const weights_columns & columns, const float * x, int64_t column, int64_t first, int64_t n) {
    auto * out = reinterpret_cast<column_block *>(static_cast<char *>(columns.packed) +
                                                  column * column_bytes(columns.n_elements)) +
                 first;
    with_row_type(columns.type, [&](auto * row) {
        using Row = row_of<decltype(row)>;
        for_each_rounded(columns, x, n, [&](int64_t b, const column_q8_0 & in) { pack_block<Row>(in, out[b]); });
    });
}

} // namespace
} // namespace mixedkv
