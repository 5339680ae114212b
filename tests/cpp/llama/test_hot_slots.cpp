// Which rows are hot and where they lie, on cells alone: no model, no rows.

#include "cache/hot-slots.h"
#include "check.h"

#include "llama-batch.h"

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <vector>

using mixedkv::hot_layout;
using mixedkv::hot_window;

static constexpr uint32_t N_CELLS = 256;

// a cache of one stream for all sequences, or of one for each
struct cache {
    const uint32_t        n_seq;
    std::vector<uint32_t> seq_to_stream;
    llama_kv_cells_vec    cells;
    llama_kv_hot_slots    slots;

    cache(const hot_window & rule, uint32_t n_seq, uint64_t budget, bool is_unified = true) :
        n_seq(n_seq), seq_to_stream(n_seq, 0), cells(is_unified ? 1 : n_seq),
        slots(resized(cells), seq_to_stream, n_seq, rule,
              hot_layout::make(rule, is_unified ? n_seq : 1, N_CELLS, budget)) {
        if (!is_unified) {
            std::iota(seq_to_stream.begin(), seq_to_stream.end(), 0);
        }
    }

    cache(const cache &) = delete;

    static const llama_kv_cells_vec & resized(llama_kv_cells_vec & cells) {
        for (auto & stream : cells) {
            stream.resize(N_CELLS);
        }
        return cells;
    }

    llama_pos last(llama_seq_id seq_id) const { return cells[seq_to_stream[seq_id]].seq_pos_max(seq_id); }

    // one ubatch of the next n tokens of the sequence
    void evaluate(llama_seq_id seq_id, uint32_t n) {
        const uint32_t strm   = seq_to_stream[seq_id];
        auto &         stream = cells[strm];

        llama_batch_allocr    balloc(1);
        llama_ubatch          ubatch = balloc.ubatch_reserve(n, 1);
        std::vector<uint32_t> idxs;

        ubatch.seq_id_unq[0] = seq_id;
        for (uint32_t i = 0, cell = 0; i < n; ++i, ++cell) {
            while (!stream.is_empty(cell)) {
                ++cell;
            }
            ubatch.pos[i]      = last(seq_id) + 1;
            ubatch.n_seq_id[i] = 1;
            ubatch.seq_id[i]   = &seq_id;
            stream.pos_set(cell, ubatch.pos[i]);
            stream.seq_add(cell, seq_id);
            idxs.push_back(cell);
        }
        slots.advance({ llama_seq_id(strm) }, { idxs }, ubatch);
    }

    void remove(llama_seq_id seq_id, llama_pos from) {
        auto & stream = cells[seq_to_stream[seq_id]];
        for (uint32_t i = 0; i < stream.size(); ++i) {
            if (!stream.is_empty(i) && stream.seq_has(i, seq_id) && stream.pos_get(i) >= from) {
                stream.seq_rm(i, seq_id);
            }
        }
        slots.release_dead();
    }

    // slot by position
    std::map<llama_pos, int32_t> held(llama_seq_id seq_id) const {
        const uint32_t strm = seq_to_stream[seq_id];

        std::map<llama_pos, int32_t> res;
        for (const auto & [pos, cell] : cells[strm].seq_pos_get(seq_id)) {
            if (const int32_t slot = slots.get_ring(strm).slot_of(cell); slot >= 0) {
                CHECK(slots.get_ring(strm).cell_of(slot) == int32_t(cell));
                res[pos] = slot;
            }
        }
        return res;
    }
};

static const hot_window RULE = { 16, 4, 2, 3 };

static uint64_t room_for(const hot_window & rule, uint32_t n_seq) {
    return hot_layout::all(rule, n_seq, N_CELLS);
}

static void the_window_is_held() {
    cache one(RULE, 1, room_for(RULE, 1));

    std::map<llama_pos, int32_t> before;
    for (llama_pos p = 0; p < 100; ++p) {
        one.evaluate(0, 1);

        const auto now = one.held(0);
        for (llama_pos q = 0; q <= p; ++q) {
            CHECK(now.count(q) == RULE.contains(q, RULE.held_begin(p)));
            CHECK(!before.count(q) || !now.count(q) || before[q] == now.at(q)); // a row does not move
        }
        before = now;
    }
    CHECK(one.slots.is_window_whole(0, 100));
}

