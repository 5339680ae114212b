#pragma once

#include "llama-kv-cache-mixed.h"

// Read-only views of an attention cache, mixed or upstream's uniform one, for the C API.

std::vector<mixedkv_layer_info> llama_kv_mixed_view_layers(const llama_kv_cache & kv, const llama_hparams & hparams);

// cells that hold a token, over all streams
uint32_t llama_kv_mixed_view_used(const llama_kv_cache & kv);

mixedkv_seq_info llama_kv_mixed_view_seq(const llama_kv_cache & kv, llama_seq_id seq_id);

bool llama_kv_mixed_view_has_layer(const llama_kv_cache & kv, int32_t il);

struct llama_kv_mixed_rows {
    std::vector<llama_pos> pos;
    std::vector<uint8_t>   hot;
    std::vector<float>     data; // [n_rows, n_head_kv, n_embd_head]
};

// rows of the positions [p0, p1) in order of position, as the query at the last position reads them
//   unrotate: in the model's basis, without the Hadamard rotation of a quantised cache
llama_kv_mixed_rows llama_kv_mixed_view_rows(
        const llama_kv_cache & kv, const llama_hparams & hparams, int32_t il, llama_seq_id seq_id, bool is_k, llama_pos p0, llama_pos p1, bool unrotate);
