// Slots are taken by hot tokens and let go of as the window moves on.

#include "cache/hot-slots.h"

#include <algorithm>
#include <iterator>
#include <utility>

llama_kv_hot_slots::llama_kv_hot_slots(
        const llama_kv_cells_vec    & cells,
        const std::vector<uint32_t> & seq_to_stream,
                      uint32_t        n_seq_max,
    const mixedkv::hot_window       & window,
    const mixedkv::hot_layout       & layout) :
    v_cells(cells), seq_to_stream(seq_to_stream), n_seq_max(n_seq_max), n_stream(cells.size()), window(window), layout(layout) {
    for (const auto & stream : cells) {
        rings.emplace_back(layout.n_slots, stream.size());
    }

    use.step.assign(n_seq_max, 0);
    use.short_from.assign(n_seq_max, -1);

    begins.assign(n_seq_max, 0);
    dirty.assign(n_stream, false);
}

//
// what is held
//

uint32_t llama_kv_hot_slots::get_n_cells_hot() const {
    uint32_t res = 0;

    auto hot = window;
    hot.n_draft = 0;

    for (uint32_t strm = 0; strm < n_stream; ++strm) {
        for (const int32_t cell : rings[strm].owners()) {
            res += cell >= 0 && is_wanted(strm, cell, hot);
        }
    }

    return res;
}

int32_t llama_kv_hot_slots::get_hot_slot(uint32_t strm, uint32_t cell, llama_pos begin) const {
    return window.contains(v_cells[strm].pos_get(cell), begin) ? rings[strm].slot_of(cell) : mixedkv::hot_ring::none;
}

bool llama_kv_hot_slots::is_wanted(uint32_t strm, uint32_t cell, const mixedkv::hot_window & window) const {
    const auto & cells = v_cells[strm];

    const llama_pos p = cells.pos_get(cell);

    if (window.is_sink(p)) {
        return true;
    }

    const auto & seqs = cells.seq_get_all(cell);

    for (uint32_t s = 0; s < n_seq_max; ++s) {
        if (seqs.test(s) && p >= window.held_begin(cells.seq_pos_max(s))) {
            return true;
        }
    }

    return false;
}

bool llama_kv_hot_slots::is_window_whole(llama_seq_id seq_id, llama_pos pos) const {
    const uint32_t strm = seq_to_stream[seq_id];
    const auto &   rows = v_cells[strm].seq_pos_get(seq_id);

    const auto is_whole = [&](llama_pos p0, llama_pos p1) {
        for (auto it = rows.lower_bound({ p0, 0 }); it != rows.end() && it->first < p1; ++it) {
            if (rings[strm].slot_of(it->second) < 0) {
                return false;
            }
        }
        return true;
    };

    return is_whole(0, std::min<llama_pos>(pos, window.sink_tokens)) && is_whole(window.begin(pos), pos);
}

//
// sequence operations
//

void llama_kv_hot_slots::clear() {
    for (auto & ring : rings) {
        ring.clear();
    }

    std::fill(begins.begin(), begins.end(), 0);
    trim_use();
}

void llama_kv_hot_slots::seq_cp(llama_seq_id seq_id_src, llama_seq_id seq_id_dst) {
    const uint32_t s0 = seq_to_stream[seq_id_src];
    const uint32_t s1 = seq_to_stream[seq_id_dst];

    if (s0 != s1) {
        rings[s1] = rings[s0];
    }

    // what is known of both holds, since the target may have had rows of its own
    const llama_pos a = use.short_from[seq_id_src];
    const llama_pos b = use.short_from[seq_id_dst];

    use.short_from[seq_id_dst] = a < 0 ? b : b < 0 ? a : std::min(a, b);
    use.step[seq_id_dst]       = std::max(use.step[seq_id_src], use.step[seq_id_dst]);

    release_dead();
}

void llama_kv_hot_slots::seq_add(llama_pos shift) {
    // cells have one position: those of other sequences may have moved as well
    for (auto & p : use.short_from) {
        p = p < 0 ? p : std::max(p + std::min(shift, 0), 0);
    }

    release_dead(); // cells moved below position 0 are gone
}

void llama_kv_hot_slots::seq_div(int d) {
    for (auto & p : use.short_from) {
        p = p < 0 ? p : p/d;
    }
    dirty.assign(n_stream, true);
}

