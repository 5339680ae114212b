#pragma once

// To see whether a batch fits, upstream places its micro-batches on trial and then puts the cells back.

#include "llama-kv-cells.h"

#include <cstdint>
#include <vector>

// llama_kv_cache::prepare, while this is there: tokens are placed on trial, and what the cells lose comes back
class llama_kv_mixed_trial {
public:
    llama_kv_mixed_trial();
    ~llama_kv_mixed_trial();

    llama_kv_mixed_trial(const llama_kv_mixed_trial &) = delete;

    // on this thread
    static bool is_on();
};

// llama_kv_cache::prepare: the cells that change when tokens are placed in these. A sliding window takes over cells of tokens
// that it no longer sees, and then upstream also removes the tokens of the same sequence that came before.
std::vector<uint32_t> llama_kv_mixed_touched(const llama_kv_cells & cells, const std::vector<uint32_t> & idxs);
