#include "tc3.h"

#include <cmath>

namespace {

constexpr auto & levels = mixedkv::tc3_values::at;
constexpr int    run    = 32; // elements on one path
constexpr int    states = 4;  // the two bits of the path before an element: the last one is the lower
constexpr int    sets   = 4;  // of levels: each fourth one

// Scales that are tried side by side, in units of the one by which elements have the variance that the levels are for.
// Eight take 1% more of the error.
constexpr int   lanes        = 4;
constexpr float tries[lanes] = { 0.84f, 0.95f, 1.06f, 1.2f };
constexpr float deviation    = 51.0f; // standard deviation of what the levels are for

using numbers = float __attribute__((vector_size(4 * lanes)));
using truths  = int32_t __attribute__((vector_size(4 * lanes)));

// Where the t-th element of a path lies in its half, see the header
constexpr int element_at(int t) {
    const int position = t % 8;
    return 4 * ((position & 4) | (position & 1) << 1 | (position & 2) >> 1) + t / 8;
}

// The set of the element that has `bit` behind a state
constexpr int set_of(int state, int bit) {
    return (bit ^ state >> 1) << 1 | (state & 1);
}

// The level of a set nearest to y
int nearest(float y, int set) {
    int best = set;
    for (int i = set + sets; i < 16; i += sets) {
        best = std::fabs(y - float(levels[i])) < std::fabs(y - float(levels[best])) ? i : best;
    }
    return best;
}

// What the nearest level of a set is away, squared
numbers distance_of(const numbers & y, int set) {
    numbers least = (y - float(levels[set])) * (y - float(levels[set]));
    for (int i = set + sets; i < 16; i += sets) {
        const numbers d = (y - float(levels[i])) * (y - float(levels[i]));
        least           = d < least ? d : least;
    }
    return least;
}

// The best path of 32 elements (Viterbi), for each of the scales at once
struct search {
    numbers cost[states];
    truths  from_second[run][states]; // of the two states that lead to one

    search(const float * x, const numbers & inverse) {
        const numbers never = inverse - inverse + 1e30f;
        cost[0]             = never - never;
        cost[1] = cost[2] = cost[3] = never;
        for (int t = 0; t < run; t++) {
            const numbers y          = inverse * x[element_at(t)];
            const numbers away[sets] = { distance_of(y, 0), distance_of(y, 1), distance_of(y, 2), distance_of(y, 3) };
            numbers       next[states];
            for (int s = 0; s < states; s++) {
                const int     first = s >> 1, second = first + 2;
                const numbers a   = cost[first] + away[set_of(first, s & 1)];
                const numbers b   = cost[second] + away[set_of(second, s & 1)];
                from_second[t][s] = b < a;
                next[s]           = b < a ? b : a;
            }
            std::memcpy(cost, next, sizeof(cost));
        }
    }

    int best(int lane) const {
        int res = 0;
        for (int s = 1; s < states; s++) {
            res = cost[s][lane] < cost[res][lane] ? s : res;
        }
        return res;
    }

    // Returns the bits of the lane's cheapest path, found backwards; index gets the level of each element
    uint32_t trace(const float * x, float inverse, int lane, uint8_t * index) const {
        uint32_t path = 0;
        int      s    = best(lane);
        for (int t = run - 1; t >= 0; t--) {
            const int bit    = s & 1;
            const int before = s >> 1 | (from_second[t][s][lane] ? 2 : 0);
            const int at     = element_at(t);
            path |= uint32_t(bit) << t;
            index[at] = uint8_t(nearest(x[at] * inverse, set_of(before, bit)));
            s         = before;
        }
        return path;
    }
};

float deviation_of(const float * x) {
    float sum = 0.0f;
    for (int i = 0; i < TC3_ELEMENTS; i++) {
        sum += x[i] * x[i];
    }
    return std::sqrt(sum / TC3_ELEMENTS);
}

// The multiple of their levels that has the least error
float scale_of(const float * x, const uint8_t * index) {
    float xy = 0.0f, yy = 0.0f;
    for (int i = 0; i < TC3_ELEMENTS; i++) {
        const auto level = float(levels[index[i]]);
        xy += x[i] * level;
        yy += level * level;
    }
    return xy / yy;
}

void store_half(uint32_t path, const uint8_t * index, uint8_t * fields, uint8_t * path_bytes) {
    std::memset(fields, 0, 8);
    for (int t = 0; t < run; t++) {
        const int position = t % 8;
        fields[(position & 1) * 4 + t / 8] |= uint8_t(index[element_at(t)] >> 2 << (position & 6));
    }
    for (int i = 0; i < 4; i++) {
        path_bytes[i] = uint8_t(path >> 8 * i);
    }
}

void store_block(const float * x, uint8_t * block) {
    const float usual = deviation_of(x) / deviation;
    uint8_t     index[TC3_ELEMENTS];
    std::memset(block, 0, TC3_BYTES);
    if (!(usual > 1e-30f) || !(usual < 1e30f)) {
        return;
    }
    numbers inverse;
    for (int l = 0; l < lanes; l++) {
        inverse[l] = 1.0f / (tries[l] * usual);
    }
    const search halves[2] = { search(x, inverse), search(x + run, inverse) };
    int          lane      = 0;
    float        least     = 0.0f;
    for (int l = 0; l < lanes; l++) {
        const float cost  = halves[0].cost[halves[0].best(l)][l] + halves[1].cost[halves[1].best(l)][l];
        const float error = cost * tries[l] * tries[l];
        if (l == 0 || error < least) {
            least = error;
            lane  = l;
        }
    }
    const uint32_t first  = halves[0].trace(x, inverse[lane], lane, index);
    const uint32_t second = halves[1].trace(x + run, inverse[lane], lane, index + run);
    const uint16_t half   = mixedkv::float_to_half(scale_of(x, index));
    std::memcpy(block, &half, sizeof(half));
    store_half(first, index, block + 2, block + 10);
    store_half(second, index + run, block + 18, block + 14);
}

} // namespace

void tc3_from_float(const float * x, void * row, int64_t n) {
    auto * block = static_cast<uint8_t *>(row);
    for (int64_t i = 0; i < n; i += TC3_ELEMENTS, block += TC3_BYTES) {
        store_block(x + i, block);
    }
}

void tc3_to_float(const void * row, float * x, int64_t n) {
    const auto * block = static_cast<const uint8_t *>(row);
    for (int64_t i = 0; i < n; i += TC3_ELEMENTS, block += TC3_BYTES, x += TC3_ELEMENTS) {
        mixedkv::dequantise_tc3(block, x);
    }
}

void tc3_dot(int n, float * sum, size_t, const void * row, size_t, const void * y, size_t, int) {
    const auto * block = static_cast<const uint8_t *>(row);
    const auto * other = static_cast<const float *>(y);
    float        total = 0.0f;
    for (int i = 0; i < n; i += TC3_ELEMENTS, block += TC3_BYTES) {
        float x[TC3_ELEMENTS];
        mixedkv::dequantise_tc3(block, x);
        float parts[16] = {};
        for (int j = 0; j < TC3_ELEMENTS; j++) {
            parts[j % 16] += x[j] * other[i + j];
        }
        for (const float part : parts) {
            total += part;
        }
    }
    *sum = total;
}
