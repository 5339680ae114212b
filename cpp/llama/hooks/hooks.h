#pragma once

// What vendor/patches calls in upstream's files; hooks/context.h and hooks/windows.h have the rest. Upstream's headers include
// this one: what it needs of them is declared here.

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

// llama_context: graph nodes to reserve on top of upstream's
uint32_t llama_kv_mixed_nodes(llama_memory_i * memory);

// llama_context: keys are still to be rotated, since rotating them failed
bool llama_kv_mixed_has_shift(llama_memory_i * memory);

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
