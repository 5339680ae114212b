#include "graph/query-sums.h"

#include "rows/access.h"

#include "llama-graph.h"

#include <cstring>

static const char * const sums_name = "mixedkv_query_sums";

void llama_kv_sum_queries(const llm_graph_context & graph, const llama_kv_cache & kv, ggml_tensor * q, int32_t il) {
    const auto & layers = kv_access::get_layers(kv);

    if (layers.empty() || int32_t(layers.back().il) != il || q->type != GGML_TYPE_F32) {
        return;
    }

    ggml_tensor * rows = ggml_is_contiguous(q) ? q : ggml_cont(graph.ctx0, q);
    ggml_tensor * sums = ggml_sum_rows(graph.ctx0, ggml_reshape_2d(graph.ctx0, rows, q->ne[0]*q->ne[1], q->ne[2]*q->ne[3]));

    ggml_set_name(sums, sums_name);
    ggml_set_output(sums);
    ggml_build_forward_expand(graph.gf, sums);
}

bool llama_kv_is_query_sums(const ggml_tensor * node) {
    return node->op == GGML_OP_SUM_ROWS && strcmp(node->name, sums_name) == 0;
}
