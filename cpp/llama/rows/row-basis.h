#pragma once

// The basis that a cache's rows are stored in. K is multiplied by scales (rows/equalize.h), cold K is stored without a bias that RoPE
// rotates (rows/rope-angles.h), and quantised latent rows are rotated by Hadamard blocks. Of a uniform cache it is the model's own, but
// for the rotation of quantised rows, which is upstream's.
//
// Who changes rows to it: the fused nodes by themselves, where they read all layers; otherwise the graph, for all layers.
//
// llama_kv_cache_mixed composes one beside its cold store; others reach it through llama_kv_cache_mixed::get_basis().

#include "ggml-cpp.h"
#include "llama-kv-cache.h"
#include "rows/equalize.h"
#include "rows/rope-angles.h"

#include <cstdint>
#include <vector>

class llama_kv_row_basis {
public:
    using slot_info = llama_kv_cache::slot_info;

    // with its base, which outlives this; is_mixed: a uniform cache has no scales and no rotation of its own
    llama_kv_row_basis(const llama_kv_cache & cold, const llama_model & model, const llama_hparams & hparams, bool is_mixed);

    // scales as tensors, for fused nodes on devices
    void alloc_scales();

    // tensors of scales and biases, for graphs that change rows by themselves
    void alloc_for_graph();

    // the context that computes on the cache, before its first step
    void set_context(llama_context * lctx) { this->lctx = lctx; }

    //
    // rotation
    //

    // The matrix that latent rows are rotated by when they are quantised, in blocks that values end with too; nullptr: they are
    // not. Upstream rotates none of them.
    ggml_tensor * get_latent_rot() const { return latent_rot; }

    //
    // scales of K
    //

    // what keys of layer il are stored times, nullptr: nothing
    const llama_kv_scales * get_scales(int32_t il) const { return equalizer.get(index(il)); }

    // tells them apart, 0: there are none
    uint32_t get_scales_id(int32_t il) const { return get_scales(il) ? get_scales(il)->id : 0; }

    // what alloc_scales() has made of them
    ggml_tensor * get_scale_k(int32_t il) const { return equalizer.get_k(index(il)); }
    ggml_tensor * get_scale_q(int32_t il) const { return equalizer.get_q(index(il)); }

    // in a graph; k may be nullptr
    void scale_qk(ggml_context * ctx, ggml_tensor *& q, ggml_tensor *& k, int32_t il) const;

    //
    // the subtracted bias of cold rows of K
    //

    // of a layer, nullptr: nothing
    const std::vector<mixedkv::attention_pair> * get_pairs(int32_t il) const;

    // cells of these streams have got positions
    void update_angles(const slot_info & sinfo);

    // of a graph: cosines and sines of the ubatch's tokens and of the cells [n_angles, n_tokens], [n_angles, n_kv, n_stream], and the
    //   subtracted bias of rows with such angles [n_embd_head, n_head_kv, ...], nullptr: nothing
    uint32_t get_n_angles() const { return angles.n_angles(); }
    void set_input_angles(ggml_tensor * cur, ggml_tensor * cells, const llama_ubatch & ubatch);
    ggml_tensor * build_subtracted_bias(ggml_context * ctx, ggml_tensor * angles, int32_t il) const;

private:
    const llama_kv_cache & cold;
    const llama_model &    model;
    const llama_hparams &  hparams;

    llama_context * lctx = nullptr;

    llama_kv_equalizer   equalizer;
    llama_kv_rope_angles angles;
    uint32_t             angles_s0 = 0; // first stream of the ubatch at hand

    ggml_context_ptr        latent_ctx;
    ggml_backend_buffer_ptr latent_buf;
    ggml_tensor *           latent_rot = nullptr; // F32 [edge, edge]

    // by index of the KV cache layer
    size_t index(int32_t il) const;
    std::vector<uint32_t> get_head_sizes() const;

    void make_latent_rot();
    void make_scales();
};
