#pragma once

// What vendor/patches calls, and nothing else.

#include "llama-kv-cache-mixed.h"
#include "llama-kv-mixed-setup.h"

#include <mutex>
#include <utility>

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

// llama_batch_allocr: this batch has gaps between its positions and goes between others; who made it has checked that
bool llama_kv_mixed_fills();

// where upstream makes a full-attention cache: what the configuration asks for; the arguments are those of llama_kv_cache
template <typename... Args> llama_kv_cache * llama_kv_cache_make(Args &&... args) {
    if (const mixedkv_config * config = llama_kv_mixed_config()) {
        return new llama_kv_cache_mixed(*config, std::forward<Args>(args)...);
    }
    return new llama_kv_cache(std::forward<Args>(args)...);
}
