#pragma once

// Attention of a device through llama.cpp's own shaders, which read cold rows, ring and ubatch as they lie: one node that
// vendor/patches/25-vulkan-attention.patch has ggml-vulkan compute (cpp/attention/vulkan/nodes.cpp). All else of such a layer is
// llama.cpp's: the graph rotates and scales, and stores rows by SET_ROWS.

#include "ggml-backend.h"
#include "ggml.h"
#include "graph/node.h"

#include <cstdint>
#include <vector>

// What some queries of each stream see: the mask in parts, one for each tensor of rows, since shaders read rows of a mask as
// one after the other.
struct llama_kv_in_place_mask {
    int64_t       first = 0; // of the queries
    int64_t       n     = 0;
    ggml_tensor * parts = nullptr;
};

struct llama_kv_in_place_inputs {
    ggml_tensor * q      = nullptr; // F32 [n_embd_head_k, n_head, n_tokens]
    ggml_tensor * cold_k = nullptr; // as the cache stores them [n_embd_head, n_head_kv, n_kv, n_stream]
    ggml_tensor * cold_v = nullptr;
    ggml_tensor * ring_k = nullptr; // F16 [n_embd_head, n_head_kv, n_ring, n_stream]
    ggml_tensor * ring_v = nullptr;
    ggml_tensor * cur_k  = nullptr; // F16 [n_embd_head, n_head_kv, n_tokens], contiguous
    ggml_tensor * cur_v  = nullptr;
    ggml_tensor * sinks  = nullptr; // nullptr: the layer has none

    std::vector<llama_kv_in_place_mask> masks; // of all queries, in order

    float scale         = 1.0f;
    float max_bias      = 0.0f;
    float logit_softcap = 0.0f;
};

// returns F32 [n_embd_head_v, n_head, n_tokens/n_stream, n_stream]; nodes: those that the device has to compute
ggml_tensor * llama_kv_in_place_attention(ggml_context * ctx, const llama_kv_in_place_inputs & in, std::vector<ggml_tensor *> & nodes);

// Queries of each stream that one node takes at most, n_tps or fewer: some devices cannot bind the split buffer or the mask,
// which has n_keys columns, of a large ubatch. Throws where there would be too many nodes.
int64_t llama_kv_in_place_queries(int64_t n_tps, int64_t n_keys, int64_t n_stream, int64_t n_head, int64_t n_embd_head_v);

// Cuts the mask [n_mask, n_tokens/n_stream, 1, n_stream], which has columns for n_kv cold rows, then n_ring of the ring, then
// the ubatch.
std::vector<llama_kv_in_place_mask> llama_kv_in_place_masks(
        ggml_context * ctx, ggml_tensor * mask, int64_t n_kv, int64_t n_ring, int64_t n_queries);

// whether the device computes this node for a layer with kv_size such rows
bool llama_kv_in_place_runs_on(ggml_backend_dev_t dev, const llama_kv_layer_shape & layer, int64_t kv_size);
