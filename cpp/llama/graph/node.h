#pragma once

// The two nodes that a layer of the graph has in place of upstream's: one stores K and V, one attends.

#include "attention/attention.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "graph/key-order.h"
#include "graph/key-sketches.h"
#include "rows/equalize.h"

#include <cstdint>
#include <vector>

// Attention that the queries of a graph pay to each cell, summed over its deep layers: what each thread has seen.
struct llama_kv_mass {
    std::vector<std::vector<float>> by_thread = std::vector<std::vector<float>>(GGML_MAX_N_THREADS);
};

// Shared by the threads that run a node, and by the nodes of a context, which run one after the other.
class llama_kv_scratch {
public:
    void * get(); // 64-byte aligned
    void reserve(size_t size);

    // lengths of the runs of tokens of one sequence in the ubatch at hand; empty where each stream has one
    std::vector<int64_t> runs;

    // in which the ubatch at hand reads its keys, by stream
    std::vector<llama_kv_key_order> orders;

    // where attention is watched; the ubatch is of one stream then
    llama_kv_mass * mass = nullptr;

    int rounding = 16; // 0: what suits the rows of a layer

    mixedkv::attention_page_counts page_counts;

    // standard error of what rows weigh the keys of pages with, relative to the sum
    float page_error = 0.0f;

    // which pages are read, of each query that chooses
    std::vector<uint8_t> taken;
    int most_heads_kv = 1; // of layers with pages

    // the ubatch has a mask of its own; what is seen in it is kept for all layers
    void next_mask();
    void reserve_seen(size_t n);
    mixedkv::attention_seen get_seen(size_t first, size_t n, int64_t row);

private:
    std::vector<uint8_t> data;
    std::vector<uint32_t> seen;
    uint32_t n_masks = 0;
};

// What the nodes of one layer know besides their sources: the same for every graph of a context.
// The graph points to it: it lives in the cache, which outlives every graph of its context.
struct llama_kv_node {
    llama_kv_scratch & scratch;

    float scale         = 1.0f;
    float max_bias      = 0.0f;
    float logit_softcap = 0.0f;

    // memory that calls may take into which the queries are cut, see to_calls: that of the layer's first graph
    size_t cut_bytes = 0;

    // of the order of keys, the most that a step has
    int64_t most_splits = 0;

    // edge of the Hadamard blocks by which the nodes rotate K and Q, and V and the output; 0: they come rotated
    int rotation_k = 0;
    int rotation_v = 0;

    // K is stored times scales->k, Q comes divided by it; nullptr: the graph has done it, or nobody does
    const llama_kv_scales * scales = nullptr;

    // the subtracted bias of cold rows of K, with the RoPE angles of the cells of all streams; nullptr: nothing
    const std::vector<mixedkv::attention_pair> * pairs = nullptr;

    // what is known of the layer's keys, nullptr: they are all read
    llama_kv_layer_sketch * pages     = nullptr;
    const llama_kv_sketches * all_pages = nullptr;

    // which of the optional sources the node has
    bool has_ring  = false;
    bool has_sinks = false;

    // V are the first elements of K's rows (MLA), and not stored besides
    bool is_latent = false;

    // of the deeper half of the layers: where attention is watched, it is theirs
    bool is_deep = false;

    // nobody after it reads the slots as they were: it writes the ubatch's rows to the ring when it is done
    bool writes_ring = false;

    // the rows lie on a device, which computes both nodes (cpp/attention/cuda); scales are tensors there
    bool          on_device = false;
    ggml_tensor * scale_k   = nullptr;
    ggml_tensor * scale_q   = nullptr;
};

// Stores K and V of the ubatch, rotated if the node says so, as the cache stores them and rounded to F16 besides.
// One node instead of two rotations, two casts and two SET_ROWS: what they cost in decoding is the wait after each.
//
// returns F16 [n_embd_k_gqa + n_embd_v_gqa, n_tokens], the rows of the ubatch as the ring will hold them;
//         nothing is written to it when the node has no ring
struct llama_kv_store_inputs {
    struct rows {
        ggml_tensor * cur  = nullptr; // F32 [n_embd_head, n_head_kv, n_tokens]
        ggml_tensor * cold = nullptr; // of all streams as the cache stores them [n_embd_gqa, kv_size, n_stream]
        ggml_tensor * idxs = nullptr; // I64 [n_tokens] (the first n_tokens are used), rows of the cold tensor
    };

    rows k;
    rows v; // all nullptr where keys are all that is stored
};

ggml_tensor * llama_kv_node_store(ggml_context * ctx, llama_kv_node & node, const llama_kv_store_inputs & in);

// Writes the F16 rows of the ubatch, as llama_kv_node_store returns them, to the ring rows idxs [n_tokens].
void llama_kv_node_write_ring(
        const ggml_tensor * rows, const ggml_tensor * idxs, const ggml_tensor * ring_k, const ggml_tensor * ring_v);

// Rows of K of all streams, as a cache stores them.
mixedkv::attention_rows llama_kv_node_rows(const ggml_tensor * cold_k, int64_t n_embd_head);

// What attention calls rows of a type.
mixedkv::row_type llama_kv_node_row_type(ggml_type type);

// Attends to the rows as they lie.
//
// choice  is set to the node before it, which chooses pages, where the layer has them
// returns F32 [n_embd_head_v*n_head, n_tokens]
struct llama_kv_attention_inputs {
    ggml_tensor * q      = nullptr; // F32 [n_embd_head_k, n_head, n_tokens]
    ggml_tensor * cold_k = nullptr; // as the cache stores them [n_embd_head, n_head_kv, n_kv, n_stream]
    ggml_tensor * cold_v = nullptr;
    ggml_tensor * ring_k = nullptr; // F16 [n_embd_head, n_head_kv, n_ring, n_stream], nullptr: neither ring nor cur nor idxs
    ggml_tensor * ring_v = nullptr;
    ggml_tensor * cur    = nullptr; // F16 [n_embd_k_gqa + n_embd_v_gqa, n_tokens], from llama_kv_node_store
    ggml_tensor * idxs   = nullptr; // I64 [n_tokens], ring rows of all streams where cur goes
    ggml_tensor * mask   = nullptr; // F16 [n_kv + n_ring + n_tokens/n_stream, n_tokens/n_stream, 1, n_stream]
    ggml_tensor * sinks  = nullptr; // nullptr: the layer has none
};

ggml_tensor * llama_kv_node_attention(
        ggml_context * ctx, llama_kv_node & node, const llama_kv_attention_inputs & in, ggml_tensor ** choice);

// whether t is the attention of this node's layer: by what it computes, since names of tensors are for people
bool llama_kv_node_attends(const ggml_tensor * t, const llama_kv_node & node);

// whether a device has kernels for both nodes of a layer with such rows
struct llama_kv_layer_shape {
    ggml_type type_k;
    ggml_type type_v;
    int64_t   n_embd_head_k;
    int64_t   n_embd_head_v;
    int64_t   n_head;
    int64_t   n_head_kv;
};

bool llama_kv_node_runs_on(ggml_backend_dev_t dev, const llama_kv_layer_shape & layer);