void llama_kv_hot_slots::release_dead() {
    for (uint32_t strm = 0; strm < n_stream; ++strm) {
        for (uint32_t slot = 0; slot < rings[strm].n_slots(); ++slot) {
            const int32_t cell = rings[strm].cell_of(slot);
            if (cell >= 0 && v_cells[strm].is_empty(cell)) {
                rings[strm].release(slot);
            }
        }
    }

    dirty.assign(n_stream, true);
    trim_use();
}

void llama_kv_hot_slots::release_cells(uint32_t strm, const std::vector<uint32_t> & cells) {
    for (const uint32_t cell : cells) {
        if (rings[strm].slot_of(cell) >= 0) {
            rings[strm].release(rings[strm].slot_of(cell));
        }
    }
}

void llama_kv_hot_slots::release_unwanted(uint32_t strm, const mixedkv::hot_window & window) {
    for (uint32_t slot = 0; slot < rings[strm].n_slots(); ++slot) {
        const int32_t cell = rings[strm].cell_of(slot);
        if (cell >= 0 && (v_cells[strm].is_empty(cell) || !is_wanted(strm, cell, window))) {
            rings[strm].release(slot);
        }
    }
}

void llama_kv_hot_slots::release_left(uint32_t strm, const llama_ubatch & ubatch) {
    const auto & cells = v_cells[strm];

    for (uint32_t i = 0; i < ubatch.n_seqs_unq; ++i) {
        const llama_seq_id seq_id = ubatch.seq_id_unq[i];
        if (seq_to_stream[seq_id] != strm) {
            continue;
        }

        const llama_pos begin = window.held_begin(cells.seq_pos_max(seq_id));
        const auto &    rows  = cells.seq_pos_get(seq_id);

        for (auto it = rows.lower_bound({ begins[seq_id], 0 }); it != rows.end() && it->first < begin; ++it) {
            const int32_t slot = rings[strm].slot_of(it->second);
            if (slot >= 0 && !is_wanted(strm, it->second, window)) {
                rings[strm].release(slot);
            }
        }

        begins[seq_id] = begin;
    }
}

void llama_kv_hot_slots::evict(uint32_t strm, uint32_t slot) {
    if (rings[strm].cell_of(slot) >= 0) {
        use.n_evicted++;
        rings[strm].release(slot);
    }
}

uint32_t llama_kv_hot_slots::first_sink(llama_seq_id seq_id) const {
    return n_stream == 1 ? uint32_t(seq_id)*window.sink_tokens : 0;
}

uint32_t llama_kv_hot_slots::first_recent(llama_seq_id seq_id) const {
    return layout.n_sinks + (n_stream == 1 ? uint32_t(seq_id)*window.recent_rows() : 0);
}

int32_t llama_kv_hot_slots::get_own_slot(llama_seq_id seq_id, int32_t slot) const {
    const int32_t sink    = slot - int32_t(first_sink(seq_id));
    const int32_t recent  = slot - int32_t(first_recent(seq_id));
    const int32_t n_sinks = window.sink_tokens;

    if (sink >= 0 && sink < n_sinks) {
        return sink;
    }
    if (!layout.is_shared() && recent >= 0 && recent < int32_t(window.recent_rows())) {
        return n_sinks + recent;
    }

    return window.rows() + slot;
}

llama_seq_id llama_kv_hot_slots::get_seq(uint32_t strm, uint32_t cell) const {
    llama_seq_id res = 0;
    while (!v_cells[strm].seq_has(cell, res)) {
        ++res;
    }
    return res;
}

int32_t llama_kv_hot_slots::last_slot(uint32_t strm, uint32_t cell) const {
    const auto &    cells = v_cells[strm];
    const llama_pos p     = cells.pos_get(cell);
    const auto &    rows  = cells.seq_pos_get(get_seq(strm, cell));
    const auto      it    = rows.lower_bound({ p, 0 });

    return it != rows.begin() && std::prev(it)->first == p - 1 ? rings[strm].slot_of(std::prev(it)->second) : mixedkv::hot_ring::none;
}

uint32_t llama_kv_hot_slots::next_slot(uint32_t strm, uint32_t cell) const {
    const llama_seq_id seq_id = get_seq(strm, cell);

    const uint32_t  first = first_recent(seq_id);
    const uint32_t  n     = window.recent_rows();
    const llama_pos p     = v_cells[strm].pos_get(cell);

    if (n == 0 || window.sink_tokens > uint32_t(p)) {
        return first_sink(seq_id) + std::min<uint32_t>(p, window.sink_tokens);
    }

    const int32_t last = last_slot(strm, cell);
    if (last >= int32_t(first) && last < int32_t(first + n)) {
        return first + (last - first + 1) % n;
    }

    return first + (p - window.sink_tokens) % n;
}

