// How a warp writes a block of lm4 and of tc3: what lm4.cpp and tc3.cpp do, in the same order where numbers are
// rounded, so that rows have the same bits as those of a CPU that rounds products by themselves (x86-64).
//
// A block is 64 elements, of which lane l has the l-th and the (l + 32)-th.

#pragma once

#include "problem.h"
#include "rows.h"

namespace mixedkv {
namespace cuda {

MIXEDKV_DEVICE float warp_max(float x) {
    for (int h = 1; h < warp_size; h *= 2) {
        x = max_of(x, shuffle_xor(x, h));
    }
    return x;
}

MIXEDKV_DEVICE uint32_t warp_sum(uint32_t x) {
    for (int h = 1; h < warp_size; h *= 2) {
        x += shuffle_xor(x, h);
    }
    return x;
}

MIXEDKV_DEVICE void store_u16(char * p, uint32_t x) {
    *reinterpret_cast<uint16_t *>(p) = uint16_t(x);
}

MIXEDKV_DEVICE void store_half(char * p, float x) {
    store_u16(p, float_to_half_bits(x));
}

// q of the lane and of the lane 16 further make a byte
MIXEDKV_DEVICE void write_nibbles(char * to, int q) {
    const uint32_t high = shuffle_xor(uint32_t(q), 16);
    if (lane() < 16) {
        to[lane()] = char((q & 15) | (high & 15) << 4);
    }
}

// ---- lm4

// The level nearest to an integer, or its index
template <bool index>
MIXEDKV_DEVICE int find_level(int x) {
    constexpr int levels[16] = { LM4_LEVELS };
    int           res        = index ? 0 : levels[0];
#pragma unroll
    for (int n = 1; n < 16; n++) {
        res = x > ((levels[n - 1] + levels[n]) >> 1) ? (index ? n : levels[n]) : res;
    }
    return res;
}

// x / scale as an integer
MIXEDKV_DEVICE int to_integer(float x, float inverse) {
    float y = exact_product(x, inverse);
    y       = y < -127.0f ? -127.0f : y > 127.0f ? 127.0f : y == y ? y : 0.0f;
    return int(rintf(y));
}

// The sum that lm4.cpp has in 16 lanes, each of four products in turn
MIXEDKV_DEVICE float sum_of_products(float first, float last) {
    const bool  upper = lane() >= 16;
    const float a = shuffle_xor(first, 16), b = shuffle_xor(last, 16);

    float sum = exact_sum(first, a);
    sum       = exact_sum(sum, upper ? b : last);
    sum       = exact_sum(sum, upper ? last : b);
#pragma unroll
    for (int h = 8; h > 0; h /= 2) {
        sum = exact_sum(sum, shuffle_xor(sum, h));
    }
    return sum;
}

MIXEDKV_DEVICE void store_lm4(char * to, const float * x) {
    constexpr float tries[] = { 0.85f, 0.9f, 0.95f, 1.0f, 1.05f };

    const float most = warp_max(max_of(max_of(x[0], x[1]), 0.0f)), least = warp_max(max_of(max_of(-x[0], -x[1]), 0.0f));
    const float first = exact_quotient(most > least ? most : -least, -127.0f);

    float scale = 0.0f, gain = 0.0f;
    int   best[2] = { 0, 0 };
#pragma unroll
    for (const float t : tries) {
        const float inverse = exact_quotient(1.0f, exact_product(t, first));
        int         integer[2];
        float       product[2];
        uint32_t    square = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            integer[half]   = to_integer(x[half], inverse);
            const int level = find_level<false>(integer[half]);
            product[half]   = exact_product(x[half], float(level));
            square += uint32_t(level * level);
        }
        const float xy = sum_of_products(product[0], product[1]), yy = float(warp_sum(square));
        const float g = exact_quotient(exact_product(xy, xy), yy);
        if (first != 0.0f && g > gain) {
            gain    = g;
            scale   = exact_quotient(xy, yy);
            best[0] = integer[0];
            best[1] = integer[1];
        }
    }
    if (lane() == 0) {
        store_half(to, scale);
    }
    write_nibbles(to + 2, find_level<true>(best[0]));
    write_nibbles(to + 18, find_level<true>(best[1]));
}

// ---- tc3

// Where the t-th element of a path lies in its half, and the other way round
MIXEDKV_SHARED(int) exchange_low_bits(int position) {
    return (position & 4) | (position & 1) << 1 | (position & 2) >> 1;
}
MIXEDKV_SHARED(int) element_at(int t) {
    return 4 * exchange_low_bits(t % 8) + t / 8;
}
MIXEDKV_SHARED(int) place_of(int element) {
    return 8 * (element % 4) + exchange_low_bits(element / 4);
}

// Level k of the four of a set
MIXEDKV_DEVICE float level_of_set(int set, int k) {
    constexpr uint32_t words[4] = { tc3_rows::table(0), tc3_rows::table(4), tc3_rows::table(8), tc3_rows::table(12) };
    return float(int(permute_bytes(words[k], 0, 0x4440 | uint32_t(set))) - 128);
}

// What the nearest of four levels is away, squared
MIXEDKV_DEVICE float distance_of(float y, const float (&level)[4]) {
    float least = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float away = exact_sum(y, -level[k]), d = exact_product(away, away);
        least = k == 0 || d < least ? d : least;
    }
    return least;
}

