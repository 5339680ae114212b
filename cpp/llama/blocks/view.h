#pragma once

#include "mixedkv/mixedkv.h"

#include "llama-context.h"
#include "llama-kv-cache.h"
#include "rows/equalize.h"

#include <vector>

// Read-only views of an attention cache, mixed or upstream's uniform one, for the C API.

// the caches whose layers make up a group each, in order; what cannot be taken apart by tokens has none
std::vector<llama_kv_cache *> llama_kv_rows_groups(llama_context & ctx);

std::vector<mixedkv_layer_info> llama_kv_rows_layers(const llama_kv_cache & kv, const llama_hparams & hparams);

// what K of a layer is stored times, nullptr: nothing
const llama_kv_scales * llama_kv_rows_scales(const llama_kv_cache & kv, int32_t il);

// a layer that holds values which are no numbers, in any cell; -1: there is none
int32_t llama_kv_rows_find_damage(const llama_kv_cache & kv);

// cells that hold a token, over all streams
uint32_t llama_kv_rows_used(const llama_kv_cache & kv);

mixedkv_seq_info llama_kv_rows_seq(const llama_kv_cache & kv, llama_seq_id seq_id);

bool llama_kv_rows_has_layer(const llama_kv_cache & kv, int32_t il);

// where the query at the last position of a sequence reads its rows, in order of position
struct llama_kv_row {
    llama_pos pos;
    uint32_t  cell;
    int32_t   slot; // of the F16 ring, -1: the cold row
};

std::vector<llama_kv_row> llama_kv_rows_find(
        const llama_kv_cache & kv, llama_seq_id seq_id, llama_pos p0, llama_pos p1);

// the cell of row `i` of a group, -1: the sequence has none
int64_t llama_kv_rows_cell(const llama_kv_cells & cells, llama_seq_id seq_id, const mixedkv_row_group & group, uint32_t i);

// these rows in F32 [n_rows, n_head_kv, n_embd_head]; false: the layer stores no values (MLA)
//   unrotate: in the model's basis, without the Hadamard rotation and the scales of a quantised cache, and with the subtracted bias of cold rows added
bool llama_kv_rows_read(
        const llama_context & ctx, const llama_kv_cache & kv, int32_t il, llama_seq_id seq_id, bool is_k,
        const std::vector<llama_kv_row> & rows, bool unrotate, float * data);
