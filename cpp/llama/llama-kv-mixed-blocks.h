#pragma once

#include "llama-kv-mixed-view.h"

// Rows of a token range out of a cache and into one, for the C API. Any attention cache, mixed or upstream's uniform one.

// the caches whose layers make up a group each, in order; what cannot be taken apart by tokens has none
std::vector<llama_kv_cache *> llama_kv_mixed_groups(llama_context & ctx);

// empty, or why rows of this context cannot leave and come back
std::string llama_kv_mixed_blocks_problem(llama_context & ctx);

// rows of the sequence in [p0, p1) if they have each position once; else `problem` says what is missing
std::vector<llama_kv_mixed_row> llama_kv_mixed_range(
        const llama_kv_cache & kv, llama_seq_id seq_id, llama_pos p0, llama_pos p1, std::string & problem);

// k, v: the cold rows; k_hot, v_hot: F16 copies of those that have one
void llama_kv_mixed_export(
        const llama_kv_cache & kv, int32_t il, llama_seq_id seq_id, const std::vector<llama_kv_mixed_row> & rows,
        void * k, void * v, void * k_hot, void * v_hot);

// empty, or why nothing was changed
std::string llama_kv_mixed_import(
        llama_context & ctx, llama_seq_id seq_id, const mixedkv_row_group * groups, uint32_t n_groups, llama_pos shift,
        llama_pos drop_from);
