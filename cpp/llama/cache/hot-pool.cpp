// F16 rows that are fewer than the sequences' windows would take: who gets them, and who gives them up. See docs/decisions/014.

#include "cache/hot-slots.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

llama_kv_hot_slots::page_info llama_kv_hot_slots::ring_page(uint32_t strm, uint32_t i_page) const {
    const auto & cells = v_cells[strm];
    const auto & ring  = rings[strm];

    page_info res;

    for (uint32_t i = 0; i < layout.page; ++i) {
        const int32_t cell = ring.cell_of(layout.first_of(i_page) + i);
        if (cell < 0 || cells.is_empty(cell)) {
            continue;
        }

        const llama_pos p    = cells.pos_get(cell);
        const auto &    seqs = cells.seq_get_all(cell);

        for (size_t s = 0, n_left = seqs.count(); n_left > 0; ++s) {
            if (seqs.test(s)) {
                n_left--;
                res.owner = res.owner < 0 || use.step[s] > use.step[res.owner] ? llama_seq_id(s) : res.owner;
            }
        }
        res.first   = res.n_rows == 0 ? p : std::min(res.first, p);
        res.is_kept = res.is_kept || window.is_sink(p);
        res.n_rows++;
    }

    return res;
}

const std::vector<llama_kv_hot_slots::page_info> & llama_kv_hot_slots::ring_pages(uint32_t strm) {
    for (uint32_t i = known_pages.size(); i < layout.n_pages(); ++i) {
        known_pages.push_back(ring_page(strm, i));
    }
    return known_pages;
}

void llama_kv_hot_slots::renew_page(uint32_t strm, uint32_t i_page) {
    if (i_page < known_pages.size()) {
        known_pages[i_page] = ring_page(strm, i_page);
    }
}

int32_t llama_kv_hot_slots::assign_sink(uint32_t strm, uint32_t cell) {
    auto & ring = rings[strm];

    const uint32_t p = v_cells[strm].pos_get(cell);

    int32_t res = ring.assign(cell, first_sink(get_seq(strm, cell)) + p);

    for (uint32_t slot = 0; slot < layout.n_sinks && res < 0; ++slot) {
        res = ring.assign(cell, slot);
    }
    for (uint32_t slot = 0; slot < layout.n_sinks && res < 0; ++slot) {
        if (!window.is_sink(v_cells[strm].pos_get(ring.cell_of(slot)))) { // its position was another one
            evict(strm, slot);
            res = ring.assign(cell, slot);
        }
    }
    if (res < 0) { // several tokens at one position
        lose(strm, cell);
    }

    return res;
}

// The slot after that of the token before it, to the end of the page or where older rows of the sequence lie; then in the
// sequence's first page, if its window has moved on there; then in another page. A sequence that gets no other fills those that
// it has, and goes round in them.
int32_t llama_kv_hot_slots::assign_in_page(uint32_t strm, uint32_t cell) {
    auto &       ring  = rings[strm];
    const auto & cells = v_cells[strm];

    const llama_seq_id seq_id = get_seq(strm, cell);
    const int32_t      last   = last_slot(strm, cell);

    const auto is_older = [&](uint32_t slot) {
        const int32_t other = ring.cell_of(slot);
        return other >= 0 && cells.seq_has(other, seq_id) && cells.pos_get(other) < cells.pos_get(cell) &&
            !window.is_sink(cells.pos_get(other));
    };

    const bool goes_on = last >= 0 && layout.is_in_page(last) && uint32_t(last) + 1 < layout.n_slots &&
        layout.page_of(last) == layout.page_of(last + 1);

    int32_t res = goes_on ? ring.assign(cell, last + 1) : mixedkv::hot_ring::none;
    if (res < 0) {
        int32_t slot = next_page(strm, seq_id, last);
        if (slot < 0) {
            slot = last_resort(strm, seq_id);
        }
        if (slot >= 0 && is_older(slot)) {
            evict(strm, slot);
        }
        res = slot >= 0 ? ring.assign(cell, slot) : slot;
    }
    if (res < 0) {
        lose(strm, cell);
    } else {
        renew_page(strm, layout.page_of(res));
    }

    return res;
}

