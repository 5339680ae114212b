#pragma once

#include "llama-kv-mixed-fused.h"

// Stores K and V of the ubatch, rotated if the node says so, as the cache stores them and rounded to F16 besides.
// One node instead of two rotations, two casts and two SET_ROWS: what they cost in decoding is the wait after each.
//
// cold           k, v of all streams as the cache stores them [n_embd_gqa, kv_size, n_stream]
// cur            k, v F32 [n_embd_head, n_head_kv, n_tokens]
// k_idxs, v_idxs I64 [n_tokens] (the first n_tokens are used), rows of the cold tensors
// returns        F16 [n_embd_k_gqa + n_embd_v_gqa, n_tokens], the rows of the ubatch as the ring will hold them;
//                nothing is written to it when the node has no ring
ggml_tensor * llama_kv_mixed_store(
        ggml_context * ctx,
        llama_kv_cache_mixed::fused_node & node,
        ggml_tensor * cold_k, ggml_tensor * cold_v,
        ggml_tensor * cur_k,  ggml_tensor * cur_v,
        ggml_tensor * k_idxs, ggml_tensor * v_idxs);

// Writes the F16 rows of the ubatch, as llama_kv_mixed_store returns them, to the ring rows idxs [n_tokens].
void llama_kv_mixed_write_ring(
        const ggml_tensor * rows, const ggml_tensor * idxs, const ggml_tensor * ring_k, const ggml_tensor * ring_v);
