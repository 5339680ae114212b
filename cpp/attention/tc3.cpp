#include "tc3.h"

#include "wide_registers.h"

#include <cmath>

namespace {

constexpr auto & levels = mixedkv::tc3_values::at;
constexpr int    run    = 32; // elements on one path
constexpr int    states = 4;  // the two bits of the path before an element: the last one is the lower
constexpr int    sets   = 4;  // of levels: each fourth one

// Scales that are tried side by side, in units of the one by which elements have the variance that the levels are for.
// Eight take 1% more of the error.
constexpr int   n_tries        = 4;
constexpr float tries[n_tries] = { 0.84f, 0.95f, 1.06f, 1.2f };
constexpr float deviation      = 51.0f; // standard deviation of what the levels are for

using mixedkv::numbers;
using mixedkv::truths;

// Where the t-th element of a path lies in its half, see the header
constexpr int element_at(int t) {
    const int position = t % 8;
    return 4 * ((position & 4) | (position & 1) << 1 | (position & 2) >> 1) + t / 8;
}

// The reverse: where an element of a half lies on its path
constexpr int path_at(int i) {
    const int column = i / 4;
    return 8 * (i % 4) + ((column & 4) | (column & 1) << 1 | (column & 2) >> 1);
}

// The set of the element that has `bit` behind a state
constexpr int set_of(int state, int bit) {
    return (bit ^ state >> 1) << 1 | (state & 1);
}

// Of the two halves of a block, in the order of their paths
using halves_of_numbers  = float[2][run];
using halves_of_integers = int32_t[2][run];

// The best path of 32 elements (Viterbi) for each lane at once. Lanes are scales, those of the second half behind those
// of the first one.
template <int lanes>
struct search {
    numbers<lanes> cost[states];
    truths<lanes>  from_second[run][states]; // of the two states that lead to one

    // begin: the first lane
    [[gnu::always_inline]] search(const halves_of_numbers & x, const float * inverses, int begin) {
        numbers<lanes> inverse;
        std::memcpy(&inverse, inverses + begin, sizeof(inverse));
        const numbers<lanes> never = inverse - inverse + 1e30f;
        cost[0]                    = never - never;
        cost[1] = cost[2] = cost[3] = never;
        for (int t = 0; t < run; t++) {
            numbers<lanes> y;
            for (int l = 0; l < lanes; l++) {
                y[l] = x[(begin + l) / n_tries][t];
            }
            y *= inverse;
            numbers<lanes> away[sets], next[states];
            for (int i = 0; i < 16; i++) {
                const numbers<lanes> d = (y - float(levels[i])) * (y - float(levels[i]));
                away[i % sets]         = i < sets ? d : d < away[i % sets] ? d : away[i % sets];
            }
            for (int s = 0; s < states; s++) {
                const int            first = s >> 1, second = first + 2;
                const numbers<lanes> one   = cost[first] + away[set_of(first, s & 1)];
                const numbers<lanes> other = cost[second] + away[set_of(second, s & 1)];
                from_second[t][s]          = other < one;
                next[s]                    = other < one ? other : one;
            }
            for (int s = 0; s < states; s++) {
                cost[s] = next[s];
            }
        }
    }

    [[gnu::always_inline]] int best(int lane) const {
        int res = 0;
        for (int s = 1; s < states; s++) {
            res = cost[s][lane] < cost[res][lane] ? s : res;
        }
        return res;
    }
};

// The cheapest path of a lane, found backwards
template <int lanes>
struct path_back {
    const search<lanes> & found;
    int                   lane, state;
    uint32_t              path = 0;

    [[gnu::always_inline]] path_back(const search<lanes> & found, int lane) :
        found(found), lane(lane), state(found.best(lane)) {}

    [[gnu::always_inline]] float cost() const { return found.cost[state][lane]; }

