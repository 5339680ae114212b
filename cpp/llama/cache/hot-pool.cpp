// F16 rows that are fewer than the windows of all sequences would take: the sequences share pages. See docs/decisions/014.

#include "cache/hot-slots.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

llama_kv_hot_slots::page_info llama_kv_hot_slots::get_page(uint32_t strm, uint32_t i_page) const {
    const auto & cells = v_cells[strm];

    page_info res;

    for (uint32_t i = 0; i < layout.page; ++i) {
        const int32_t cell = rings[strm].cell_of(layout.first_of(i_page) + i);
        if (cell < 0) {
            continue;
        }

        res.first = res.owner < 0 ? cells.pos_get(cell) : std::min(res.first, cells.pos_get(cell));
        for (llama_seq_id s = get_seq(strm, cell), n_left = cells.seq_count(cell); n_left > 0; ++s) {
            if (cells.seq_has(cell, s)) {
                n_left--;
                res.owner = res.owner < 0 || use.step[s] > use.step[res.owner] ? s : res.owner;
            }
        }
    }

    return res;
}

bool llama_kv_hot_slots::is_free(const page_info & page, llama_seq_id seq_id) const {
    return page.owner < 0 || (page.owner != seq_id && use.step[page.owner] == 0);
}

int32_t llama_kv_hot_slots::assign_sink(uint32_t strm, uint32_t cell) {
    auto & ring = rings[strm];

    int32_t res = ring.assign(cell, first_sink(get_seq(strm, cell)) + v_cells[strm].pos_get(cell));

    for (uint32_t slot = 0; slot < layout.n_sinks && res < 0; ++slot) {
        if (ring.cell_of(slot) >= 0 && !window.is_sink(v_cells[strm].pos_get(ring.cell_of(slot)))) { // it was moved
            evict(strm, slot);
        }
        res = ring.assign(cell, slot);
    }

    return res;
}

// the slot after that of the token before, to the end of the page; none: the sequence's own pages have to do
int32_t llama_kv_hot_slots::next_in_page(uint32_t strm, uint32_t cell) {
    const int32_t last = last_slot(strm, cell);

    const bool goes_on = last >= int32_t(layout.n_sinks) && (last + 1 - layout.n_sinks) % layout.page != 0;

    return goes_on && rings[strm].cell_of(last + 1) < 0 ? last + 1 : next_page(strm, get_seq(strm, cell), last);
}

// The first slot of the page that a sequence goes on in, whose token before has the slot `last`. In this order: a free one, best
// behind its last one, else where others have least, since attention reads 64 slots at a time; its own that its window is about to
// leave; that of the sequence which has been idle the longest; that of the sequence which has the most and would still have as
// many. None: all are taken.
int32_t llama_kv_hot_slots::next_page(uint32_t strm, llama_seq_id seq_id, int32_t last) {
    std::vector<page_info> pages;
    std::vector<int64_t>   n_own(n_seq_max, 0);
    std::vector<int64_t>   n_near(layout.n_slots/mixedkv::hot_layout::largest_page + 1, 0);

    const auto near = [&](uint32_t i_page) -> int64_t & { return n_near[layout.first_of(i_page)/mixedkv::hot_layout::largest_page]; };

    for (uint32_t i = 0; i < layout.n_pages(); ++i) {
        pages.push_back(get_page(strm, i));
        if (!is_free(pages[i], seq_id)) {
            n_own[pages[i].owner]++;
            near(i)++;
        }
    }

    const uint64_t n_idle = std::min<uint64_t>(4*uint64_t(n_seq_max), 16); // who runs is evaluated within these steps
    const int32_t  behind = last - int32_t(layout.n_sinks) + 1;

    using rank = std::tuple<int, int64_t, llama_pos>; // the least is taken

    const auto get_rank = [&](uint32_t i) -> std::optional<rank> {
        const auto & [owner, first] = pages[i];
        if (is_free(pages[i], seq_id)) {
            return rank{ 0, int32_t(i*layout.page) == behind ? -1 : near(i), i };
        }
        if (owner == seq_id) {
            return rings[strm].cell_of(layout.first_of(i)) < 0 ? std::optional<rank>({ 1, 0, first }) : std::nullopt;
        }
        if (use.n_steps - use.step[owner] > n_idle) {
            return rank{ 2, use.step[owner], first };
        }
        return n_own[owner] >= n_own[seq_id] + 2 ? std::optional<rank>({ 3, -n_own[owner], first }) : std::nullopt;
    };

    std::optional<rank> best;
    uint32_t            res = 0;
    for (uint32_t i = 0; i < layout.n_pages(); ++i) {
        const auto rank = get_rank(i);
        if (rank && (!best || *rank < *best)) {
            best = rank;
            res  = i;
        }
    }

    if (!best) {
        return mixedkv::hot_ring::none;
    }
    if (pages[res].owner != seq_id) {
        evict_page(strm, res);
    }

    return layout.first_of(res);
}

// its page for the row that lay in this slot, if it is the sequence's own or nobody's
bool llama_kv_hot_slots::take_page(uint32_t strm, llama_seq_id seq_id, uint32_t slot) {
    if (!layout.is_in_page(slot)) {
        return false;
    }

    const auto page = get_page(strm, layout.page_of(slot));
    if (is_free(page, seq_id)) {
        evict_page(strm, layout.page_of(slot));
    }

    return is_free(page, seq_id) || page.owner == seq_id;
}

void llama_kv_hot_slots::evict_page(uint32_t strm, uint32_t i_page) {
    for (uint32_t i = 0; i < layout.page; ++i) {
        evict(strm, layout.first_of(i_page) + i);
    }
}
