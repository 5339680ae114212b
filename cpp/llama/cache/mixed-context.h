#pragma once

#include "cache/mixed.h"
#include "graph/in-place.h"

#include <array>
#include <map>
#include <optional>
#include <vector>

// One batch on its way through a mixed cache.

class llama_kv_cache_mixed_context : public llama_kv_cache_context {
public:
    // used to create a full-cache context
    llama_kv_cache_mixed_context(llama_kv_cache_mixed * kv);

    // used to create a batch processing context from a batch
    llama_kv_cache_mixed_context(llama_kv_cache_mixed * kv, slot_info_vec_t sinfos, std::vector<llama_ubatch> ubatches);

    // takes the last ubatch back unless next() has said that its graph was computed
    ~llama_kv_cache_mixed_context() override;

    bool next()  override;
    bool apply() override;

    uint32_t get_n_mask(const llama_ubatch & ubatch, const llama_cparams & cparams) const override;

    ggml_tensor * get_k(ggml_context * ctx, int32_t il) const override;
    ggml_tensor * get_v(ggml_context * ctx, int32_t il) const override;

    ggml_tensor * cpy_k(ggml_context * ctx, ggml_tensor * k_cur, ggml_tensor * k_idxs, int32_t il) const override;
    ggml_tensor * cpy_v(ggml_context * ctx, ggml_tensor * v_cur, ggml_tensor * v_idxs, int32_t il) const override;

    // two rows: the cells of the tokens, and their ring rows
    ggml_tensor * build_input_k_idxs(ggml_context * ctx, const llama_ubatch & ubatch) const override;

    void equalize(ggml_context * ctx, ggml_tensor *& q, ggml_tensor *& k, int32_t il) const override;

    ggml_tensor * build_input_k_rot(ggml_context * ctx) const override;
    ggml_tensor * build_input_v_rot(ggml_context * ctx) const override;

    void set_input_k_idxs (ggml_tensor * dst, const llama_ubatch * ubatch) const override;
    void set_input_kq_mask(ggml_tensor * dst, const llama_ubatch * ubatch, bool causal_attn) const override;

    ggml_tensor * build_attn(
            const llm_graph_context & graph,
            ggml_tensor * q,
            ggml_tensor * k,
            ggml_tensor * v,
            ggml_tensor * kq_b,
            ggml_tensor * kq_mask,
            ggml_tensor * sinks,
            ggml_tensor * v_mla,
                  float   kq_scale,
                    int   il) const override;

private:
    llama_kv_cache_mixed * kv_mixed;

    // what it is composed of
    llama_kv_hot_rows &            hot;
    llama_kv_row_basis &           basis;
    const llama_kv_layer_readers & readers;

    // the rows of the ubatch in one KV cache layer
    struct cur_rows {
        ggml_tensor * k = nullptr; // [n_embd_head, n_head_kv, n_tokens] in F16; fused or gathered: as the model gives it
        ggml_tensor * v = nullptr;
        ggml_tensor * k_idxs    = nullptr; // fused
        ggml_tensor * ring_idxs = nullptr; // I64 [n_tokens]
        ggml_tensor * stored    = nullptr; // fused: what llama_kv_node_store returns
    };

    // what upstream's methods, which are const, note while a ubatch's graph is built
    struct graph_state {
        std::map<int32_t, cur_rows> cur; // by KV cache layer

        // Rows of the graph's k_idxs, one view for all layers: what a device reads of the host is copied for each view.
        std::array<ggml_tensor *, 2> idxs = {};

        // what layers that are not fused add to K: inputs, nullptr: nothing
        struct {
            ggml_tensor * cur   = nullptr; // F32 [n_angles, n_tokens]
            ggml_tensor * cells = nullptr; // F32 [n_angles, n_kv, n_stream]
            bool          added = false;
        } angles;

        // edges of the Hadamard blocks that the fused nodes rotate by, 0: none, or the graph itself does
        int rotation_k = 0;
        int rotation_v = 0;

        // of layers that are read in place, by how many queries a node takes
        std::map<int64_t, std::vector<llama_kv_in_place_mask>> parted_masks;

        // the numbers of the rows that are gathered, I32, and the nodes that other devices would take and cannot compute
        struct {
            ggml_tensor * cold = nullptr; // [n, n_stream]: the cells, then any up to the hot rows and the padding
            ggml_tensor * ring = nullptr; // where they go
            ggml_tensor * cur  = nullptr;
            std::vector<ggml_tensor *> nodes;
        } gather;
    };

    mutable graph_state state;

    ggml_tensor * idxs_row(ggml_context * ctx, ggml_tensor * k_idxs, int64_t row) const;

    // those that layer il reads
    const cur_rows & get_cur(int32_t il) const;

    void build_input_angles(ggml_context * ctx, const llama_ubatch & ubatch) const;

    // the cache before the ubatch that is under way was placed; its owners are what the queries may read
    std::optional<llama_kv_cache_mixed::checkpoint> step;

    // ring row of each token of the ubatch
    std::vector<int64_t> ring_rows;

    ggml_tensor * build_attn_fused(
            const llm_graph_context & graph,
            ggml_tensor * q,
            ggml_tensor * k,
            ggml_tensor * v,
            ggml_tensor * kq_mask,
            ggml_tensor * sinks,
                  float   kq_scale,
                    int   il) const;

    ggml_tensor * build_attn_in_place(
            const llm_graph_context & graph,
            ggml_tensor * q,
            ggml_tensor * k,
            ggml_tensor * v,
            ggml_tensor * kq_mask,
            ggml_tensor * sinks,
                  float   kq_scale,
                    int   il) const;

    // of a layer: it knows the rows and the basis that this graph stores and reads them in
    llama_kv_node & get_node(int32_t il) const;

    // that computes the nodes of a layer
    ggml_backend_t find_backend(const llm_graph_context & graph, int32_t il) const;

    // one node for the rows of the ubatch; v_cur nullptr: a latent layer
    ggml_tensor * store_fused(ggml_context * ctx, ggml_tensor * v_cur, ggml_tensor * v_idxs, int32_t il) const;

    // what attention made of latent values -> F32 [n_embd_head_v*n_head, n_tokens], in the model's basis and with v_mla expanded
    ggml_tensor * expand(ggml_context * ctx, ggml_tensor * res, ggml_tensor * v_mla, int64_t n_head) const;

    // [cold | ring | ubatch] in F16, the first cast
    ggml_tensor * merge(ggml_context * ctx, ggml_tensor * cold, ggml_tensor * ring, ggml_tensor * cur) const;

    // the same at once, where the device can: rows of any type become F16 as they are gathered, and hot ones are stored among them
    ggml_tensor * gather_rows(ggml_context * ctx, ggml_tensor * cold, ggml_tensor * ring, ggml_tensor * cur) const;

    void pin_gathered(const llm_graph_context & graph, int32_t il) const;

    // moves the visible entries of hot keys from their cold column to the ring's or the ubatch's
    void route_hot(ggml_tensor * mask, const llama_ubatch & ubatch) const;

    // in which order fused attention reads them, and what is seen of them then
    void order_keys(const ggml_tensor * mask, const llama_ubatch & ubatch) const;
};
