#include "lm3.h"

#include "simd/half.h"

#include <cmath>

namespace {

constexpr int8_t levels_1[] = { LM3_LEVELS_1 };
constexpr int8_t levels_2[] = { LM3_LEVELS_2 };
constexpr int8_t levels_3[] = { LM3_LEVELS_3 };
constexpr int8_t levels_4[] = { LM3_LEVELS_4 };
constexpr int8_t levels_5[] = { LM3_LEVELS_5 };

// Elements of one width
struct width {
    int            first, n;
    int            n_levels;
    const int8_t * levels;
    float          weight; // of a squared error: a bit less stands for a quarter of the variance
};

constexpr width widths[] = {
    { 0, 8, 32, levels_5, 256.0f }, { 8, 8, 16, levels_4, 64.0f }, { 16, 16, 8, levels_3, 16.0f },
    { 32, 16, 4, levels_2, 4.0f },  { 48, 8, 2, levels_1, 1.0f },
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
        const float     scale = mixedkv::half_at(block);
        const uint8_t * bytes = block + 2;
        for (int j = 0; j < 8; j++) {
            x[j]      = scale * levels_5[bytes[j] & 31];
            x[8 + j]  = scale * levels_4[bytes[8 + j] & 15];
            x[16 + j] = scale * levels_3[bytes[j] >> 5];
            x[24 + j] = scale * levels_3[bytes[8 + j] >> 4 & 7];
            x[48 + j] = scale * levels_1[bytes[8 + j] >> 7];
            x[56 + j] = 0.0f;
        }
        for (int j = 0; j < 16; j++) {
            x[32 + j] = scale * levels_2[bytes[16 + j % 4] >> j / 4 * 2 & 3];
        }
    }
}
