// Tokens of a sequence get cells of a block of their own, and upstream's choice stands where it is not the usual one.

#include "cache/placement.h"
#include "check.h"

#include "llama-batch.h"

#include <numeric>
#include <set>
#include <vector>

using slot_info = llama_kv_cache::slot_info;

static constexpr uint32_t BLOCK = llama_kv_placement::block;

// tokens of these sequences, and the first empty cells for them, as upstream would
struct step {
    std::vector<llama_seq_id> seqs;
    llama_batch_allocr        balloc{ 1 };
    llama_ubatch              ubatch;
    slot_info                 sinfo;

    step(std::vector<llama_seq_id> of, uint32_t first) :
        seqs(std::move(of)), ubatch(balloc.ubatch_reserve(seqs.size(), 1)) {
        for (size_t i = 0; i < seqs.size(); ++i) {
            ubatch.seq_id[i] = &seqs[i];
        }
        sinfo.s0 = sinfo.s1 = 0;
        sinfo.strm          = { 0 };
        sinfo.idxs          = { std::vector<uint32_t>(seqs.size()) };
        std::iota(sinfo.idxs[0].begin(), sinfo.idxs[0].end(), first);
    }
};

static std::vector<uint32_t> place(llama_kv_placement & placement, const llama_kv_cells & cells, const step & s) {
    llama_kv_cache::slot_info_vec_t sinfos = { s.sinfo };
    placement.place(cells, sinfos, { s.ubatch });
    return sinfos[0].idxs[0];
}

static llama_kv_cells make_cells(uint32_t n) {
    llama_kv_cells cells;
    cells.resize(n);
    return cells;
}

static void sequences_lie_apart() {
    auto               cells = make_cells(4 * BLOCK);
    llama_kv_placement placement(3);

    llama_pos pos = 0;
    for (int i = 0; i < 20; ++i, ++pos) {
        const step s({ 0, 1, 2 }, 3 * i);
        const auto idxs = place(placement, cells, s);
        for (uint32_t seq_id = 0; seq_id < 3; ++seq_id) {
            CHECK(cells.is_empty(idxs[seq_id]));
            cells.pos_set(idxs[seq_id], pos);
            cells.seq_add(idxs[seq_id], seq_id);
        }
    }

    std::set<uint32_t> blocks[3];
    for (uint32_t i = 0; i < cells.size(); ++i) {
        for (uint32_t seq_id = 0; seq_id < 3 && !cells.is_empty(i); ++seq_id) {
            if (cells.seq_has(i, seq_id)) {
                blocks[seq_id].insert(i / BLOCK);
            }
        }
    }
    CHECK(blocks[0].size() == 1 && blocks[1].size() == 1 && blocks[2].size() == 1);
    CHECK(blocks[0] != blocks[1] && blocks[1] != blocks[2] && blocks[0] != blocks[2]);
}

static void cells_that_are_taken_over_stay_upstreams_choice() {
    auto               cells = make_cells(8);
    llama_kv_placement placement(2);

    for (uint32_t i = 0; i < 6; ++i) {
        cells.pos_set(i, i);
        cells.seq_add(i, 0);
    }

    const step s({ 1, 1, 1, 1 }, 2); // four tokens, two empty cells
    CHECK(place(placement, cells, s) == s.sinfo.idxs[0]);
}

static void a_choice_of_another_form_stays() {
    auto               cells = make_cells(8);
    llama_kv_placement placement(2);

    step s({ 1, 1, 1 }, 0);
    s.sinfo.idxs[0].pop_back();
    CHECK(place(placement, cells, s) == s.sinfo.idxs[0]);
}

int main() {
    sequences_lie_apart();
    cells_that_are_taken_over_stay_upstreams_choice();
    a_choice_of_another_form_stays();
    return 0;
}
