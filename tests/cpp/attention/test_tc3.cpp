// The conversion to tc3 and back: its error, its layout, and what it does with rows that no model has.

#include "attention/tc3.h"

#include "check.h"
#include "packed_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace {

constexpr test::packed_rows<TC3_ELEMENTS, TC3_BYTES> rows{ tc3_from_float, tc3_to_float };

// Eight levels for each element, with the best of five scales, leave 2.96e-2
void error_of_gaussian_rows() {
    for (const float size : { 1e-3f, 1.0f, -1.0f, 3e3f }) {
        const auto x = test::gauss(1 << 16, size);
        CHECK(test::relative_error(x, rows.stored(x)) < 2.25e-2);
    }
}

// As the header has it, word by word
void layout_is_that_of_the_header() {
    const int levels[16] = { TC3_LEVELS };
    for (int turn = 0; turn < 256; turn++) {
        std::vector<uint8_t> block(TC3_BYTES);
        const uint16_t       one = test::to_half(1.0f);
        std::memcpy(block.data(), &one, 2);
        for (int i = 2; i < TC3_BYTES; i++) {
            block[i] = uint8_t(turn * i * i + 37 * i);
        }
        const std::vector<float> x = rows.dequantise(block);
        for (int half = 0; half < 2; half++) {
            const uint8_t * fields = &block[half ? 18 : 2];
            const uint8_t * path   = &block[half ? 14 : 10];
            const auto      bit    = [&](int t) { return t < 0 ? 0 : path[t / 8] >> t % 8 & 1; };
            for (int t = 0; t < 32; t++) {
                const int position = t % 8;
                const int column   = (position & 4) | (position & 1) << 1 | (position & 2) >> 1;
                const int field    = fields[(position & 1) * 4 + t / 8] >> (position & 6) & 3;
                const int index    = 4 * field + 2 * (bit(t) ^ bit(t - 2)) + bit(t - 1);
                CHECK(x[32 * half + 4 * column + t / 8] == float(levels[index]));
            }
        }
    }
}

// The block with the path of least cost, found element by element in one scale after the other
std::vector<uint8_t> best_block(const float * x) {
    constexpr float      never    = 1e30f;
    const float          levels[] = { TC3_LEVELS };
    std::vector<uint8_t> block(TC3_BYTES);
    float                sum = 0.0f;
    for (int i = 0; i < TC3_ELEMENTS; i++) {
        sum += x[i] * x[i];
    }
    const float usual = std::sqrt(sum / TC3_ELEMENTS) / 51.0f;
    float       least = INFINITY;
    for (const float scale : { 0.84f, 0.95f, 1.06f, 1.2f }) {
        const float          inverse = 1.0f / (scale * usual);
        std::vector<uint8_t> found(TC3_BYTES);
        float                costs = 0.0f;
        int                  index[TC3_ELEMENTS];
        for (int half = 0; half < 2; half++) {
            const auto place = [&](int t) {
                const int position = t % 8;
                const int column   = (position & 4) | (position & 1) << 1 | (position & 2) >> 1;
                return 32 * half + 4 * column + t / 8;
            };
            const auto nearest = [&](int t, int set) {
                const float y    = x[place(t)] * inverse;
                int         best = set;
                for (int i = set + 4; i < 16; i += 4) {
                    best = std::fabs(y - levels[i]) < std::fabs(y - levels[best]) ? i : best;
                }
                return best;
            };
            // of the two bits before an element, the older one is the higher
            const auto set_of  = [](int before, int bit) { return 2 * (bit ^ before >> 1) + (before & 1); };
            float      cost[4] = { 0.0f, never, never, never };
            int        from[32][4];
            for (int t = 0; t < 32; t++) {
                float next[4] = { INFINITY, INFINITY, INFINITY, INFINITY };
                for (int before = 0; before < 4; before++) {
                    for (int bit = 0; bit < 2; bit++) {
                        const int   to = (2 * before + bit) & 3;
                        const float d  = x[place(t)] * inverse - levels[nearest(t, set_of(before, bit))];
                        if (cost[before] + d * d < next[to]) {
                            next[to]    = cost[before] + d * d;
                            from[t][to] = before;
                        }
                    }
                }
                std::copy(next, next + 4, cost);
            }
            int state = int(std::min_element(cost, cost + 4) - cost);
            costs += cost[state];
            for (int t = 31; t >= 0; t--) {
                const int before = from[t][state], bit = state & 1, position = t % 8;
                index[place(t)] = nearest(t, set_of(before, bit));
                found[(half ? 14 : 10) + t / 8] |= uint8_t(bit << position);
                found[(half ? 18 : 2) + (position & 1) * 4 + t / 8] |= uint8_t(index[place(t)] / 4 << (position & 6));
                state = before;
            }
        }
        if (costs * scale * scale < least) {
            least    = costs * scale * scale;
            float xy = 0.0f, yy = 0.0f;
            for (int i = 0; i < TC3_ELEMENTS; i++) {
                xy += x[i] * levels[index[i]];
                yy += levels[index[i]] * levels[index[i]];
            }
            const uint16_t half = test::to_half(xy / yy);
            std::memcpy(found.data(), &half, sizeof(half));
            block = found;
        }
    }
    return block;
}

// However many scales and halves a processor tries at once. Other machines than x86-64 may fuse products and sums.
void blocks_are_the_best_ones() {
#ifdef __x86_64__
    test::rng r(7);
    for (int turn = 0; turn < 300; turn++) {
        std::vector<float> x = test::gauss(TC3_ELEMENTS, 1.0f);
        for (float & e : x) {
            e = r.gauss();
            e *= turn % 3 == 1 ? e * e : 1.0f;
            e = turn % 3 == 2 ? std::round(3.0f * e) : e; // many ties
        }
        CHECK(rows.pack(x) == best_block(x.data()));
    }
#endif
}

void rows_that_no_model_has() {
    const std::vector<float> zeros(2 * TC3_ELEMENTS);
    CHECK(rows.stored(zeros) == zeros);

    std::vector<float> one = zeros; // the other block stays zero
    one[70]                = 3.0f;
    const auto back        = rows.stored(one);
    CHECK(std::fabs(back[70] - 3.0f) < 2.0f && std::equal(zeros.begin(), zeros.begin() + TC3_ELEMENTS, back.begin()));

    for (const float x : { 65504.0f, -65504.0f, 1e-7f }) {
        for (const float y : rows.stored(std::vector<float>(TC3_ELEMENTS, x))) {
            CHECK(std::isfinite(y) && std::fabs(y - x) <= 0.3f * std::fabs(x) + 3e-8f * 127);
        }
    }
    for (const float odd : { NAN, INFINITY }) { // its block alone is lost
        std::vector<float> x = test::gauss(2 * TC3_ELEMENTS, 1.0f);
        const auto         y = rows.stored(x);
        x[3]                 = odd;
        const auto z         = rows.stored(x);
        CHECK(std::memcmp(&y[TC3_ELEMENTS], &z[TC3_ELEMENTS], TC3_ELEMENTS * sizeof(float)) == 0);
        for (const float value : z) {
            CHECK(std::isfinite(value));
        }
    }
}

} // namespace

int main() {
    error_of_gaussian_rows();
    layout_is_that_of_the_header();
    blocks_are_the_best_ones();
    rows_that_no_model_has();
    CHECK(rows.dot_is_that_of_the_stored_row(tc3_dot));
    return 0;
}
