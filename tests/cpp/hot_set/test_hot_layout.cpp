#include "hot_set/hot_layout.h"

#include "check.h"

using mixedkv::hot_layout;
using mixedkv::hot_window;

static const uint32_t ALL = UINT32_MAX;

static hot_window make_window(uint32_t threshold, uint32_t sinks, uint32_t n_draft) {
    hot_window res;
    res.threshold   = threshold;
    res.sink_tokens = sinks;
    res.n_draft     = n_draft;
    return res;
}

template <typename F>
static void for_each_setting(F && body) {
    for (const uint32_t threshold : { 0, 1, 7, 32, 128, 256, 1000 }) {
        for (const uint32_t sinks : { 0, 4, 30 }) {
            for (const uint32_t n_draft : { 0, 16 }) {
                for (const uint32_t n_seq : { 1, 2, 8, 16, 64, 256 }) {
                    for (const uint32_t n_cells : { 256, 512, 8192, 32768 }) {
                        body(make_window(threshold, sinks, n_draft), n_seq, n_cells);
                    }
                }
            }
        }
    }
}

static void check(const hot_layout & layout, const hot_window & window, uint32_t n_seq, uint64_t budget) {
    CHECK(layout.n_slots <= budget);
    if (!layout.is_shared()) {
        return;
    }
    CHECK(layout.n_sinks >= window.sink_tokens * n_seq);
    CHECK(layout.n_slots == layout.n_sinks + layout.n_pages() * layout.page);
    CHECK(layout.n_pages() * layout.page >= window.recent_rows() + layout.page); // one whole window, wherever it begins
    for (uint32_t i = 0; i < layout.n_pages(); i++) {
        const uint32_t first = layout.first_of(i);
        CHECK(first / 64 == (first + layout.page - 1) / 64);
        CHECK(layout.page_of(first) == i && layout.page_of(first + layout.page - 1) == i);
    }
}

static void every_budget_is_kept_or_refused() {
    for_each_setting([](const hot_window & window, uint32_t n_seq, uint32_t n_cells) {
        const uint64_t least = hot_layout::least(window, n_seq, n_cells);
        const uint64_t all   = hot_layout::all(window, n_seq, n_cells);
        CHECK(least <= all);
        CHECK(hot_layout::make(window, n_seq, n_cells, ALL).n_slots == all);
        CHECK(!hot_layout::make(window, n_seq, n_cells, ALL).is_shared());
        for (uint64_t budget = least; budget < all; budget += 1 + budget / 37) {
            const hot_layout layout = hot_layout::make(window, n_seq, n_cells, budget);
            CHECK(layout.n_slots > 0 && layout.is_shared());
            check(layout, window, n_seq, budget);
        }
        CHECK(least == 0 || hot_layout::make(window, n_seq, n_cells, least - 1).n_slots == 0);
    });
}

// how many sequences have a whole window at the same time, wherever it begins
static uint64_t count_windows(const hot_layout & layout, const hot_window & window) {
    return layout.n_pages() / ((window.recent_rows() + layout.page - 1) / layout.page + 1);
}

static void the_default_has_windows_for_half_of_the_sequences_or_takes_a_fifth_more_than_one() {
    const uint64_t f16 = 16 * 1024;
    for_each_setting([&](const hot_window & window, uint32_t n_seq, uint32_t n_cells) {
        for (const uint64_t cold : { f16 * 45 / 160, f16 * 65 / 160, f16 * 85 / 160 }) {
            const uint64_t   budget = hot_layout::automatic(window, n_seq, n_cells, { cold, f16 });
            const hot_layout layout = hot_layout::make(window, n_seq, n_cells, budget);
            check(layout, window, n_seq, budget);
            const uint64_t bytes    = hot_layout::rows(layout.n_slots) * f16;
            const uint64_t one      = hot_layout::rows(hot_layout::all(window, 1, n_cells)) * f16;
            const bool     is_least = budget == hot_layout::least(window, n_seq, n_cells);
            CHECK(is_least || bytes * 5 <= n_cells * cold + 6 * one);
            const bool has_windows = !layout.is_shared() || count_windows(layout, window) >= (n_seq + 1) / 2;
            CHECK(has_windows || is_least ||
                  (bytes + 80 * f16) * 5 >= n_cells * cold + 6 * one); // a page is left over at most
        }
    });
}

static void presets_at_the_servers_defaults() {
    const uint64_t f16 = 160;
    struct {
        uint32_t threshold;
        uint64_t cold;
        uint64_t n_windows;
    } presets[] = { { 64, 45, 5 }, { 128, 65, 4 }, { 256, 85, 3 } };
    for (const auto & preset : presets) {
        const hot_window window = make_window(preset.threshold, 4, 16);
        const uint64_t   budget = hot_layout::automatic(window, 16, 8192, { preset.cold, f16 });
        const hot_layout layout = hot_layout::make(window, 16, 8192, budget);
        CHECK(layout.is_shared() && layout.n_pages() >= 16);
        CHECK(count_windows(layout, window) == preset.n_windows);
        const uint64_t one = hot_layout::rows(hot_layout::all(window, 1, 8192)) * f16;
        CHECK(hot_layout::rows(layout.n_slots) * f16 * 5 <= 8192 * preset.cold + 6 * one);
        CHECK(layout.n_slots * 10 >= budget * 9); // and hardly any of it is left over
    }
}

int main() {
    every_budget_is_kept_or_refused();
    the_default_has_windows_for_half_of_the_sequences_or_takes_a_fifth_more_than_one();
    presets_at_the_servers_defaults();
}
