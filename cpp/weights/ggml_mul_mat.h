// What ggml-cpu.c calls to compute a node, and where it plans memory for it. Included there, behind its own functions:
// tensors, the table of types and the thread pool are ggml's.

#pragma once

#include "elementwise/ggml_elementwise.h"
#include "weights.h"

// The type of these rows as they lie in memory, or -1: those of other buffers with a layout of their own, and rows in
// 16 bits that are no weights but computed, as those of a KV cache.
static inline int weights_type_of(const struct ggml_tensor * rows) {
    if (!rows->extra) {
        return ggml_is_quantized(rows->type) || rows->op == GGML_OP_NONE ? (int)rows->type : -1;
    }
    const bool is_repacked = rows->buffer && strcmp(ggml_backend_buft_name(rows->buffer->buft), "CPU_REPACK") == 0;
    return is_repacked ? weights_repacked(rows->type) : -1;
}

// Whether rows are those of several experts, one behind the other, and src[2] says to which of them each column goes
static inline bool weights_is_routed(const struct ggml_tensor * dst) {
    return dst->op == GGML_OP_MUL_MAT_ID;
}

static inline bool weights_take(const struct ggml_tensor * dst) {
    if (dst->op != GGML_OP_MUL_MAT && !weights_is_routed(dst)) {
        return false;
    }
    const struct ggml_tensor * rows      = dst->src[0];
    const bool                 is_routed = weights_is_routed(dst);
    return (is_routed ? ggml_is_quantized(rows->type) : rows->ne[2] == 1) && rows->ne[3] == 1 &&
           rows->ne[0] % WEIGHTS_BLOCK == 0 && rows->nb[0] == ggml_type_size(rows->type) &&
           dst->src[1]->type == GGML_TYPE_F32 && dst->src[1]->nb[0] == sizeof(float) && ggml_is_contiguous(dst) &&
           weights_supported(weights_type_of(rows), is_routed ? dst->src[2]->ne[1] : ggml_nrows(dst->src[1]));
}

// The columns of a product, as they are packed at this address
static inline struct weights_columns weights_columns_of(const struct ggml_tensor * dst, void * packed) {
    const struct weights_columns res = {
        .type       = weights_type_of(dst->src[0]),
        .are_chosen = weights_is_routed(dst),
        .n_elements = dst->src[0]->ne[0],
        .n_columns  = ggml_nrows(dst->src[1]),
        .packed     = packed,
        .quantise   = ggml_get_type_traits_cpu(GGML_TYPE_Q8_0)->from_float,
    };
    return res;
}

// Bytes of the columns that the threads share
static inline size_t weights_packed_size(const struct ggml_tensor * dst) {
    const struct weights_columns columns = weights_columns_of(dst, NULL);
    return GGML_PAD(weights_columns_bytes(&columns), WEIGHTS_ALIGNMENT);
}

// Bytes that a thread needs besides
static inline size_t weights_work_size(const struct ggml_tensor * dst) {
    const struct weights_columns columns = weights_columns_of(dst, NULL);
    return GGML_PAD(weights_work_bytes(&columns), WEIGHTS_ALIGNMENT);
}

// Which columns go to which experts
struct weights_routes {
    int32_t * n_active;
    int32_t * active; // experts that have columns
    int32_t * ends;   // of each expert's pairs
    int32_t * pairs;  // weights_product's `chosen`, expert by expert
};

static inline struct weights_routes weights_routes_at(const struct ggml_tensor * dst, void * memory) {
    const int64_t               n_experts = dst->src[0]->ne[2];
    int32_t * const             first     = memory;
    const struct weights_routes res       = { first, first + 1, first + 1 + n_experts, first + 1 + 2 * n_experts };
    return res;
}

static inline size_t weights_routes_size(const struct ggml_tensor * dst) {
    if (!weights_is_routed(dst)) {
        return 0;
    }
    const int64_t n = 1 + 2 * dst->src[0]->ne[2] + 2 * ggml_nelements(dst->src[2]);
    return GGML_PAD(n * sizeof(int32_t), WEIGHTS_ALIGNMENT);
}