// The smaller of two lanes' numbers and what goes with it; of equal ones the lower lane's
MIXEDKV_DEVICE void take_smaller(float & x, int & with, int h) {
    const float other      = shuffle_xor(x, h);
    const int   other_with = int(shuffle_xor(uint32_t(with), h));
    if ((lane() & h) ? !(x < other) : other < x) {
        x    = other;
        with = other_with;
    }
}

// Of the two states before an element, by the one behind it, whether the second is better: the best paths of both
// halves for each of four scales, side by side, in lanes 16 half + 4 scale + state.
struct trellis {
    float    inverse;     // of the lane's scale
    uint32_t from_second; // a bit for each element
    int      state;       // with which the best path of the lane's half and scale ends
    int      scale;       // the best of the four

    MIXEDKV_DEVICE_MEMBER void search(const float * x, float usual) {
        const int half = lane() / 16, own = lane() % 4;
        float     part[2]; // of the lane's half, in the order of the path
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int   at = element_at(16 * i + lane() % 16);
            const float a = shuffle(x[0], at), b = shuffle(x[1], at);
            part[i] = half ? b : a;
        }
        const int set = (own & 1) << 1 | own >> 1; // behind the first of the two states; behind the second set ^ 2
        float     first[4], second[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            first[k]  = level_of_set(set, k);
            second[k] = level_of_set(set ^ 2, k);
        }
        scale         = lane() / 4 % 4;
        const float t = scale == 0 ? 0.84f : scale == 1 ? 0.95f : scale == 2 ? 1.06f : 1.2f;
        inverse       = exact_quotient(1.0f, exact_product(t, usual));
        from_second   = 0;

