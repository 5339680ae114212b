#include "cache/trial.h"

#include <algorithm>
#include <map>

static thread_local int n_trials = 0;

llama_kv_mixed_trial::llama_kv_mixed_trial()  { ++n_trials; }
llama_kv_mixed_trial::~llama_kv_mixed_trial() { --n_trials; }

bool llama_kv_mixed_trial::is_on() {
    return n_trials > 0;
}

std::vector<uint32_t> llama_kv_mixed_touched(const llama_kv_cells & cells, const std::vector<uint32_t> & idxs) {
    std::map<llama_seq_id, llama_pos> last;
    for (const uint32_t idx : idxs) {
        if (!cells.is_empty(idx)) {
            llama_pos & pos = last.try_emplace(cells.seq_get(idx), -1).first->second;
            pos = std::max(pos, cells.pos_get(idx));
        }
    }

    std::vector<uint32_t> res = idxs;
    for (const auto & [seq_id, end] : last) {
        for (const auto & [pos, cell] : cells.seq_pos_get(seq_id)) {
            if (pos > end) {
                break;
            }
            res.push_back(cell);
        }
    }

    if (!last.empty()) {
        std::sort(res.begin(), res.end());
        res.erase(std::unique(res.begin(), res.end()), res.end());
    }

    return res;
}
