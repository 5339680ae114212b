#pragma once

// What vendor/patches calls in upstream's files, and what they add to upstream's classes; hooks/context.h and
// hooks/recurrent.h have the rest. Upstream's headers include this one: what it needs of them is declared here.

#include "cache/trial.h"

#include "llama-arch.h"
#include "llama-cparams.h"
#include "llama-memory.h"

#include <exception>
#include <memory>
#include <utility>
#include <vector>

class llama_kv_cache;
struct llama_hparams;
struct llama_model;

// llama_init_from_model, first of all: takes the thread's configuration; false: refused
bool llama_kv_mixed_admit(const llama_model * model, llama_context_params & params);

// llama_init_from_model: the context could not be made
void llama_kv_mixed_failed(const std::exception & err);

// llama_model::create_memory: a configuration was admitted, so a cache must have taken it; throws otherwise
void llama_kv_mixed_check(llama_memory_i * memory, const llama_model & model);

// llama_model: says in the hyperparameters which layers have no RoPE, where upstream has it in the graph alone
void llama_kv_mixed_rope_layers(llm_arch arch, llama_hparams & hparams);

// llama_context: graph nodes to reserve on top of upstream's
uint32_t llama_kv_mixed_nodes(llama_memory_i * memory);

// llama_context: keys are still to be turned, since turning them failed
bool llama_kv_mixed_has_shift(llama_memory_i * memory);

// llama_kv_cache: whether its keys can be turned; of a uniform cache ggml writes no part of a quantised head
bool llama_kv_mixed_can_turn(const llama_kv_cache & kv, const llama_hparams & hparams);

// llama_kv_cache::get_can_shift: so can they when positions have several parts, as long as all of them move by the same
bool llama_kv_mixed_can_shift(const llama_kv_cache & kv, const llama_hparams & hparams);

// llama_kv_cache::update: whether a shift turns keys of any of its layers
bool llama_kv_mixed_turns(const llama_kv_cache & kv, const llama_hparams & hparams);

// llama_batch_allocr: this batch has gaps between its positions and goes between others; who made it has checked that
bool llama_kv_mixed_fills();

// llama_kv_cache::find_slot: tokens that a sliding window does not see keep their cells while there are empty ones for `n`, and
// where a batch goes between others
bool llama_kv_mixed_spares(const llama_kv_cells & cells, uint32_t n);

// llama_kv_cache: the type of K or V of a layer, where its context was asked for `type`
ggml_type llama_kv_mixed_layer_type(int32_t il, bool is_k, ggml_type type);

// where upstream makes a full-attention cache: what the configuration asks for; the arguments are those of llama_kv_cache
llama_kv_cache * llama_kv_cache_new(
        const llama_model & model,
      const llama_hparams & hparams,
                ggml_type   type_k,
                ggml_type   type_v,
                     bool   v_trans,
                     bool   offload,
                     bool   unified,
                 uint32_t   kv_size,
                 uint32_t   n_seq_max,
                 uint32_t   n_pad,
                 uint32_t   n_swa,
           llama_swa_type   swa_type,
           llama_memory_t   mem_other,
    const llama_memory_i::layer_filter_cb & filter,
    const llama_memory_i::layer_reuse_cb  & reuse,
    const llama_memory_i::layer_share_cb  & share);

template <typename... Args> std::unique_ptr<llama_kv_cache> llama_kv_cache_make(Args &&... args) {
    return std::unique_ptr<llama_kv_cache>(llama_kv_cache_new(std::forward<Args>(args)...));
}

// llama_kv_cache_context has besides, public:
//
// make        where upstream makes one for a batch: that of the cache's kind
// get_n_mask  columns of the mask: the rows that attention reads, which may be more than cells
// equalize    before Q and K are rotated: the cache may scale them
// build_attn  attention of a layer, as build_attn_mha has it
#define LLAMA_KV_CACHE_CONTEXT_HOOKS \
    static std::unique_ptr<llama_kv_cache_context> make( \
            llama_kv_cache * kv, slot_info_vec_t sinfos, std::vector<llama_ubatch> ubatches); \
    virtual uint32_t get_n_mask(const llama_ubatch & ubatch, const llama_cparams & cparams) const; \
    virtual void equalize(ggml_context * ctx, ggml_tensor *& q, ggml_tensor *& k, int32_t il) const; \
    virtual ggml_tensor * build_attn( \
            const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * kq_b, \
            ggml_tensor * kq_mask, ggml_tensor * sinks, ggml_tensor * v_mla, float kq_scale, int il) const; \
    friend class llama_kv_cache_mixed_context;