// the first slot of the page that a sequence goes on in, whose token before has the slot `last`; -1 where only its own are left
int32_t llama_kv_hot_slots::next_page(uint32_t strm, llama_seq_id seq_id, int32_t last) {
    const auto & pages = ring_pages(strm);
    const auto   none  = pages.size();

    std::vector<uint32_t> n_own(n_seq_max, 0);
    for (const auto & page : pages) {
        if (page.n_rows > 0) {
            n_own[page.owner]++;
        }
    }

    // the page with the least rank of those that will do
    const auto choose = [&](auto && will_do, auto && rank) {
        size_t res = none;
        for (size_t i = 0; i < pages.size(); ++i) {
            if (will_do(i) && (res == none || rank(i) < rank(res))) {
                res = i;
            }
        }
        return res;
    };

    const auto is_first_free = [&](size_t i) { return rings[strm].cell_of(layout.first_of(i)) < 0; };
    // rows of a sequence that rests count for nothing, or where this one goes on would depend on who was there before
    const auto is_free       = [&](size_t i) { return pages[i].n_rows == 0 || is_resting(pages[i], seq_id); };
    const auto is_own        = [&](size_t i) { return pages[i].n_rows > 0 && pages[i].owner == seq_id; };
    const auto oldest        = [&](size_t i) { return pages[i].first; };

    // its own, where its window has moved on
    size_t res = choose([&](size_t i) { return is_own(i) && is_first_free(i); }, oldest);

    // a free one, best behind its last one, else where others need it least: attention reads 64 slots at a time
    if (res == none) {
        const size_t behind = last >= 0 && layout.is_in_page(last) ? layout.page_of(last) + 1 : none;
        const auto   block  = [&](size_t i) { return layout.first_of(i)/mixedkv::hot_layout::largest_page; };

        std::map<size_t, uint32_t> n_used;
        for (size_t i = 0; i < pages.size(); ++i) {
            n_used[block(i)] += !is_free(i);
        }
        res = choose(is_free, [&](size_t i) { return std::make_pair(i != behind, n_used[block(i)]); });
    }

    // of the sequence that has been idle the longest
    if (res == none) {
        const uint64_t n_idle  = std::min<uint64_t>(4*uint64_t(n_seq_max), 16); // who runs has its turn within these steps
        const auto     is_idle = [&](size_t i) {
            return !pages[i].is_kept && pages[i].owner != seq_id && use.n_steps - use.step[pages[i].owner] > n_idle;
        };
        res = choose(is_idle, [&](size_t i) { return std::make_tuple(use.step[pages[i].owner], pages[i].owner, pages[i].first); });
    }

    // of the sequence that has the most, and would still have as many
    if (res == none) {
        const auto is_rich = [&](size_t i) { return !pages[i].is_kept && n_own[pages[i].owner] >= n_own[seq_id] + 2; };
        res = choose(is_rich, [&](size_t i) { return std::make_tuple(-int64_t(n_own[pages[i].owner]), pages[i].owner, pages[i].first); });
    }

    if (res == none) {
        return mixedkv::hot_ring::none;
    }
    if (!is_own(res)) {
        evict_page(strm, res);
    }

    return layout.first_of(res);
}

// in a sequence's own pages: a free slot, or that of its oldest row
int32_t llama_kv_hot_slots::last_resort(uint32_t strm, llama_seq_id seq_id) {
    const auto & cells = v_cells[strm];
    const auto & pages = ring_pages(strm);

    int32_t   res    = mixedkv::hot_ring::none;
    llama_pos lowest = 0;

    for (uint32_t slot = layout.n_sinks; slot < layout.n_slots; ++slot) {
        const auto & page = pages[layout.page_of(slot)];
        if (page.n_rows == 0 || page.owner != seq_id) {
            continue;
        }
        const int32_t cell = rings[strm].cell_of(slot);
        if (cell < 0) {
            return slot;
        }
        const llama_pos p = cells.pos_get(cell);
        if (cells.seq_has(cell, seq_id) && !window.is_sink(p) && (res < 0 || p < lowest)) {
            res    = slot;
            lowest = p;
        }
    }

    return res;
}

