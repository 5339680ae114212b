#pragma once

#include "llama-kv-cache-mixed.h"

// One message for each thread: mixedkv_last_error()
void                llama_kv_mixed_set_error(const std::string & message);
const std::string & llama_kv_mixed_get_error();

// for the next context that this thread makes, nullptr: none
void llama_kv_mixed_set_next(const mixedkv_config * config);

// empty, or why the model cannot have what the configuration asks for
std::string llama_kv_mixed_problem(const llama_model & model, const mixedkv_config & config, ggml_type type_k, ggml_type type_v);

//
// called by upstream, see vendor/patches
//

// llama_init_from_model, first of all: takes the thread's configuration; false: refused
bool llama_kv_mixed_admit(const llama_model * model, llama_context_params & params);

// llama_init_from_model: the context could not be made
void llama_kv_mixed_failed(const std::exception & err);

// llama_model::create_memory: a configuration was admitted, so a cache must have taken it; throws otherwise
void llama_kv_mixed_check(llama_memory_i * memory, const llama_model & model);

// llama_context: graph nodes to reserve on top of upstream's
uint32_t llama_kv_mixed_nodes(llama_memory_i * memory);

// llama_context: carries out pending shifts and copies, before rows are saved and before others replace them
void llama_kv_mixed_settle(llama_context & ctx);

// every attention cache of a memory, full attention first; none when the memory is of another kind
std::vector<llama_kv_cache *> llama_kv_mixed_caches(llama_memory_i * memory);
