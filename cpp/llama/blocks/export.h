#pragma once

#include "blocks/view.h"

// Rows of a token range out of a cache, for the C API. Any attention cache, mixed or upstream's uniform one.

// empty, or why rows of this context cannot leave and come back
std::string llama_kv_rows_problem(llama_context & ctx);

// rows of the sequence in [p0, p1) if they have each position once; else `problem` says what is missing
std::vector<llama_kv_row> llama_kv_rows_range(
        const llama_kv_cache & kv, llama_seq_id seq_id, llama_pos p0, llama_pos p1, std::string & problem);

// k, v: the cold rows; k_hot, v_hot: F16 copies of those that have one
void llama_kv_rows_export(
        const llama_kv_cache & kv, const llama_hparams & hparams, int32_t il, llama_seq_id seq_id,
        const std::vector<llama_kv_row> & rows, void * k, void * v, void * k_hot, void * v_hot);
