#pragma once

#include "mixedkv/mixedkv.h"

#include "llama-kv-cache.h"

#include <string>
#include <vector>

class llama_memory_recurrent;

// What can have a mixed cache, and what is refused and why.

// empty, or which of them is no type of a KV cache: llama.cpp's own cache aborts when it meets such a type
std::string llama_kv_mixed_type_problem(ggml_type type_k, ggml_type type_v);

// empty, or what is wrong with the types of single layers, whatever the model
std::string llama_kv_mixed_layers_problem(const mixedkv_config & config);

// K's or V's type of a layer
ggml_type llama_kv_mixed_type(const mixedkv_config & config, int32_t il, bool is_k, ggml_type type);

// empty, or why the model cannot have what the configuration asks for
std::string llama_kv_mixed_problem(const llama_model & model, const mixedkv_config & config, ggml_type type_k, ggml_type type_v);


// every attention cache of a memory, full attention first; none when the memory is of another kind
std::vector<llama_kv_cache *> llama_kv_mixed_caches(llama_memory_i * memory);

// the states of recurrent layers, nullptr: there are none
llama_memory_recurrent * llama_kv_mixed_states(llama_memory_i * memory);