int32_t llama_kv_hot_slots::oldest_slot(uint32_t strm, uint32_t cell) const {
    const llama_seq_id seq_id = get_seq(strm, cell);
    const auto &       cells  = v_cells[strm];
    const auto &       rows   = cells.seq_pos_get(seq_id);
    const llama_pos    begin  = std::max<llama_pos>(window.sink_tokens, window.held_begin(cells.seq_pos_max(seq_id)));

    for (auto it = rows.lower_bound({ begin, 0 }); it != rows.end() && it->first <= cells.pos_get(cell); ++it) {
        if (const int32_t slot = rings[strm].slot_of(it->second); slot >= int32_t(layout.n_sinks)) {
            return slot;
        }
    }

    return mixedkv::hot_ring::none;
}

int32_t llama_kv_hot_slots::assign_slot(uint32_t strm, uint32_t cell) {
    auto & ring = rings[strm];

    if (layout.is_shared() && window.is_sink(v_cells[strm].pos_get(cell))) {
        return assign_sink(strm, cell);
    }

    int32_t res = ring.assign(cell, layout.is_shared() ? next_in_page(strm, cell) : next_slot(strm, cell));
    if (res < 0 && !layout.is_shared()) {
        res = ring.assign(cell);
    }
    if (res >= 0) {
        return res;
    }

    // a pool that has no page left, or several tokens at one position: more rows are wanted than there are slots
    const int32_t oldest = oldest_slot(strm, cell);
    if (oldest < 0) {
        use.n_evicted++;
        return mixedkv::hot_ring::none;
    }
    evict(strm, oldest);

    return ring.assign(cell, oldest);
}

int32_t llama_kv_hot_slots::assign_own_slot(llama_seq_id seq_id, uint32_t cell, uint32_t wanted, bool is_alone) {
    const uint32_t strm = seq_to_stream[seq_id];
    const uint32_t own  = window.rows();

    auto & ring = rings[strm];

    if (wanted < own) {
        const bool is_sink = wanted < window.sink_tokens;
        if (layout.is_shared() && !is_sink) {
            return mixedkv::hot_ring::none;
        }
        return ring.assign(cell, is_sink ? first_sink(seq_id) + wanted : first_recent(seq_id) + wanted - window.sink_tokens);
    }

    // elsewhere: as it was, if nobody else is in the way
    const uint32_t slot = wanted - own;
    if (slot >= layout.n_slots || window.is_sink(v_cells[strm].pos_get(cell)) != (slot < layout.n_sinks)) {
        return mixedkv::hot_ring::none;
    }
    return is_alone || take_page(strm, seq_id, slot) ? ring.assign(cell, slot) : mixedkv::hot_ring::none;
}

//
// steps
//

void llama_kv_hot_slots::use_by(const llama_ubatch & ubatch) {
    use.n_steps++;

    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        for (int32_t j = 0; j < ubatch.n_seq_id[i]; ++j) {
            const llama_seq_id s = ubatch.seq_id[i][j];

            // its first token reads all that later ones do
            if (use.step[s] < use.n_steps && !is_window_whole(s, ubatch.pos[i])) {
                use.short_from[s] = use.short_from[s] < 0 ? ubatch.pos[i] : std::min(use.short_from[s], ubatch.pos[i]);
            }
            use.step[s] = use.n_steps;
        }
    }
}

void llama_kv_hot_slots::trim_use() {
    for (uint32_t s = 0; s < n_seq_max; ++s) {
        if (use.short_from[s] > v_cells[seq_to_stream[s]].seq_pos_max(s)) {
            use.short_from[s] = -1;
        }
    }
}

void llama_kv_hot_slots::advance(
        const std::vector<llama_seq_id> & strms, const std::vector<std::vector<uint32_t>> & idxs, const llama_ubatch & ubatch) {
    use_by(ubatch);

    for (size_t s = 0; s < strms.size(); ++s) {
        const uint32_t strm = strms[s];

        release_cells(strm, idxs[s]);

        if (dirty[strm]) {
            release_unwanted(strm, window);
            // what is left before a sequence's window is wanted by others, who let it go
            for (uint32_t seq_id = 0; seq_id < n_seq_max; ++seq_id) {
                if (seq_to_stream[seq_id] == strm) {
                    begins[seq_id] = window.held_begin(v_cells[strm].seq_pos_max(seq_id));
                }
            }
            dirty[strm] = false;
        }
        release_left(strm, ubatch);

        for (const uint32_t cell : idxs[s]) {
            if (is_wanted(strm, cell, window)) {
                assign_slot(strm, cell);
            }
        }
    }
}

