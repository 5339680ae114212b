#include "lm4.h"

#include "wide_registers.h"

#include <cmath>

namespace {

constexpr auto & levels = mixedkv::lm4_values::at;

// Scales that are tried, beside that by which the largest element is the first level. Seven take 0.3% more of the
// error.
constexpr float tries[] = { 0.85f, 0.9f, 0.95f, 1.0f, 1.05f };

// x / scale as integers; NaN becomes 0
template <int lanes>
[[gnu::always_inline]] inline void to_integers(const float * x, float scale, int8_t * __restrict out) {
    const mixedkv::numbers<lanes> none = {}, low = none - 127.0f, high = none + 127.0f;
    int32_t                       bits[LM4_ELEMENTS];
    for (int i = 0; i < LM4_ELEMENTS; i += lanes) {
        mixedkv::numbers<lanes> y;
        std::memcpy(&y, x + i, sizeof(y));
        y *= 1.0f / scale;
        y = y < low ? low : y;
        y = y > high ? high : y;
        y += 0x1.8p23f; // a step of it is 1
        std::memcpy(bits + i, &y, sizeof(y));
    }
    for (int i = 0; i < LM4_ELEMENTS; i++) {
        out[i] = int8_t(bits[i]);
    }
}

// The level nearest to each integer, or its index. Loops here are such that compilers make vectors of them.
template <bool index>
[[gnu::always_inline]] inline void find_levels(const int8_t * x, int8_t * __restrict out) {
    std::memset(out, index ? 0 : levels[0], LM4_ELEMENTS);
    for (int n = 1; n < 16; n++) {
        const int8_t between = int8_t((levels[n - 1] + levels[n]) >> 1);
        const int8_t step    = index ? 1 : int8_t(levels[n] - levels[n - 1]);
        for (int i = 0; i < LM4_ELEMENTS; i++) {
            const int8_t above = x[i] > between ? -1 : 0;
            out[i]             = int8_t(out[i] + (above & step));
        }
    }
}

struct sums {
    float   xy; // of element times level
    int32_t yy; // of squared levels

    // what the best scale for these levels takes from the squares of x
    [[gnu::always_inline]] float gain() const { return xy * xy / float(yy); }
};

[[gnu::always_inline]] inline sums add_up(const float * x, const int8_t * level) {
    constexpr int lanes     = 16;
    float         xy[lanes] = {};
    int32_t       yy        = 0;
    for (int i = 0; i < LM4_ELEMENTS; i += lanes) {
        for (int j = 0; j < lanes; j++) {
            xy[j] += x[i + j] * float(level[i + j]);
        }
    }
    for (int i = 0; i < LM4_ELEMENTS; i++) {
        yy += level[i] * level[i];
    }
    for (int n = lanes / 2; n > 0; n /= 2) {
        for (int j = 0; j < n; j++) {
            xy[j] += xy[j + n];
        }
    }
    return { xy[0], yy };
}

[[gnu::always_inline]] inline float largest_of(const float * x) {
    float least = 0.0f, most = 0.0f;
    for (int i = 0; i < LM4_ELEMENTS; i++) {
        least = x[i] < least ? x[i] : least;
        most  = x[i] > most ? x[i] : most;
    }
    return most > -least ? most : least;
}

template <int lanes>
[[gnu::always_inline]] inline void store_block(const float * x, uint8_t * block) {
    const float first = largest_of(x) / float(levels[0]);
    float       scale = 0.0f, gain = 0.0f;
    int8_t      best[LM4_ELEMENTS] = {}, integers[LM4_ELEMENTS], level[LM4_ELEMENTS];
    for (const float t : tries) {
        if (first == 0.0f) {
            break;
        }
        to_integers<lanes>(x, t * first, integers);
        find_levels<false>(integers, level);
        const sums s = add_up(x, level);
        if (s.gain() > gain) {
            gain  = s.gain();
            scale = s.xy / float(s.yy);
            std::memcpy(best, integers, LM4_ELEMENTS);
        }
    }
    const uint16_t half = mixedkv::float_to_half(scale);
    std::memcpy(block, &half, sizeof(half));
    find_levels<true>(best, level);
    for (int i = 0; i < LM4_ELEMENTS / 2; i++) {
        const int8_t * low = level + i / 16 * 32 + i % 16;
        block[2 + i]       = uint8_t(low[0] | low[16] << 4);
    }
}

} // namespace

void lm4_from_float(const float * x, void * row, int64_t n) {
    auto * blocks = static_cast<uint8_t *>(row);
    mixedkv::with_widest_registers([=](auto lanes) __attribute__((always_inline)) {
        for (int64_t i = 0; i < n / LM4_ELEMENTS; i++) {
            store_block<lanes>(x + i * LM4_ELEMENTS, blocks + i * LM4_BYTES);
        }
    });
}

void lm4_to_float(const void * row, float * x, int64_t n) {
    const auto * block = static_cast<const uint8_t *>(row);
    for (int64_t i = 0; i < n; i += LM4_ELEMENTS, block += LM4_BYTES) {
        mixedkv::dequantise_lm4(block, x + i);
    }
}

void lm4_dot(int n, float * sum, size_t, const void * row, size_t, const void * y, size_t, int) {
    const auto * block = static_cast<const uint8_t *>(row);
    const auto * other = static_cast<const float *>(y);
    float        total = 0.0f;
    for (int i = 0; i < n; i += LM4_ELEMENTS, block += LM4_BYTES) {
        float x[LM4_ELEMENTS];
        lm4_to_float(block, x, LM4_ELEMENTS);
        float lanes[16] = {};
        for (int j = 0; j < LM4_ELEMENTS; j++) {
            lanes[j % 16] += x[j] * other[i + j];
        }
        for (const float lane : lanes) {
            total += lane;
        }
    }
    *sum = total;
}
