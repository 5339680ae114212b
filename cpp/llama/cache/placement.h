#pragma once

#include "llama-kv-cache.h"

#include <vector>

// Which cells the tokens of ubatches get: those of a sequence lie together. A step of attention reads a block of keys
// for all queries at once and leaves out blocks that none of them sees, which is possible only where a block holds
// keys of few sequences.
class llama_kv_placement {
public:
    // as many keys as the fused attention takes at a time
    static constexpr uint32_t block = 64;

    explicit llama_kv_placement(uint32_t n_seq_max) : tails(n_seq_max, 0) {}

    // sinfos are upstream's choice for a cache of one stream: its number of cells and no others are changed
    void place(
            const llama_kv_cells & cells,
            llama_kv_cache::slot_info_vec_t & sinfos,
            const std::vector<llama_ubatch> & ubatches);

private:
    // by sequence, the cell of its last token when it was placed here: true only if the cell still says so
    std::vector<uint32_t> tails;

    int64_t find_tail(const llama_kv_cells & cells, llama_seq_id seq_id) const;
};