bool llama_kv_hot_slots::is_resting(const page_info & page, llama_seq_id seq_id) const {
    return page.n_rows > 0 && !page.is_kept && page.owner != seq_id && use.step[page.owner] == 0;
}

void llama_kv_hot_slots::evict_page(uint32_t strm, uint32_t i_page) {
    for (uint32_t i = 0; i < layout.page; ++i) {
        evict(strm, layout.first_of(i_page) + i);
    }
    renew_page(strm, i_page);
}

// a page for the row that lay in this slot: it is the sequence's own, or nobody needs it now
bool llama_kv_hot_slots::take_page_of(uint32_t strm, llama_seq_id seq_id, uint32_t slot) {
    if (!layout.is_in_page(slot)) {
        return false;
    }
    const uint32_t i_page = layout.page_of(slot);
    const auto     page   = ring_page(strm, i_page);
    if (is_resting(page, seq_id)) {
        evict_page(strm, i_page);
        return true;
    }
    return page.n_rows == 0 || page.owner == seq_id;
}

void llama_kv_hot_slots::evict(uint32_t strm, uint32_t slot) {
    const int32_t cell = rings[strm].cell_of(slot);
    if (cell >= 0) {
        lose(strm, cell);
        rings[strm].release(slot);
    }
}

void llama_kv_hot_slots::lose(uint32_t strm, uint32_t cell) {
    const auto & cells = v_cells[strm];

    if (cells.is_empty(cell)) {
        return;
    }

    use.n_evicted++;
    for (uint32_t s = 0; s < n_seq_max; ++s) {
        if (cells.seq_has(cell, s)) {
            use.lost[s] = std::max(use.lost[s], cells.pos_get(cell));
        }
    }
}

void llama_kv_hot_slots::use_by(const llama_ubatch & ubatch) {
    use.n_steps++;

    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        for (int32_t j = 0; j < ubatch.n_seq_id[i]; ++j) {
            const llama_seq_id s = ubatch.seq_id[i][j];

            use.step[s] = use.n_steps;

            if (use.lost[s] >= 0 && window.contains(use.lost[s], window.begin(ubatch.pos[i]))) {
                use.short_from[s] = use.short_from[s] < 0 ? ubatch.pos[i] : std::min(use.short_from[s], ubatch.pos[i]);
            }
        }
    }
}

void llama_kv_hot_slots::trim_use() {
    for (uint32_t s = 0; s < n_seq_max; ++s) {
        const llama_pos last = v_cells[seq_to_stream[s]].seq_pos_max(s);

        use.lost[s]       = std::min(use.lost[s], last);
        use.short_from[s] = use.short_from[s] > last ? -1 : use.short_from[s];
    }
}

void llama_kv_hot_slots::renew_use(llama_seq_id seq_id) {
    const uint32_t strm = seq_to_stream[seq_id];
    const auto &   rows = v_cells[strm].seq_pos_get(seq_id);

    if (!layout.is_shared() || rows.empty()) {
        return;
    }

    const llama_pos begin = window.begin(rows.rbegin()->first + 1);

    use.lost[seq_id] = -1; // what was restored is no longer lost

    for (const auto & [p, cell] : rows) {
        if (window.contains(p, begin) && rings[strm].slot_of(cell) < 0) {
            use.lost[seq_id] = std::max(use.lost[seq_id], p);
        }
    }
}

bool llama_kv_hot_slots::is_window_whole(llama_seq_id seq_id, llama_pos pos) const {
    const uint32_t strm  = seq_to_stream[seq_id];
    const auto &   rows  = v_cells[strm].seq_pos_get(seq_id);
    const auto     begin = window.begin(pos);

    const auto is_whole = [&](llama_pos p0, llama_pos p1) {
        for (auto it = rows.lower_bound({ p0, 0 }); it != rows.end() && it->first < p1; ++it) {
            if (rings[strm].slot_of(it->second) < 0) {
                return false;
            }
        }
        return true;
    };

    return is_whole(0, std::min<llama_pos>(pos, window.sink_tokens)) && is_whole(begin, pos);
}
