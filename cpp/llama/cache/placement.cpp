#include "cache/placement.h"

#include <algorithm>

namespace {

// the empty cells of a cache, less those that were given away
class empty_cells {
public:
    explicit empty_cells(const llama_kv_cells & cells) : cells(cells), given(cells.size(), false) {}

    // one in the block of a sequence's last cell; else in the block that has the most, which others need least
    uint32_t take(int64_t tail) {
        int64_t res = tail < 0 ? -1 : find(tail / block, tail % block + 1);
        if (res < 0) {
            res = find(emptiest(), 0);
        }
        given[res] = true;
        if (!counts.empty()) {
            counts[res / block]--;
        }
        return uint32_t(res);
    }

private:
    static constexpr uint32_t block = llama_kv_placement::block;

    const llama_kv_cells & cells;

    std::vector<bool>     given;
    std::vector<uint32_t> counts; // by block, once they are needed

    bool has(uint32_t i) const { return i < cells.size() && !given[i] && cells.is_empty(i); }

    // the first cell of a block from its cell `from` on, then from its begin; -1: none
    int64_t find(uint32_t i_block, uint32_t from) const {
        for (uint32_t i = 0; i < block; ++i) {
            const uint32_t cell = i_block*block + (from + i) % block;
            if (has(cell)) {
                return cell;
            }
        }
        return -1;
    }

    uint32_t emptiest() {
        if (counts.empty()) {
            counts.assign((cells.size() + block - 1) / block, 0);
            for (uint32_t i = 0; i < cells.size(); ++i) {
                counts[i / block] += has(i);
            }
        }
        return std::max_element(counts.begin(), counts.end()) - counts.begin();
    }
};

} // namespace

// upstream gives each token an empty cell of its own; where it does otherwise its choice stands
static bool is_usual(
        const llama_kv_cells & cells,
        const llama_kv_cache::slot_info_vec_t & sinfos,
        const std::vector<llama_ubatch> & ubatches) {
    size_t n_tokens = 0;

    for (size_t u = 0; u < ubatches.size(); ++u) {
        if (u >= sinfos.size() || sinfos[u].n_stream() != 1 || sinfos[u].size() != ubatches[u].n_tokens) {
            return false;
        }
        n_tokens += ubatches[u].n_tokens;
    }

    return n_tokens <= cells.size() - cells.get_used();
}

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
    if (!is_usual(cells, sinfos, ubatches)) {
        return;
    }

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