        float     cost   = own == 0 ? 0.0f : 1e30f;
        const int before = (lane() & ~3) | own >> 1;
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll 4
            for (int j = 0; j < 16; j++) {
                const float y = exact_product(inverse, shuffle(part[i], 16 * half + j));
                const float a = exact_sum(shuffle(cost, before), distance_of(y, first));
                const float b = exact_sum(shuffle(cost, before + 2), distance_of(y, second));
                cost          = b < a ? b : a;
                from_second |= uint32_t(b < a) << (16 * i + j);
            }
        }
        state = own;
        take_smaller(cost, state, 1);
        take_smaller(cost, state, 2);
        float error = exact_product(exact_product(exact_sum(cost, shuffle_xor(cost, 16)), t), t);
        take_smaller(error, scale, 4);
        take_smaller(error, scale, 8);
    }

    // The states before and behind the lane-th element of a half. What leads from each state behind a run of elements
    // to one before it is four times two bits; runs are joined until they reach the end.
    MIXEDKV_DEVICE_MEMBER void trace(int half, int & before, int & behind) const {
        const int group = 16 * half + 4 * scale;
        uint32_t  run   = 0x50;
#pragma unroll
        for (int s = 0; s < 4; s++) {
            run |= (shuffle(from_second, group + s) >> lane() & 1) << (2 * s + 1);
        }
#pragma unroll
        for (int h = 1; h < warp_size; h *= 2) {
            const uint32_t next = shuffle(run, (lane() + h) % warp_size);
            uint32_t       both = 0;
#pragma unroll
            for (int s = 0; s < 8; s += 2) {
                both |= (run >> 2 * (next >> s & 3) & 3) << s;
            }
            run = lane() + h < warp_size ? both : run;
        }
        const int last = int(shuffle(uint32_t(state), group));
        before         = int(run >> 2 * last & 3);
        behind         = int(shuffle(uint32_t(before), (lane() + 1) % warp_size));
        behind         = lane() == warp_size - 1 ? last : behind;
    }
};

// The sum of 64 products one after the other; lanes have them in the order of elements, or of paths
template <bool of_paths>
MIXEDKV_DEVICE float sum_in_order(float first, float last) {
    float sum = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll 8
        for (int i = 0; i < warp_size; i++) {
            sum = exact_sum(sum, shuffle(half ? last : first, of_paths ? place_of(i) : i));
        }
    }
    return sum;
}

MIXEDKV_DEVICE void store_u32(char * p, uint32_t x) {
    store_u16(p, x);
    store_u16(p + 2, x >> 16);
}

MIXEDKV_DEVICE void store_tc3(char * to, const float * x) {
    const float squares = sum_in_order<false>(exact_product(x[0], x[0]), exact_product(x[1], x[1]));
    const float usual   = exact_quotient(exact_root(exact_product(squares, 1.0f / TC3_ELEMENTS)), 51.0f);
    if (!(usual > 1e-30f) || !(usual < 1e30f)) {
        if (lane() < TC3_BYTES / 2) {
            store_u16(to + 2 * lane(), 0);
        }
        return;
    }
    trellis paths;
    paths.search(x, usual);
    const float inverse = shuffle(paths.inverse, 4 * paths.scale);

    float    product[2];
    uint32_t square = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int before, behind;
        paths.trace(half, before, behind);
        const int   bit = behind & 1, set = (bit ^ before >> 1) << 1 | (before & 1);
        const float own = shuffle(x[half], element_at(lane())), y = exact_product(own, inverse);

        int   field = 0;
        float level = level_of_set(set, 0);
#pragma unroll
        for (int k = 1; k < 4; k++) {
            const float other = level_of_set(set, k);
            if (fabsf(exact_sum(y, -other)) < fabsf(exact_sum(y, -level))) {
                field = k;
                level = other;
            }
        }
        product[half] = exact_product(own, level);
        square += uint32_t(level * level);

        const uint32_t path   = all_lanes(bit != 0);
        uint32_t       fields = uint32_t(field) << (lane() & 30); // of every other element
        for (int h = 2; h < warp_size; h *= 2) {
            fields |= shuffle_xor(fields, h);
        }
        if (lane() < 2) {
            store_u32(to + (half ? 18 : 2) + 4 * lane(), fields);
        } else if (lane() == 2) {
            store_u32(to + (half ? 14 : 10), path);
        }
    }
    const float scale = exact_quotient(sum_in_order<true>(product[0], product[1]), float(warp_sum(square)));
    if (lane() == 0) {
        store_half(to, scale);
    }
}

} // namespace cuda
} // namespace mixedkv