// With these, and what each thread needs besides
static inline size_t weights_wdata_size(const struct ggml_tensor * dst, int n_threads) {
    if (!weights_take(dst)) {
        return 0;
    }
    return WEIGHTS_ALIGNMENT + weights_packed_size(dst) + weights_routes_size(dst) + n_threads * weights_work_size(dst);
}

static inline int32_t weights_expert(const struct ggml_tensor * ids, int64_t token, int64_t i) {
    return *(const int32_t *)((const char *)ids->data + token * ids->nb[1] + i * ids->nb[0]);
}

// Sorts the columns by their experts.
static inline void weights_route(const struct ggml_tensor * dst, const struct weights_routes * routes) {
    const struct ggml_tensor * ids       = dst->src[2];
    const int64_t              n_experts = dst->src[0]->ne[2];

    memset(routes->ends, 0, n_experts * sizeof(int32_t));
    for (int64_t token = 0; token < ids->ne[1]; token++) {
        for (int64_t i = 0; i < ids->ne[0]; i++) {
            const int32_t expert = weights_expert(ids, token, i);
            GGML_ASSERT(expert >= 0 && expert < n_experts);
            routes->ends[expert]++;
        }
    }
    *routes->n_active = 0;
    for (int32_t expert = 0, begin = 0; expert < n_experts; expert++) {
        const int32_t n      = routes->ends[expert];
        routes->ends[expert] = begin; // until its pairs are there
        begin += n;
        if (n) {
            routes->active[(*routes->n_active)++] = expert;
        }
    }
    for (int64_t token = 0; token < ids->ne[1]; token++) {
        for (int64_t i = 0; i < ids->ne[0]; i++) {
            int32_t * pair = routes->pairs + 2 * routes->ends[weights_expert(ids, token, i)]++;
            pair[0]        = (int32_t)(token * dst->src[1]->ne[1] + i % dst->src[1]->ne[1]);
            pair[1]        = (int32_t)(token * dst->ne[1] + i);
        }
    }
}

// This thread's share of the blocks of all columns
static inline void weights_pack_columns(const struct ggml_tensor * dst, const struct weights_columns * to, int ith,
                                        int nth) {
    const struct ggml_tensor * columns  = dst->src[1];
    const int64_t              n_blocks = columns->ne[0] / WEIGHTS_BLOCK;
    const int64_t              n_all    = n_blocks * ggml_nrows(columns);
    const int64_t              end      = n_all * (ith + 1) / nth;

    for (int64_t b = n_all * ith / nth, n; b < end; b += n) {
        const int64_t column = b / n_blocks;
        const int64_t first  = b % n_blocks;
        const int64_t i1     = column % columns->ne[1];
        const int64_t i2     = column / columns->ne[1] % columns->ne[2];
        const int64_t i3     = column / columns->ne[1] / columns->ne[2];
        const char *  x = (const char *)columns->data + i1 * columns->nb[1] + i2 * columns->nb[2] + i3 * columns->nb[3];
        n               = MIN(end - b, n_blocks - first);
        weights_pack(to, (const float *)x + first * WEIGHTS_BLOCK, column, first, n);
    }
}

static inline struct weights_product weights_product_of(const struct ggml_tensor * dst, const void * columns) {
    const struct ggml_tensor * rows = dst->src[0];

    const uint32_t * const * wanted = NULL;
    memcpy(&wanted, dst->op_params + WEIGHTS_WANTED_PARAM, sizeof(wanted));

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
        .wanted     = wanted ? *wanted : NULL,
        .n_packed   = ggml_nrows(dst->src[1]),
    };
    return res;
}

// Whether a node is a product that can be made together with `first`, which lies before it
static inline bool weights_join(const struct ggml_tensor * first, const struct ggml_tensor * dst) {
    return dst->op == first->op && dst->src[1] == first->src[1] && (dst->flags & GGML_TENSOR_FLAG_COMPUTE) &&
           weights_take(dst) && dst->src[0]->op == GGML_OP_NONE &&
           weights_packed_alike(weights_type_of(dst->src[0]), weights_type_of(first->src[0]), ggml_nrows(dst->src[1]));
}

