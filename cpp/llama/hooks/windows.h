#pragma once

#include <cstdint>

// How many sequences of a context have a window at a time, in layers that slide.

// of the next contexts that this thread makes; 0: all
void llama_kv_mixed_limit_sliding(uint32_t n_windows);

// llama_kv_cache_iswa: in a context of n_seq_max sequences
uint32_t llama_kv_mixed_windows(uint32_t n_seq_max);
