#include "llama-kv-mixed-place.h"

#include <algorithm>

namespace {

// the empty cells of a cache, less those that were given away
class empty_cells {
public:
    explicit empty_cells(const llama_kv_cells & cells) : cells(cells), given(cells.size(), false) {}

    bool has(uint32_t i) const { return i < cells.size() && !given[i] && cells.is_empty(i); }

    // the cell after a sequence's last one, in the same block; else that of a block without rows; else any
    uint32_t take(int64_t tail) {
        uint32_t res = uint32_t(tail + 1);
        if (tail < 0 || res % llama_kv_placement::block == 0 || !has(res)) {
            res = next_block();
        }
        given[res] = true;
        return res;
    }

private:
    const llama_kv_cells & cells;

    std::vector<bool> given;

    uint32_t i_block = 0; // blocks before it have rows
    uint32_t i_cell  = 0; // cells before it are not empty

    uint32_t next_block() {
        for (; i_block + llama_kv_placement::block <= cells.size(); i_block += llama_kv_placement::block) {
            uint32_t n = 0;
            while (n < llama_kv_placement::block && has(i_block + n)) {
                ++n;
            }
            if (n == llama_kv_placement::block) {
                return i_block;
            }
        }
        while (!has(i_cell)) {
            ++i_cell;
        }
        return i_cell;
    }
};

} // namespace

int64_t llama_kv_placement::find_tail(const llama_kv_cells & cells, llama_seq_id seq_id) const {
    const llama_pos last = cells.seq_pos_max(seq_id);
    const auto is_tail   = [&](uint32_t i) {
        return !cells.is_empty(i) && cells.pos_get(i) == last && cells.seq_has(i, seq_id);
    };

    if (last < 0) {
        return -1;
    }
    if (is_tail(tails[seq_id])) {
        return tails[seq_id];
    }
    for (uint32_t i = 0; i < cells.used_max_p1(); ++i) {
        if (is_tail(i)) {
            return i;
        }
    }
    return -1;
}

void llama_kv_placement::place(
        const llama_kv_cells & cells,
        llama_kv_cache::slot_info_vec_t & sinfos,
        const std::vector<llama_ubatch> & ubatches) {
    empty_cells          empty(cells);
    std::vector<int64_t> at(tails.size(), -2); // not looked for

    for (size_t u = 0; u < ubatches.size(); ++u) {
        for (uint32_t i = 0; i < ubatches[u].n_tokens; ++i) {
            const llama_seq_id seq_id = ubatches[u].seq_id[i][0];
            if (at[seq_id] == -2) {
                at[seq_id] = find_tail(cells, seq_id);
            }
            at[seq_id] = tails[seq_id] = sinfos[u].idxs[0][i] = empty.take(at[seq_id]);
        }
    }
}
