#include "hot_set/hot_window.h"

#include "check.h"

#include <deque>

using mixedkv::hot_window;

// The rule as the design tells it: tokens arrive one by one, and whenever more than T are hot the oldest G leave.
static int32_t begin_by_story(uint32_t threshold, uint32_t group, int32_t q) {
    std::deque<int32_t> hot;
    for (int32_t p = 0; p <= q; p++) {
        hot.push_back(p);
        if (hot.size() > threshold) {
            for (uint32_t i = 0; i < group && !hot.empty(); i++) {
                hot.pop_front();
            }
        }
    }
    return hot.front();
}

static void rule_equals_story() {
    for (const uint32_t threshold : { 1u, 2u, 16u, 32u, 33u, 100u }) {
        for (const uint32_t group : { 1u, 2u, 7u, 16u, 32u }) {
            if (group > threshold) {
                continue; // refused: a group larger than the window can leave nothing hot
            }
            const hot_window window = { threshold, group, 0 };
            for (int32_t q = 0; q < 300; q++) {
                CHECK(window.begin(q) == begin_by_story(threshold, group, q));
            }
        }
    }
}

static void window_has_between_threshold_minus_group_and_threshold() {
    const hot_window window = { 32, 16, 4 };
    for (int32_t q = 32; q < 1000; q++) {
        const int32_t n_hot = q + 1 - window.begin(q);
        CHECK(n_hot > 32 - 16 && n_hot <= 32);
        CHECK(window.begin(q) >= window.begin(q - 1));
    }
}

static void sinks_stay() {
    const hot_window window = { 32, 16, 4 };
    CHECK(window.contains(3, window.begin(100000)));
    CHECK(!window.contains(4, window.begin(100000)));
}

static void no_window_keeps_nothing_but_sinks() {
    const hot_window window = { 0, 1, 2 };
    for (int32_t q = 0; q < 100; q++) {
        CHECK(window.begin(q) > q);
        CHECK(window.contains(1, window.begin(q)));
    }
}

static void positions_near_the_limit_do_not_overflow() {
    const hot_window window = { 32, 16, 0 };
    const int32_t    q      = INT32_MAX - 16;
    CHECK(window.begin(q) <= q);
    CHECK(window.begin(q) > q - 32);
}

static void problems_name_the_field() {
    CHECK(hot_window{ 32, 16, 4 }.problem().empty());
    CHECK(hot_window{ 0, 16, 4 }.problem().empty());
    CHECK(hot_window{ 8, 16, 4 }.problem().find("quantization_threshold 8") != std::string::npos);
    CHECK(hot_window{ 8, 0, 4 }.problem().find("group_size") != std::string::npos);
    for (const hot_window & huge : { hot_window{ UINT32_MAX, 1, 1 }, { 0, UINT32_MAX, 4 }, { 32, 1, UINT32_MAX } }) {
        CHECK(huge.problem().find("2147483647") != std::string::npos);
    }
    CHECK(hot_window{ INT32_MAX, 1, INT32_MAX }.rows() == 2 * uint64_t(INT32_MAX));
}

int main() {
    rule_equals_story();
    window_has_between_threshold_minus_group_and_threshold();
    sinks_stay();
    no_window_keeps_nothing_but_sinks();
    positions_near_the_limit_do_not_overflow();
    problems_name_the_field();
}
