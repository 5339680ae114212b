#include "hot_set/hot_layout.h"

#include <algorithm>

namespace mixedkv {

static uint64_t pad(uint64_t n, uint64_t to) {
    return (n + to - 1) / to * to;
}

// one more than a window fills: it may share its first one with others
static uint64_t pages_of_window(const hot_window & capacity, uint64_t page) {
    return pad(capacity.recent_rows(), page) / page + 1;
}

uint64_t hot_layout::all(const hot_window & capacity, uint32_t n_seq, uint32_t n_cells) {
    return std::min<uint64_t>(capacity.rows() * n_seq, n_cells);
}

uint64_t hot_layout::least(const hot_window & capacity, uint32_t n_seq, uint32_t n_cells) {
    const uint64_t sinks = pad(uint64_t(capacity.sink_tokens) * n_seq, smallest_page);
    return std::min(sinks + pages_of_window(capacity, smallest_page) * smallest_page, all(capacity, n_seq, n_cells));
}

// sequences that have windows at the same time: an engine runs half of those of a context, and the others rest
static uint64_t n_running(uint32_t n_seq) {
    return (uint64_t(n_seq) + 1) / 2;
}

uint64_t hot_layout::automatic(const hot_window & capacity, uint32_t n_seq, uint32_t n_cells,
                               const token_bytes & bytes) {
    // a fifth over what one sequence takes, without the row that nobody reads
    const uint64_t one     = rows(uint32_t(all(capacity, 1, n_cells)));
    const uint64_t most    = bytes.f16 == 0 ? 0 : (n_cells * bytes.cold / bytes.f16 + 6 * one) / 5 / 8 * 8;
    const uint64_t windows = pad(uint64_t(capacity.sink_tokens) * n_seq, usual_page) +
                             n_running(n_seq) * pages_of_window(capacity, usual_page) * usual_page;
    return std::max(least(capacity, n_seq, n_cells), std::min(most == 0 ? 0 : most - 1, windows));
}

hot_layout hot_layout::make(const hot_window & capacity, uint32_t n_seq, uint32_t n_cells, uint64_t budget) {
    const uint64_t n_sinks = uint64_t(capacity.sink_tokens) * n_seq;
    const uint64_t whole   = all(capacity, n_seq, n_cells);

    hot_layout res;

    if (budget >= whole) {
        res.n_slots = uint32_t(whole);
        res.n_sinks = uint32_t(std::min(n_sinks, whole));
        return res;
    }
    if (budget < least(capacity, n_seq, n_cells)) {
        return res;
    }

    const auto n_pages = [&](uint32_t page) {
        const uint64_t first = pad(n_sinks, page);
        return first < budget ? (budget - first) / page : 0;
    };
    const auto     n_windows = [&](uint32_t page) { return n_pages(page) / pages_of_window(capacity, page); };
    const uint64_t enough    = std::min(n_running(n_seq), std::max<uint64_t>(1, n_windows(usual_page)));

    // as large as they can be while every sequence may have one, and no fewer have whole windows than with the usual
    // ones
    for (uint32_t page = largest_page; page >= smallest_page; page /= 2) {
        if (page == smallest_page || (n_pages(page) >= n_seq && n_windows(page) >= enough)) {
            res.n_slots = uint32_t(pad(n_sinks, page) + n_pages(page) * page);
            res.n_sinks = uint32_t(pad(n_sinks, page));
            res.page    = page;
            return res;
        }
    }

    return res;
}

} // namespace mixedkv
