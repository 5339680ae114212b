#pragma once

// What hooks/finite.h looks at of each token, whether its logits are asked for or not: a value that is no number stays in a token's
// stream of residuals up to the last layer, and in the query that it makes there.

#include <cstdint>

class llama_kv_cache;

struct ggml_tensor;
struct llm_graph_context;

// build_attn of a cache: has the graph sum up the queries of the cache's last layer, [1, n_tokens]
void llama_kv_sum_queries(const llm_graph_context & graph, const llama_kv_cache & kv, ggml_tensor * q, int32_t il);

bool llama_kv_is_query_sums(const ggml_tensor * node);
