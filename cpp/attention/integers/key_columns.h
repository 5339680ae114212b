// Prefill over columns of keys: those of a block are unpacked once, 16 at a time. Vectors is a vector layer, Body has
// columns and score_rows, Decode the rows of Q.

#pragma once

#include "integer_decode.h"

namespace mixedkv {
namespace {

template <class Vectors, class Body, class Decode = Body>
struct key_columns {
    using L = Vectors;

    static constexpr int  most_rows = 4;
    static constexpr bool pads_rows = false;

    static void pack_rows(const attention_args & a, const item_memory & m, int first) {
        integer_decode<Decode>::pack_quad(a, m, first);
    }

    // [group of 16 keys, block]
    template <row_type type>
    static void unpack_keys(const char * p, int64_t row, int n_blocks, int b, int group, float * panel) {
        auto * to = reinterpret_cast<typename Body::columns_of_block *>(panel);
        Body::template columns<type>(p, row, to[group * n_blocks + b]);
    }

    // s[R][key_block] of the rows from `row` on
    template <row_type type, int R>
    static void score(const attention_args & a, const item_memory & m, int row, const float * panel,
                      const float (*scales)[key_block], float * s) {
        const int    n_blocks = a.d_k / 32;
        const auto * keys     = reinterpret_cast<const typename Body::columns_of_block *>(panel);
        const auto * quads    = integer_decode<Decode>::quads(a, m) + row / 4 * n_blocks;
        for (int g = 0; g < 4; g++) {
            alignas(32) float four[4 * key_block];
            for (int r = 0; r < 4; r++) {
                for (int i = 0; i < 16; i += L::width) {
                    L::store(four + r * key_block + i, L::zero());
                }
            }
            for (int b = 0; b < n_blocks; b++) {
                Body::template score_rows<type, 4>(keys[g * n_blocks + b], scales[b] + 16 * g, quads[b], four);
            }
            for (int r = 0; r < R; r++) {
                std::memcpy(s + r * key_block + 16 * g, four + (row + r) % 4 * key_block, 16 * sizeof(float));
            }
        }
    }
};

} // namespace
} // namespace mixedkv
