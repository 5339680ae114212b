// What bodies share that multiply K and V as integers: the scales of rows, and weights as integers. L is a vector
// layer.

#pragma once

#include "integer_types.h"

#if defined(__aarch64__)
#include "attention/arm/scales.h"
#include "attention/arm/unpack_rows.h"
#else
#include "attention/x86/loads.h"
#include "attention/x86/unpack_rows.h"
#endif

#include <type_traits>

namespace mixedkv {
namespace {

// f(0) .. f(N - 1), written out before GCC decides what lives in registers
template <int N, class F>
[[gnu::always_inline]] inline void unrolled(F f) {
    if constexpr (N > 0) {
        unrolled<N - 1>(f);
        f(std::integral_constant<int, N - 1>{});
    }
}

// Decode of an item: Q of each head is packed when it is needed, then each head attends to block after block of keys.
//   pack(m, row)               packs four rows of Q from `row` on
//   attend(head, m, span)      attends to the keys of a span, all in one segment
template <class Base, class Pack, class Attend>
void decode_blocks(const attention_item & w, Pack pack, Attend attend) {
    const attention_args & a = *w.args;
    for (int i = 0; i < w.n_head; i++) {
        Base::begin(item_memory(a, w.decode, w.n_queries, w.memory, i));
    }
    uint32_t   ready   = 0;
    const auto prepare = [&](const key_span & span) {
        Base::prepare_rows(w, span, ready, [&](const item_memory & m, int row) {
            if (a.d_k % 32 == 0) {
                pack(m, row);
            }
        });
    };
    for_each_block_read(w, key_block, prepare, [&](int i, const key_span & span) {
        attend(w.head0 + i, item_memory(a, w.decode, w.n_queries, w.memory, i), span);
    });
}

// The scales of a block of keys by up to 4 blocks of elements
struct key_scales {
    alignas(64) uint16_t half[4][key_block];

    // of 4 keys; absent blocks repeat the last one
    template <row_type type>
    void load(const char * p, int64_t row, int n_blocks, int key) {
        transpose_scales<type>(p, row, n_blocks, half, key);
    }

    // of n keys; past the last key it is repeated up to a whole block
    template <row_type type>
    void load_all(const char * p, int64_t row, int n, int n_blocks) {
        constexpr int64_t most = 4 * most_block_bytes;
        for (int j = 0; j < key_block; j += 4) {
            if (j + 4 <= n) {
                load<type>(p + j * row, row, n_blocks, j);
                continue;
            }
            char local[4 * most];
            for (int i = 0; i < 4; i++) {
                std::memcpy(local + i * most, p + (j + i < n ? j + i : n - 1) * row, scale_at(type, n_blocks));
            }
            load<type>(local, most, n_blocks, j);
        }
    }
};

// The weights of a block of keys
template <class L>
using block_weights = typename L::V[key_block / L::width];

// The unit in which weight * scale becomes an integer, when the weight is relative to the largest of its row. Keys that
// are not used have no say: what they hold is another sequence's, or left over.
template <class L>
struct weight_unit {
    using V = typename L::V;

    alignas(64) float ratios[key_block]; // scale / unit
    float unit;

    // Rows that are worked on together share it, which is too coarse for one that does not see the key of the largest
    // scale if that is of another order than all others, as an overflow's is: values of models stay far below 8192.
    bool is_extreme() const { return unit > 1024.0f / int16_limit; }

    void find(const uint16_t * scales, uint64_t used) {
        block_weights<L> d;
        V                largest = L::zero();
        for (int i = 0; i < key_block / L::width; i++) {
            d[i]    = L::where(uint32_t(used >> L::width * i), L::load_half(scales + L::width * i));
            largest = L::max(largest, L::abs(d[i]));
        }
        const float top = L::highest(largest);
        unit            = top / int16_limit;
        for (int i = 0; i < key_block / L::width; i++) {
            L::store(ratios + L::width * i, L::mul(d[i], L::set(top > 0.0f ? int16_limit / top : 0.0f)));
        }
    }

    // 64 weights p times the scales as 16-bit integers, in the order that L::to_int16 leaves
    template <class I>
    void apply(const block_weights<L> & p, I * out) const {
        for (int i = 0; i < key_block / L::width; i += 2) {
            const float * ratio = ratios + L::width * i;
            out[i / 2] = L::to_int16(L::mul(p[i], L::load(ratio)), L::mul(p[i + 1], L::load(ratio + L::width)));
        }
    }
};

// 64 weights of a row relative to the largest, which is returned
template <class L>
float relative_weights(const float * s, block_weights<L> & p) {
    for (int i = 0; i < key_block / L::width; i++) {
        p[i] = L::load(s + L::width * i);
    }
    typename L::V most = L::max(L::max(p[0], p[1]), L::max(p[2], p[3]));
    for (int i = 4; i < key_block / L::width; i++) {
        most = L::max(most, p[i]);
    }
    const float         top     = L::highest(most);
    const typename L::V inverse = L::set(top > 0x1p-100f ? 1.0f / top : 0.0f);
    for (auto & x : p) {
        x = L::mul(x, inverse);
    }
    return top;
}

// Weights from the last key to the end of the block
inline void clear_rest(const item_memory & m, int n, float * s) {
    for (int r = 0; n < key_block && r < m.rows; r++) {
        std::memset(s + r * key_block + n, 0, (key_block - n) * sizeof(float));
    }
}

} // namespace
} // namespace mixedkv
