#include "lm3.h"

#include <cmath>

namespace {

using values = mixedkv::lm3_values;

// Elements of one width
struct width {
    int            first, n;
    int            n_levels;
    const int8_t * levels;
    float          weight; // of a squared error: a bit less stands for a quarter of the variance
};

constexpr width widths[] = {
    { 0, 8, 32, values::of_5, 256.0f }, { 8, 8, 16, values::of_4, 64.0f }, { 16, 16, 8, values::of_3, 16.0f },
    { 32, 16, 4, values::of_2, 4.0f },  { 48, 8, 2, values::of_1, 1.0f },
};

// Scales that are tried, in units of the one by which elements have the variance that the levels are for
constexpr float tries[]   = { 0.7f, 0.8f, 0.9f, 1.0f, 1.1f, 1.25f, 1.45f };
constexpr float deviation = 39.8f; // standard deviation of what the levels are for

void find_indices(const width & w, const float * x, float inverse, uint8_t * __restrict out) {
    std::memset(out, 0, w.n);
    for (int n = 1; n < w.n_levels; n++) {
        const float between = 0.5f * float(w.levels[n - 1] + w.levels[n]);
        for (int i = 0; i < w.n; i++) {
            out[i] = uint8_t(out[i] + (x[i] * inverse > between));
        }
    }
}

struct sums {
    float xy = 0.0f; // of element times level, weighted as is the next
    float yy = 0.0f; // of squared levels

    // what the best scale for these levels takes from the weighted squares of x
    float gain() const { return xy * xy / yy; }
};

sums add_up(const float * x, const uint8_t * index) {
    sums res;
    for (const width & w : widths) {
        for (int i = w.first; i < w.first + w.n; i++) {
            const auto level = float(w.levels[index[i]]);
            res.xy += w.weight * x[i] * level;
            res.yy += w.weight * level * level;
        }
    }
    return res;
}

float usual_scale(const float * x) {
    float sum = 0.0f, weight = 0.0f;
    for (const width & w : widths) {
        for (int i = w.first; i < w.first + w.n; i++) {
            sum += w.weight * x[i] * x[i];
        }
        weight += w.weight * float(w.n);
    }
    return std::sqrt(sum / weight) / deviation;
}

void store_block(const float * x, uint8_t * block) {
    const float usual = usual_scale(x);
    float       scale = 0.0f, gain = 0.0f;
    uint8_t     best[LM3_ELEMENTS] = {}, index[LM3_ELEMENTS] = {};
    for (const float t : tries) {
        if (!(usual > 0.0f)) {
            break;
        }
        for (const width & w : widths) {
            find_indices(w, x + w.first, 1.0f / (t * usual), index + w.first);
        }
        const sums s = add_up(x, index);
        if (s.gain() > gain) {
            gain  = s.gain();
            scale = s.xy / s.yy;
            std::memcpy(best, index, LM3_ELEMENTS);
        }
    }
    const uint16_t half = mixedkv::float_to_half(scale);
    std::memcpy(block, &half, sizeof(half));
    block += sizeof(half);
    for (int i = 0; i < 8; i++) {
        block[i]     = uint8_t(best[i] | best[16 + i] << 5);
        block[8 + i] = uint8_t(best[8 + i] | best[24 + i] << 4 | best[48 + i] << 7);
    }
    for (int i = 0; i < 4; i++) {
        block[16 + i] = uint8_t(best[32 + i] | best[36 + i] << 2 | best[40 + i] << 4 | best[44 + i] << 6);
    }
}

} // namespace

void lm3_from_float(const float * x, void * row, int64_t n) {
    auto * block = static_cast<uint8_t *>(row);
    for (int64_t i = 0; i < n; i += LM3_ELEMENTS, block += LM3_BYTES) {
        store_block(x + i, block);
    }
}

void lm3_to_float(const void * row, float * x, int64_t n) {
    const auto * block = static_cast<const uint8_t *>(row);
    for (int64_t i = 0; i < n; i += LM3_ELEMENTS, block += LM3_BYTES, x += LM3_ELEMENTS) {
        mixedkv::unpack_lm3(block, x);
    }
}