static void how_a_prompt_was_cut_leaves_no_trace() {
    cache single(RULE, 1, room_for(RULE, 1));
    for (int i = 0; i < 90; ++i) {
        single.evaluate(0, 1);
    }

    cache cut(RULE, 1, room_for(RULE, 1));
    for (const uint32_t n : { 37, 1, 50, 2 }) {
        cut.evaluate(0, n);
    }
    CHECK(cut.held(0) == single.held(0));
}

static void rejected_drafts_leave_no_trace() {
    cache plain(RULE, 2, room_for(RULE, 2));
    cache drafted(RULE, 2, room_for(RULE, 2));

    for (int i = 0; i < 60; ++i) {
        for (llama_seq_id seq_id = 0; seq_id < 2; ++seq_id) {
            plain.evaluate(seq_id, 1);

            const llama_pos next = drafted.last(seq_id) + 1;
            drafted.evaluate(seq_id, RULE.n_draft);
            drafted.remove(seq_id, next);
            drafted.evaluate(seq_id, 1);
        }
    }
    for (llama_seq_id seq_id = 0; seq_id < 2; ++seq_id) {
        CHECK(drafted.held(seq_id) == plain.held(seq_id));
    }
}

static void a_failed_step_leaves_no_trace() {
    cache one(RULE, 1, room_for(RULE, 1));
    one.evaluate(0, 50);

    const auto before = one.held(0);
    const auto owners = one.slots.get_ring(0).owners();
    const auto use    = one.slots.get_use();

    one.evaluate(0, 20);
    CHECK(one.held(0) != before);
    for (llama_pos p = 50; p < 70; ++p) {
        one.cells[0].rm(one.cells[0].seq_pos_get(0).rbegin()->second);
    }
    one.slots.roll_back({ 0 }, { owners }, use);

    CHECK(one.held(0) == before);
    CHECK(one.slots.get_use().n_steps == use.n_steps && one.slots.get_use().step == use.step);
}

static void restored_rows_lie_where_they_lay() {
    for (const uint64_t budget : { room_for(RULE, 3), hot_layout::least(RULE, 3, N_CELLS) + 16 }) {
        cache from(RULE, 3, budget);
        from.evaluate(1, 40);

        std::vector<uint32_t> cells;
        std::vector<uint32_t> wanted;
        for (const auto & [pos, cell] : from.cells[0].seq_pos_get(1)) {
            if (const int32_t slot = from.slots.get_ring(0).slot_of(cell); slot >= 0) {
                cells.push_back(cell);
                wanted.push_back(from.slots.get_own_slot(1, slot));
            }
        }

        cache to(RULE, 3, budget);
        for (const auto & [pos, cell] : from.cells[0].seq_pos_get(1)) {
            to.cells[0].pos_set(cell, pos);
            to.cells[0].seq_add(cell, 1);
        }
        to.slots.restore(0, 1, cells, wanted);

        CHECK(to.held(1) == from.held(1) && !to.held(1).empty());
    }
}

// one sequence after the other where there is room for one window: the idle one gives its rows up, and that is known
static void a_pool_is_shared() {
    const hot_window rule = { 64, 8, 2, 0 };

    cache both(rule, 2, hot_layout::least(rule, 2, N_CELLS));
    CHECK(both.slots.get_layout().is_shared());

    both.evaluate(0, 60);
    CHECK(both.slots.is_window_whole(0, 60));

    for (int i = 0; i < 60; ++i) {
        both.evaluate(1, 1);
    }
    CHECK(both.slots.is_window_whole(1, 60));
    CHECK(!both.slots.is_window_whole(0, 60));
    CHECK(both.held(0).count(0) && both.held(0).count(1)); // sinks stay
    CHECK(both.slots.get_use().n_evicted > 0);
    CHECK(both.slots.get_use().short_from[0] == -1); // nothing was evaluated without them yet

    both.evaluate(0, 1);
    CHECK(both.slots.get_use().short_from[0] == 60);
    CHECK(both.slots.get_use().short_from[1] == -1);

    both.remove(0, 30);
    CHECK(both.slots.get_use().short_from[0] == -1); // what was evaluated short is gone
}

