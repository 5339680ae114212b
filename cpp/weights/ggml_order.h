// The order of a graph, for ggml-cpu.cpp, which is asked for it before memory is planned: products of weights with the
// same columns, as those of Q, K and V, one behind the other, so that ggml_mul_mat.h makes them together.

#pragma once

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>

static void weights_order(ggml_backend_t /*cpu*/, ggml_cgraph * graph, ggml_backend_graph_optimize_params * /*deps*/) {
    constexpr int ahead = 32; // nodes between the first of them and the last

    const auto is_product = [](const ggml_tensor * t) {
        const ggml_backend_buffer_t rows = t->op == GGML_OP_MUL_MAT ? t->src[0]->buffer : nullptr;
        return rows && t->src[0]->op == GGML_OP_NONE &&
               ggml_backend_buffer_get_usage(rows) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    };
    const auto memory_of = [](const ggml_tensor * t) { return t->view_src ? t->view_src : t; };

    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * first = graph->nodes[i];
        if (!is_product(first)) {
            continue;
        }
        const ggml_tensor * columns = first->src[1];
        for (const bool is_alike : { true, false }) { // rows of one type before others, which may want other columns
            for (int j = i + 1, end = std::min(graph->n_nodes, i + ahead); j < end; j++) {
                const ggml_tensor * node = graph->nodes[j];
                if (is_product(node) && node->src[1] == columns) {
                    if ((node->src[0]->type == first->src[0]->type) == is_alike) {
                        std::rotate(graph->nodes + i + 1, graph->nodes + j, graph->nodes + j + 1);
                        i++;
                    }
                } else if (memory_of(node) == memory_of(columns) && !ggml_op_is_empty(node->op)) {
                    break; // it may write there
                }
            }
        }
    }
}
