#pragma once

// What vendor/patches calls, and nothing else.

#include "cache/mixed.h"
#include "hooks/setup.h"
#include "cache/trial.h"
#include "hooks/step.h"

#include <mutex>
#include <utility>
#include <vector>

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

// llama_context: carries out pending shifts and copies, before rows are saved and before others replace them; no other
// thread touches rows as long as what is returned is there
std::unique_lock<std::recursive_mutex> llama_kv_mixed_settle(llama_context & ctx);

// llama_context: keys are still to be turned, since turning them failed
bool llama_kv_mixed_has_shift(llama_memory_i * memory);

// llama_kv_cache: whether its keys can be turned; of a uniform cache ggml writes no part of a quantised head
bool llama_kv_mixed_can_turn(const llama_kv_cache & kv, const llama_hparams & hparams);

// llama_batch_allocr: this batch has gaps between its positions and goes between others; who made it has checked that
bool llama_kv_mixed_fills();

// llama_kv_cache: the type of K or V of a layer, where its context was asked for `type`
ggml_type llama_kv_mixed_layer_type(int32_t il, bool is_k, ggml_type type);

// where upstream makes a full-attention cache: what the configuration asks for; the arguments are those of llama_kv_cache
template <typename... Args> llama_kv_cache * llama_kv_cache_make(Args &&... args) {
    if (const mixedkv_config * config = llama_kv_mixed_config()) {
        mixedkv_config own = *config;

        // they are there only while the context is made, for llama_kv_mixed_layer_type
        own.layers   = nullptr;
        own.n_layers = 0;

        return new llama_kv_cache_mixed(own, std::forward<Args>(args)...);
    }
    return new llama_kv_cache(std::forward<Args>(args)...);
}
