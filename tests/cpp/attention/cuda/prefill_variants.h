// The shapes of the prefill kernel that are tested, reported and timed. The package has the first of each head size.

#pragma once

#include "attention/cuda/prefill.h"

namespace mixedkv {
namespace cuda {

template <class... Shapes>
struct shape_list {
    static constexpr int n = sizeof...(Shapes);

    // Calls f(shape) for each.
    template <class F>
    static void for_each(F && f) {
        (f(Shapes()), ...);
    }
};

// Query rows of a warp, warps, keys of a tile, blocks of a multiprocessor, whether tiles are dequantised between
// products
template <int d>
struct prefill_variants;

template <>
struct prefill_variants<64>
    : shape_list<usual_prefill<64>, prefill_shape<16, 8, 32, 2, true>, prefill_shape<16, 8, 64, 2, true>,
                 prefill_shape<32, 4, 32, 3, true>, prefill_shape<32, 4, 64, 2, true>> {};

template <>
struct prefill_variants<96> : shape_list<usual_prefill<96>, prefill_shape<32, 4, 32, 2, true>> {};

template <>
struct prefill_variants<128> : shape_list<usual_prefill<128>, prefill_shape<16, 8, 32, 2, true>,
                                          prefill_shape<32, 4, 32, 2, false>, prefill_shape<32, 4, 32, 2, true>,
                                          prefill_shape<32, 8, 32, 1, true>, prefill_shape<32, 8, 64, 1, true>> {};

template <>
struct prefill_variants<256> : shape_list<usual_prefill<256>, prefill_shape<16, 4, 32, 1, true>,
                                          prefill_shape<16, 8, 32, 1, false>, prefill_shape<16, 8, 32, 1, true>> {};

} // namespace cuda
} // namespace mixedkv
