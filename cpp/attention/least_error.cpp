#include "least_error.h"

#include "simd/half.h"

#include <cstring>

namespace mixedkv {
namespace {

using four  = float __attribute__((vector_size(16)));
using words = int32_t __attribute__((vector_size(16)));
using bytes = uint8_t __attribute__((vector_size(4)));

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

// NaN becomes the highest
template <class Integers>
four to_integers(const four & y) {
    const four high  = four() + float(Integers::high);
    const four whole = four() + 0x1.8p23f; // a step of it is 1
    return ((y < high ? y : high) + whole) - whole;
}

// In each of the scales that are tried side by side, the sums of elements' products with their integers and of the
// squares of these
struct try_sums {
    four xy, yy;
};

// Adds elements first, first + step, ... in the order in which a warp of a GPU adds its lanes: it stores the same bits.
template <class Integers, int first = 0, int step = 1>
try_sums add_elements(const float * x, const four & inverse) {
    if constexpr (step == block_elements) {
        const four integer = to_integers<Integers>(inverse * x[first]);
        return { integer * x[first], integer * integer };
    } else {
        const try_sums a = add_elements<Integers, first, 2 * step>(x, inverse);
        const try_sums b = add_elements<Integers, first + step, 2 * step>(x, inverse);
        return { a.xy + b.xy, a.yy + b.yy };
    }
}

// A scale, and what elements are multiplied by before they are rounded. The product of the row with x is x's with
// itself: the scale of least error makes rows shorter, and all scores would be smaller by as much.
struct block_scale {
    float scale, inverse;
};

template <class Integers>
block_scale scale_of_least_error(const float * x, const block_values & values) {
    const float    largest = largest_of(values), squares = sum_of_squares(values);
    const four     tries   = { Integers::first, Integers::second, Integers::third, Integers::fourth };
    const four     inverse = tries / largest;
    const try_sums sums    = add_elements<Integers>(x, inverse);
    const four     gains   = sums.xy * sums.xy / sums.yy; // what integers, best scaled, take from the squares of x

    block_scale res  = { largest / float(Integers::low), 0.0f };
    float       gain = 0.0f;
    for (int i = 0; i < 4; i++) {
        if (gains[i] > gain) {
            gain = gains[i];
            res  = { squares / sums.xy[i], inverse[i] };
        }
    }
    return res;
}

template <class Integers>
void from_float(const float * x, void * row, int64_t n) {
    auto * block = static_cast<uint8_t *>(row);
    for (int64_t i = 0; i < n; i += block_elements, block += Integers::bytes) {
        block_values values;
        std::memcpy(&values, x + i, sizeof(values));
        const block_scale best  = scale_of_least_error<Integers>(x + i, values);
        const uint16_t    scale = float_to_half(best.scale);
        std::memcpy(block, &scale, sizeof(scale));

        words q[n_vectors];
        for (int j = 0; j < n_vectors; j++) {
            q[j] = __builtin_convertvector(to_integers<Integers>(values.at[j] * best.inverse), words) - Integers::low;
        }
        for (int j = 0; j < n_vectors / 2; j++) { // elements i and i + 16 in a byte
            const bytes nibbles = __builtin_convertvector((q[j] & 15) | (q[j + n_vectors / 2] & 15) << 4, bytes);
            std::memcpy(block + Integers::bytes - block_elements / 2 + 4 * j, &nibbles, sizeof(nibbles));
        }
        if constexpr (Integers::high > 7) {
            const words at   = { 0, 1, 2, 3 };
            words       bits = {};
            for (int j = 0; j < n_vectors; j++) {
                bits |= (q[j] >> 4) << (at + 4 * j);
            }
            const int32_t fifths = bits[0] | bits[1] | bits[2] | bits[3];
            std::memcpy(block + sizeof(scale), &fifths, sizeof(fifths));
        }
    }
}

} // namespace

void q4_0_from_float(const float * x, void * row, int64_t n) {
    from_float<q4_0_integers>(x, row, n);
}

void q5_0_from_float(const float * x, void * row, int64_t n) {
    from_float<q5_0_integers>(x, row, n);
}

} // namespace mixedkv
