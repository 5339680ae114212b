// What ggml-cpu.c calls to compute a node, and where it plans memory for it. Included there, behind its own functions:
// tensors, the table of types and the thread pool are ggml's.

#pragma once

#include "weights.h"

// The type of these rows as they lie in memory. Those of other buffers with a layout of their own, as AMX has, are -1.
static inline int weights_type_of(const struct ggml_tensor * rows) {
    if (!rows->extra) {
        return rows->type;
    }
#if defined(__x86_64__) || defined(_M_X64)
    if (rows->buffer && strcmp(ggml_backend_buft_name(rows->buffer->buft), "CPU_REPACK") == 0) {
        return WEIGHTS_X8 + rows->type;
    }
#endif
    return -1;
}

static inline bool weights_take(const struct ggml_tensor * dst) {
    const struct ggml_tensor * rows = dst->src[0];
    return dst->op == GGML_OP_MUL_MAT && rows->ne[2] == 1 && rows->ne[3] == 1 && dst->src[1]->type == GGML_TYPE_F32 &&
           ggml_is_contiguous(dst) && weights_supported(weights_type_of(rows), ggml_nrows(dst->src[1]));
}

// Bytes of the columns that the threads share
static inline size_t weights_wdata_size(const struct ggml_tensor * dst) {
    if (!weights_take(dst)) {
        return 0;
    }
    return ggml_nrows(dst->src[1]) * weights_column_bytes(dst->src[0]->ne[0]);
}

// This thread's share of the blocks of all columns, quantised by ggml
static inline void weights_pack_columns(const struct ggml_tensor * dst, ggml_from_float_t quantise, char * packed,
                                        int ith, int nth) {
    enum { AT_ONCE = 32 };

    const struct ggml_tensor * columns  = dst->src[1];
    const int                  type     = weights_type_of(dst->src[0]);
    const int64_t              n_blocks = columns->ne[0] / WEIGHTS_BLOCK;
    const int64_t              n_all    = n_blocks * ggml_nrows(columns);
    const int64_t              end      = n_all * (ith + 1) / nth;
    const size_t               bytes    = weights_column_bytes(WEIGHTS_BLOCK);
    _Alignas(64) char          blocks[AT_ONCE * WEIGHTS_QUANTISED_BYTES];

    for (int64_t b = n_all * ith / nth, n; b < end; b += n) {
        const int64_t column = b / n_blocks;
        const int64_t i1     = column % columns->ne[1];
        const int64_t i2     = column / columns->ne[1] % columns->ne[2];
        const int64_t i3     = column / columns->ne[1] / columns->ne[2];
        const char *  x = (const char *)columns->data + i1 * columns->nb[1] + i2 * columns->nb[2] + i3 * columns->nb[3];
        n               = MIN(MIN(end - b, n_blocks - b % n_blocks), AT_ONCE);
        quantise((const float *)x + b % n_blocks * WEIGHTS_BLOCK, blocks, n * WEIGHTS_BLOCK);
        weights_pack(type, blocks, packed + b * bytes, n);
    }
}

static inline struct weights_product weights_product_of(const struct ggml_tensor * dst, const void * columns) {
    const struct ggml_tensor * rows = dst->src[0];

    const struct weights_product res = {
        .type       = weights_type_of(rows),
        .n_elements = rows->ne[0],
        .n_rows     = rows->ne[1],
        .n_columns  = ggml_nrows(dst->src[1]),
        .rows       = rows->data,
        .row_bytes  = rows->nb[1],
        .columns    = columns,
        .out        = dst->data,
        .out_bytes  = dst->nb[1],
    };
    return res;
}

// Whether a node is a product that can be made together with `first`, which lies before it
static inline bool weights_join(const struct ggml_tensor * first, const struct ggml_tensor * dst) {
    return dst->src[1] == first->src[1] && (dst->flags & GGML_TENSOR_FLAG_COMPUTE) && weights_take(dst) &&
           dst->src[0]->op == GGML_OP_NONE &&
           weights_packed_alike(weights_type_of(dst->src[0]), weights_type_of(first->src[0]));
}

// Computes a node and the products that follow it and read the same columns, as those of Q, K and V do where
// ggml_order.h has put them side by side. The columns are packed once, and no thread waits for others between products.
// Returns how many nodes have been computed besides.
static inline int weights_compute_forward(struct ggml_compute_params * params, const struct ggml_cgraph * graph,
                                          int i_node) {
    enum { MOST = 4 };

    struct ggml_tensor * first = graph->nodes[i_node];
    if (params->use_ref || !weights_take(first)) {
        ggml_compute_forward(params, first);
        return 0;
    }
    struct weights_product products[MOST];

    int     n      = 0;
    int64_t n_rows = 0;
    do {
        products[n] = weights_product_of(graph->nodes[i_node + n], params->wdata);
        n_rows += products[n++].n_rows;
    } while (n < MOST && i_node + n < graph->n_nodes && weights_join(first, graph->nodes[i_node + n]));

    GGML_ASSERT(params->wsize >= weights_wdata_size(first));
    weights_pack_columns(first, ggml_get_type_traits_cpu(GGML_TYPE_Q8_0)->from_float, params->wdata, params->ith,
                         params->nth);
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);

    // Four turns for each thread, so that one that is held up leaves its work to others
    const int64_t least = n_rows / (4 * params->nth);
    const int64_t turn  = MAX(least - least % WEIGHTS_ROWS, WEIGHTS_ROWS);
    for (int64_t next = params->ith;; next = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        int     k = 0;
        int64_t r = next * turn;
        for (; k < n && r >= products[k].n_rows; k++) {
            r -= (products[k].n_rows + turn - 1) / turn * turn;
        }
        if (k == n) {
            return n - 1;
        }
        weights_run(&products[k], r, MIN(r + turn, products[k].n_rows));
    }
}