// Packs the columns of a product, with the other threads, and sorts those that are routed.
static inline void weights_prepare(struct ggml_compute_params * params, const struct ggml_tensor * dst, char * packed) {
    GGML_ASSERT(params->wsize >= weights_wdata_size(dst, params->nth));
    const struct weights_columns columns = weights_columns_of(dst, packed);
    weights_pack_columns(dst, &columns, params->ith, params->nth);
    if (params->ith == 0) {
        if (weights_is_routed(dst)) {
            const struct weights_routes routes = weights_routes_at(dst, packed + weights_packed_size(dst));
            weights_route(dst, &routes);
        }
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
}

// Rows that a thread draws at a time: four chunks for each thread, so that one that is held up leaves its work to
// others
static inline int64_t weights_chunk(int64_t n_rows, int n_chunks) {
    const int64_t least = n_rows / n_chunks;
    return MAX(least - least % WEIGHTS_ROWS, WEIGHTS_ROWS);
}

// This thread's share of the products of the experts, once the columns are packed
static inline void weights_compute_routed(const struct ggml_compute_params * params, const struct ggml_tensor * dst,
                                          char * packed, char * work) {
    const struct ggml_tensor *  rows    = dst->src[0];
    const struct weights_routes routes  = weights_routes_at(dst, packed + weights_packed_size(dst));
    struct weights_product      product = weights_product_of(dst, packed);

    const int64_t chunk    = MIN(weights_chunk(*routes.n_active * product.n_rows, 4 * params->nth), product.n_rows);
    const int64_t n_chunks = (product.n_rows + chunk - 1) / chunk; // of an expert
    for (int64_t next = params->ith; next < *routes.n_active * n_chunks;
         next         = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int32_t expert = routes.active[next / n_chunks];
        const int32_t begin  = expert ? routes.ends[expert - 1] : 0;
        const int64_t r      = next % n_chunks * chunk;
        product.rows         = (const char *)rows->data + expert * rows->nb[2];
        product.n_columns    = routes.ends[expert] - begin;
        product.chosen       = routes.pairs + 2 * begin;
        weights_run(&product, work, r, MIN(r + chunk, product.n_rows));
    }
}

// Computes a node and the products that follow it and read the same columns, as those of Q, K and V do where
// ggml_order.h has put them side by side. The columns are packed once, and no thread waits for others between products.
// Returns how many nodes have been computed besides.
static inline int weights_compute_forward(struct ggml_compute_params * params, const struct ggml_cgraph * graph,
                                          int i_node) {
    enum { MOST = 4 };

    struct ggml_tensor * first = graph->nodes[i_node];
    if (params->use_ref || !weights_take(first)) {
        if (params->use_ref || !geglu_compute_forward(params, first)) {
            ggml_compute_forward(params, first);
        }
        return 0;
    }
    char * const packed = (char *)params->wdata + -(uintptr_t)params->wdata % WEIGHTS_ALIGNMENT;

    weights_prepare(params, first, packed);
    char * const work =
        packed + weights_packed_size(first) + weights_routes_size(first) + params->ith * weights_work_size(first);
    if (weights_is_routed(first)) {
        weights_compute_routed(params, first, packed, work);
        return 0;
    }
    struct weights_product products[MOST];

    int     n      = 0;
    int64_t n_rows = 0;
    do {
        products[n] = weights_product_of(graph->nodes[i_node + n], packed);
        n_rows += products[n++].n_rows;
    } while (n < MOST && i_node + n < graph->n_nodes && weights_join(first, graph->nodes[i_node + n]));

    const int64_t chunk =
        weights_chunk(n_rows, (products[0].wanted ? 64 : 4) * params->nth); // more where chunks differ
    for (int64_t next = params->ith;; next = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        int     k = 0;
        int64_t r = next * chunk;
        for (; k < n && r >= products[k].n_rows; k++) {
            r -= (products[k].n_rows + chunk - 1) / chunk * chunk;
        }
        if (k == n) {
            return n - 1;
        }
        weights_run(&products[k], work, r, MIN(r + chunk, products[k].n_rows));
    }
}
