// Rows of lm4 and tc3 that ggml's own nodes get, cast and set: shifts of K do, and what attends through a view in F16.

#pragma once

#include "store.h"

namespace mixedkv {
namespace cuda {

// Where stored rows lie among those of their stream
struct row_numbers {
    const char * data    = nullptr; // nullptr: one after the other
    bool         is_wide = false;   // int64_t, else int32_t
    int64_t      stream  = 0;       // elements from those of a stream to the next one's

    MIXEDKV_SHARED_MEMBER int64_t get(int i_stream, int i) const {
        const int64_t at = i_stream * stream + i;
        if (!data) {
            return i;
        }
        return is_wide ? reinterpret_cast<const int64_t *>(data)[at] : reinterpret_cast<const int32_t *>(data)[at];
    }
};

struct convert_problem {
    int         n_elements = 0; // of a row, a multiple of 64
    int         n_rows     = 0; // of a stream
    int         n_stream   = 1;
    row_view    stored; // rows of lm4 or tc3
    row_view    plain;  // in F32, or F16
    row_numbers numbers;
    bool        to_f16 = false;
};

// The index of the level of an element of a block
MIXEDKV_DEVICE int level_index(stored_type type, const uint8_t * block, int i) {
    const int half = i / 32, e = i % 32;
    if (type == stored_type::lm4) {
        const int byte = block[2 + 16 * half + e % 16];
        return e < 16 ? byte & 15 : byte >> 4;
    }
    const uint8_t * fields = block + (half ? 18 : 2);
    const uint8_t * path   = block + (half ? 14 : 10);
    const int       t      = place_of(e);
    const auto      bit    = [&](int at) { return at < 0 ? 0 : path[at / 8] >> at % 8 & 1; };
    const int       field  = fields[t % 2 * 4 + t / 8] >> (t & 6) & 3;
    return 4 * field + 2 * (bit(t) ^ bit(t - 2)) + bit(t - 1);
}

template <class Rows>
MIXEDKV_DEVICE float level_at(int index) {
    constexpr uint32_t words[4] = { Rows::table(0), Rows::table(4), Rows::table(8), Rows::table(12) };
    const uint32_t     low = index & 4 ? words[1] : words[0], high = index & 4 ? words[3] : words[2];
    return float(int((index & 8 ? high : low) >> 8 * (index & 3) & 255) - 128);
}

constexpr int convert_threads = 128;

// Grid: rows, elements by convert_threads, streams.
template <int unused>
MIXEDKV_KERNEL(convert_threads, 1)
get_kernel(const convert_problem p, stored_type type) {
    wait_for_previous();
    start_next();
    const int row = block_x(), i = block_y() * convert_threads + thread(), stream = block_z();
    if (i >= p.n_elements) {
        return;
    }
    const int    bytes = type == stored_type::lm4 ? LM4_BYTES : TC3_BYTES;
    const char * from =
        p.stored.data + stream * p.stored.stream + p.numbers.get(stream, row) * p.stored.row + i / 64 * bytes;
    const int   index = level_index(type, reinterpret_cast<const uint8_t *>(from), i % 64);
    const float level = type == stored_type::lm4 ? level_at<lm4_rows>(index) : level_at<tc3_rows>(index);
    const float x     = exact_product(load_half(from), level);
    char *      to    = const_cast<char *>(p.plain.data) + stream * p.plain.stream + row * p.plain.row;
    if (p.to_f16) {
        store_half(to + 2 * i, x);
    } else {
        reinterpret_cast<float *>(to)[i] = x;
    }
}

// Grid: rows, blocks of 64 by store_warps. Block: store_warps warps, of which each has one.
template <int unused>
MIXEDKV_KERNEL(store_warps * warp_size, 1)
set_kernel(const convert_problem p, stored_type type) {
    wait_for_previous();
    start_next();
    const int row = block_x(), block = block_y() * store_warps + thread() / warp_size;
    if (64 * block >= p.n_elements) {
        return;
    }
    const auto * from = reinterpret_cast<const float *>(p.plain.data + row * p.plain.row) + 64 * block;
    const float  x[2] = { from[lane()], from[lane() + warp_size] };
    write_head(type, false, const_cast<char *>(p.stored.data) + p.numbers.get(0, row) * p.stored.row, block, x);
}

} // namespace cuda
} // namespace mixedkv