    // Returns the set of the t-th element, after those behind it
    [[gnu::always_inline]] int set_at(int t) {
        const int bit    = state & 1;
        const int before = state >> 1 | (found.from_second[t][state][lane] & 2);
        path |= uint32_t(bit) << t;
        state = before;
        return set_of(before, bit);
    }
};

// For elements one after the other, which of the levels of their sets are nearest: fields, and the levels
template <int lanes>
[[gnu::always_inline]] inline void choose(const float * x, float inverse, const int32_t * set, int32_t * field,
                                          float * level) {
    numbers<lanes> y;
    truths<lanes>  from;
    std::memcpy(&y, x, sizeof(y));
    std::memcpy(&from, set, sizeof(from));
    y *= inverse;
    const numbers<lanes> zeros   = {};
    numbers<lanes>       nearest = y, least = zeros + 1e30f;
    truths<lanes>        best = {};
    for (int i = 0; i < 16; i += sets) {
        const numbers<lanes> low   = from == 0 ? zeros + float(levels[i]) : zeros + float(levels[i + 1]);
        const numbers<lanes> high  = from == 2 ? zeros + float(levels[i + 2]) : zeros + float(levels[i + 3]);
        const numbers<lanes> here  = from < 2 ? low : high;
        const numbers<lanes> away  = y < here ? here - y : y - here;
        const truths<lanes>  nears = away < least;
        least                      = nears ? away : least;
        nearest                    = nears ? here : nearest;
        best                       = nears ? best - best + i / sets : best;
    }
    std::memcpy(field, &best, sizeof(best));
    std::memcpy(level, &nearest, sizeof(nearest));
}

inline float deviation_of(const float * x) {
    float sum = 0.0f;
    for (int i = 0; i < TC3_ELEMENTS; i++) {
        sum += x[i] * x[i];
    }
    return std::sqrt(sum / TC3_ELEMENTS);
}

// The multiple of their levels that has the least error, by sums in the order of elements
inline float scale_of(const halves_of_numbers & x, const halves_of_numbers & level) {
    float xy = 0.0f, yy = 0.0f;
    for (int half = 0; half < 2; half++) {
        for (int i = 0; i < run; i++) {
            xy += x[half][path_at(i)] * level[half][path_at(i)];
            yy += level[half][i] * level[half][i]; // whole numbers: the same in any order
        }
    }
    return xy / yy;
}

inline void store_half(uint32_t path, const int32_t * field, uint8_t * fields, uint8_t * path_bytes) {
    for (int i = 0; i < 4; i++, field += 8) {
        fields[i]     = uint8_t(field[0] | field[2] << 2 | field[4] << 4 | field[6] << 6);
        fields[4 + i] = uint8_t(field[1] | field[3] << 2 | field[5] << 4 | field[7] << 6);
        path_bytes[i] = uint8_t(path >> 8 * i);
    }
}

// One search for each half, or one for both
template <int lanes>
struct both_halves;

template <>
struct both_halves<n_tries> {
    search<n_tries> first, second;

    [[gnu::always_inline]] both_halves(const halves_of_numbers & x, const float * inverse) :
        first(x, inverse, 0), second(x, inverse, n_tries) {}

    [[gnu::always_inline]] path_back<n_tries> back(int half, int i) const { return { half ? second : first, i }; }
};

template <>
struct both_halves<2 * n_tries> {
    search<2 * n_tries> all;

    [[gnu::always_inline]] both_halves(const halves_of_numbers & x, const float * inverse) : all(x, inverse, 0) {}

    [[gnu::always_inline]] path_back<2 * n_tries> back(int half, int i) const { return { all, half * n_tries + i }; }
};

template <int lanes>
[[gnu::always_inline]] inline void store_block(const float * x, uint8_t * block) {
    const float usual = deviation_of(x) / deviation;
    if (!(usual > 1e-30f) || !(usual < 1e30f)) {
        std::memset(block, 0, TC3_BYTES);
        return;
    }
    halves_of_numbers ordered;
    for (int t = 0; t < run; t++) {
        ordered[0][t] = x[element_at(t)];
        ordered[1][t] = x[run + element_at(t)];
    }
    float inverse[2 * n_tries];
    for (int i = 0; i < 2 * n_tries; i++) {
        inverse[i] = 1.0f / (tries[i % n_tries] * usual);
    }
    const both_halves<lanes> found(ordered, inverse);
    int                      best  = 0;
    float                    least = 0.0f;
    for (int i = 0; i < n_tries; i++) {
        const float error = (found.back(0, i).cost() + found.back(1, i).cost()) * tries[i] * tries[i];
        if (i == 0 || error < least) {
            least = error;
            best  = i;
        }
    }
    path_back<lanes>   first = found.back(0, best), second = found.back(1, best);
    halves_of_integers set, field;
    halves_of_numbers  level;
    for (int t = run - 1; t >= 0; t--) {
        set[0][t] = first.set_at(t);
        set[1][t] = second.set_at(t);
    }
    for (int h = 0; h < 2; h++) {
        for (int i = 0; i < run; i += lanes) {
            choose<lanes>(ordered[h] + i, inverse[best], set[h] + i, field[h] + i, level[h] + i);
        }
    }
    const uint16_t half = mixedkv::float_to_half(scale_of(ordered, level));
    std::memcpy(block, &half, sizeof(half));
    store_half(first.path, field[0], block + 2, block + 10);
    store_half(second.path, field[1], block + 18, block + 14);
}

} // namespace

void tc3_from_float(const float * x, void * row, int64_t n) {
    auto * blocks = static_cast<uint8_t *>(row);
    mixedkv::with_widest_registers([=](auto lanes) __attribute__((always_inline)) {
        for (int64_t i = 0; i < n / TC3_ELEMENTS; i++) {
            store_block<lanes>(x + i * TC3_ELEMENTS, blocks + i * TC3_BYTES);
        }
    });
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
