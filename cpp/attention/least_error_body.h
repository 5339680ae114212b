// How rows are written in scales of least error (least_error.h). Four scales are tried side by side, for V::together
// elements at a time: V::floats has the four of each. V::to_integers() rounds, NaN to the highest; V::store_integers()
// stores those of a block, elements i and i + 16 in a byte, and returns their fifth bits. All bodies write the same
// bits: each product is rounded by itself (-ffp-contract=off).

#pragma once

#include "kernel.h"
#include "least_error.h"

#include "simd/half.h"

#include <cstring>

namespace mixedkv {
namespace {

using four = float __attribute__((vector_size(16)));

constexpr int block_elements = 32; // that have one scale
constexpr int n_vectors      = block_elements / 4;

struct block_values {
    four at[n_vectors];
};

inline four greater(const four & a, const four & b) {
    return a > b ? a : b;
}

// The element of the largest magnitude
float largest_of(const block_values & x) {
    four most = x.at[0], least = -x.at[0];
    for (int i = 1; i < n_vectors; i++) {
        most  = greater(most, x.at[i]);
        least = greater(least, -x.at[i]);
    }
    float above = 0.0f, below = 0.0f;
    for (int i = 0; i < 4; i++) {
        above = most[i] > above ? most[i] : above;
        below = least[i] > below ? least[i] : below;
    }
    return above > below ? above : -below;
}

float sum_of_squares(const block_values & x) {
    four sums[n_vectors];
    for (int i = 0; i < n_vectors; i++) {
        sums[i] = x.at[i] * x.at[i];
    }
    for (int n = n_vectors / 2; n > 0; n /= 2) {
        for (int i = 0; i < n; i++) {
            sums[i] += sums[i + n];
        }
    }
    return (sums[0][0] + sums[0][2]) + (sums[0][1] + sums[0][3]);
}

// In each of the scales that are tried, the sums of elements' products with their integers and of the squares of these
template <class T>
struct try_sums {
    T xy, yy;
};

// Adds elements first, first + step, ... in the order in which a warp of a GPU adds its lanes: it stores the same bits.
template <class V, class Integers, int first = 0, int step = V::together>
try_sums<typename V::floats> add_elements(const float * x, const typename V::floats & inverse) {
    if constexpr (step == block_elements) {
        const typename V::floats elements = V::four_times(x + first);
        const typename V::floats integer  = V::template to_integers<Integers>(inverse * elements);
        return { integer * elements, integer * integer };
    } else {
        const auto a = add_elements<V, Integers, first, 2 * step>(x, inverse);
        const auto b = add_elements<V, Integers, first + step, 2 * step>(x, inverse);
        return { a.xy + b.xy, a.yy + b.yy };
    }
}

// A scale, and what elements are multiplied by before they are rounded. The product of the row with x is x's with
// itself: the scale of least error makes rows shorter, and all scores would be smaller by as much.
struct block_scale {
    float scale, inverse;
};

template <class V, class Integers>
block_scale scale_of_least_error(const float * x, const block_values & values) {
    const float largest = largest_of(values), squares = sum_of_squares(values);
    const four  tries   = { Integers::first, Integers::second, Integers::third, Integers::fourth };
    const four  inverse = tries / largest;
    const auto  all     = add_elements<V, Integers>(x, V::of_all(inverse));
    const four  xy = V::add_all(all.xy), yy = V::add_all(all.yy);
    const four  gains = xy * xy / yy; // what integers, best scaled, take from the squares of x

    block_scale res  = { largest / float(Integers::low), 0.0f };
    float       gain = 0.0f;
    for (int i = 0; i < 4; i++) {
        if (gains[i] > gain) {
            gain = gains[i];
            res  = { squares / xy[i], inverse[i] };
        }
    }
    return res;
}

template <class V, class Integers>
void from_float(const float * x, void * row, int64_t n) {
    auto * block = static_cast<uint8_t *>(row);
    for (int64_t i = 0; i < n; i += block_elements, block += Integers::bytes) {
        block_values values;
        std::memcpy(&values, x + i, sizeof(values));
        const block_scale best  = scale_of_least_error<V, Integers>(x + i, values);
        const uint16_t    scale = float_to_half(best.scale);
        std::memcpy(block, &scale, sizeof(scale));

        const uint32_t fifths =
            V::template store_integers<Integers>(x + i, best.inverse, block + Integers::bytes - block_elements / 2);
        if constexpr (Integers::high > 7) {
            std::memcpy(block + sizeof(scale), &fifths, sizeof(fifths));
        }
    }
}

template <class V>
constexpr least_error_writers writers_of() {
    return { from_float<V, q4_0_integers>, from_float<V, q5_0_integers> };
}

} // namespace
} // namespace mixedkv