void llama_kv_hot_slots::roll_back(
        const std::vector<llama_seq_id> & strms, const std::vector<std::vector<int32_t>> & owners, const pool_use & use) {
    for (size_t s = 0; s < strms.size(); ++s) {
        auto & ring = rings[strms[s]];

        ring.clear();
        for (uint32_t slot = 0; slot < owners[s].size(); ++slot) {
            if (owners[s][slot] >= 0 && !v_cells[strms[s]].is_empty(owners[s][slot])) {
                ring.assign(owners[s][slot], slot);
            }
        }
    }

    this->use = use;
    dirty.assign(n_stream, true);
}

//
// rows from elsewhere
//

std::vector<int32_t> llama_kv_hot_slots::adopt(
        llama_seq_id seq_id, const std::vector<uint32_t> & cells, const std::vector<int32_t> & wanted) {
    const uint32_t strm = seq_to_stream[seq_id];

    auto & ring = rings[strm];

    release_cells(strm, cells);
    release_unwanted(strm, window);
    dirty[strm] = true;

    const auto is_hot   = [&](size_t i) { return wanted[i] != mixedkv::hot_ring::none && is_wanted(strm, cells[i], window); };
    const bool is_alone = layout.is_shared() && ring.n_used() == 0;

    use.step[seq_id] = use.n_steps; // pages that it is in are its own
    for (size_t i = 0; i < cells.size(); ++i) {
        if (is_hot(i) && wanted[i] != any_slot) {
            assign_own_slot(seq_id, cells[i], wanted[i], is_alone);
        }
    }
    for (size_t i = 0; i < cells.size(); ++i) {
        if (is_hot(i) && ring.slot_of(cells[i]) < 0) {
            assign_slot(strm, cells[i]);
        }
    }

    // rows that came first may have made room for later ones
    std::vector<int32_t> res(cells.size(), mixedkv::hot_ring::none);
    for (size_t i = 0; i < cells.size(); ++i) {
        res[i] = is_hot(i) ? ring.slot_of(cells[i]) : mixedkv::hot_ring::none;
    }

    return res;
}

void llama_kv_hot_slots::restore(
        uint32_t strm, llama_seq_id seq_id, const std::vector<uint32_t> & cells, const std::vector<uint32_t> & wanted) {
    const bool is_alone = seq_id == -1 || rings[strm].n_used() == 0;

    // in order of position, as tokens come
    std::vector<std::pair<llama_pos, size_t>> left;

    for (size_t i = 0; i < cells.size(); ++i) {
        const llama_seq_id owner = seq_id == -1 ? get_seq(strm, cells[i]) : seq_id;
        // else it was saved with a wider window than this cache has now
        if (is_wanted(strm, cells[i], window)) {
            use.step[owner] = use.n_steps;
            if (assign_own_slot(owner, cells[i], wanted[i], is_alone) < 0) {
                left.emplace_back(v_cells[strm].pos_get(cells[i]), i);
            }
        }
    }

    std::sort(left.begin(), left.end());
    for (const auto & [_, i] : left) {
        assign_slot(strm, cells[i]);
    }
}

//
// windows that change
//

void llama_kv_hot_slots::set_window(const mixedkv::hot_window & value) {
    const uint32_t n_draft = window.n_draft;

    window         = value;
    window.n_draft = n_draft;

    // a window that is opened again fills from new tokens alone: no row is held for drafts
    auto kept = window;
    kept.n_draft = 0;
    for (uint32_t strm = 0; strm < n_stream; ++strm) {
        release_unwanted(strm, kept);
    }
    dirty.assign(n_stream, true);
}

void llama_kv_hot_slots::lay_out(const mixedkv::hot_layout & layout) {
    this->layout = layout;

    for (uint32_t strm = 0; strm < n_stream; ++strm) {
        std::vector<std::pair<llama_pos, uint32_t>> cells;
        for (const int32_t cell : rings[strm].owners()) {
            if (cell >= 0) {
                cells.emplace_back(v_cells[strm].pos_get(cell), cell);
            }
        }
        std::sort(cells.begin(), cells.end());

        rings[strm] = mixedkv::hot_ring(layout.n_slots, v_cells[strm].size());
        for (const auto & [_, cell] : cells) {
            assign_slot(strm, cell);
        }
    }
}