static void tokens_that_read_a_row_less_are_known() {
    cache one(RULE, 1, room_for(RULE, 1));
    one.evaluate(0, 60);
    one.remove(0, 60 - RULE.n_draft);
    one.evaluate(0, 1);
    CHECK(one.slots.get_use().short_from[0] == -1); // such rows are held

    one.remove(0, 30);
    CHECK(!one.slots.is_window_whole(0, 30) && one.slots.get_use().short_from[0] == -1);
    one.evaluate(0, 5);
    CHECK(one.slots.get_use().short_from[0] == 30);

    one.remove(0, 0);
    CHECK(one.slots.get_use().short_from[0] == -1);
}

static void a_narrower_window_is_laid_out_anew() {
    cache one(RULE, 1, room_for(RULE, 1));
    one.evaluate(0, 80);
    const auto before = one.held(0);

    hot_window narrow = RULE;
    narrow.threshold = narrow.group_size = 8;
    one.slots.set_window(narrow);
    one.slots.lay_out(hot_layout::make(one.slots.get_window(), 1, N_CELLS, room_for(one.slots.get_window(), 1)));

    const auto after = one.held(0);
    CHECK(!after.empty() && after.size() < before.size());
    for (const auto & [pos, slot] : after) {
        CHECK(before.count(pos) && slot < int32_t(one.slots.get_layout().n_slots));
    }
    CHECK(one.slots.get_window().threshold == 8 && one.slots.is_window_whole(0, 80));
}

static void streams_are_copied_whole() {
    cache two(RULE, 2, room_for(RULE, 1), false);
    two.evaluate(0, 40);

    two.cells[1] = two.cells[0];
    for (uint32_t i = 0; i < N_CELLS; ++i) {
        if (!two.cells[1].is_empty(i)) {
            two.cells[1].seq_add(i, 1);
            two.cells[1].seq_rm(i, 0);
        }
    }
    two.slots.seq_cp(0, 1);
    CHECK(two.held(1) == two.held(0) && !two.held(1).empty());

    two.evaluate(1, 1); // slots of the other stream stay
    CHECK(two.held(0).count(39) && two.held(1).count(40) && !two.held(0).count(40));
}

// of a window, wherever it begins
static uint64_t pages_for(const hot_layout & layout, const hot_window & rule) {
    return (rule.recent_rows() + layout.page - 1) / layout.page + 1;
}

static void who_runs_has_a_whole_window_while_there_are_pages_for_it() {
    uint32_t   state  = 1;
    const auto random = [&](uint32_t n) { return (state = state * 1664525u + 1013904223u) / 65536 % n; };

    for (const hot_window & rule : { RULE, hot_window{ 21, 1, 0, 5 }, hot_window{ 30, 3, 4, 2 } }) {
        for (int i = 0; i < 300; ++i) {
            const uint32_t n_seq  = 2 + random(5);
            const uint64_t least  = hot_layout::least(rule, n_seq, N_CELLS);
            const uint64_t budget = least + random(1 + room_for(rule, n_seq) - least);

            cache pool(rule, n_seq, budget);

            const hot_layout & layout = pool.slots.get_layout();
            if (!layout.is_shared()) {
                continue;
            }
            const uint32_t n_run = std::min<uint64_t>(n_seq, layout.n_pages() / pages_for(layout, rule));
            for (uint32_t n_left = N_CELLS, n = 0; n_left > 0; n_left -= n) {
                n = std::min(n_left, 1 + random(random(2) ? 3 : 30));
                pool.evaluate(random(n_run), n);
                for (uint32_t s = 0; s < n_run; ++s) {
                    CHECK(pool.last(s) < 0 || pool.slots.is_window_whole(s, pool.last(s) + 1));
                }
            }
        }
    }
}

int main() {
    the_window_is_held();
    how_a_prompt_was_cut_leaves_no_trace();
    rejected_drafts_leave_no_trace();
    a_failed_step_leaves_no_trace();
    restored_rows_lie_where_they_lay();
    a_pool_is_shared();
    who_runs_has_a_whole_window_while_there_are_pages_for_it();
    tokens_that_read_a_row_less_are_known();
    a_narrower_window_is_laid_out_anew();
    streams_are_copied_whole();
    return 0;
}
