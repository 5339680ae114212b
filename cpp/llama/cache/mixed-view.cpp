// The merged view: what attention of a device reads, cold rows and hot ones in F16 in a tensor of the graph.

#include "cache/mixed-context.h"

#include "graph/guard.h"

// via F32: backends convert quantised rows to nothing else
static ggml_tensor * cast_rows(ggml_context * ctx, ggml_tensor * cold, ggml_tensor * subtracted_bias) {
    ggml_tensor * res = ggml_cast(ctx, cold, GGML_TYPE_F32);

    return ggml_cast(ctx, subtracted_bias ? ggml_add(ctx, res, subtracted_bias) : res, GGML_TYPE_F16);
}

ggml_tensor * llama_kv_cache_mixed_context::merge(ggml_context * ctx, ggml_tensor * cold, ggml_tensor * ring, ggml_tensor * rows) const {
    const int64_t n_stream = cold->ne[3];

    ggml_tensor * hot = ggml_concat(ctx, ring, ggml_reshape_4d(ctx, rows, rows->ne[0], rows->ne[1], rows->ne[2]/n_stream, n_stream), 2);

    // any rows: the mask hides them
    const int64_t n_pad = GGML_PAD(cold->ne[2] + hot->ne[2], llama_kv_cache_mixed::n_pad_view) - cold->ne[2] - hot->ne[2];
    if (n_pad > 0) {
        llama_kv_guard(n_pad <= cold->ne[2], "a graph reads 256 cells at least");
        hot = ggml_concat(ctx, hot, ggml_view_4d(ctx, cold, cold->ne[0], cold->ne[1], n_pad, n_stream, cold->nb[1], cold->nb[2], cold->nb[3], 0), 2);
    }

    return ggml_concat(ctx, cold, hot, 2);
}

// I32 [end - begin, n_stream]: the numbers from begin on, at most `last`
static ggml_tensor * row_numbers(ggml_context * ctx, int64_t begin, int64_t end, int64_t last, int64_t n_stream) {
    ggml_tensor * res = ggml_arange(ctx, begin, end, 1.0f);
    if (end > last + 1) {
        res = ggml_clamp(ctx, res, 0.0f, last);
    }
    if (n_stream > 1) {
        res = ggml_repeat_4d(ctx, res, end - begin, n_stream, 1, 1);
    }

    return ggml_cast(ctx, res, GGML_TYPE_I32);
}

// of all streams that a graph reads: [elements, rows, streams]
static ggml_tensor * flat_rows(ggml_context * ctx, ggml_tensor * t) {
    return ggml_view_3d(ctx, t->view_src, t->ne[0]*t->ne[1], t->ne[2], t->ne[3], t->nb[2], t->nb[3], t->view_offs);
}

ggml_tensor * llama_kv_cache_mixed_context::gather_rows(
        ggml_context * ctx, ggml_tensor * cold, ggml_tensor * ring, ggml_tensor * rows) const {
    const int64_t n_stream = cold->ne[3];
    const int64_t n_cur    = rows->ne[2]/n_stream;
    const int64_t n_hot    = cold->ne[2] + ring->ne[2];
    const int64_t n        = GGML_PAD(n_hot + n_cur, llama_kv_cache_mixed::n_pad_view);

    if (!state.gather.cold) {
        state.gather.cold = row_numbers(ctx, 0,           n,             cold->ne[2] - 1, n_stream);
        state.gather.ring = row_numbers(ctx, cold->ne[2], n_hot,         n,               1);
        state.gather.cur  = row_numbers(ctx, n_hot,       n_hot + n_cur, n,               1);
    }

    ggml_tensor * from = flat_rows(ctx, cold);

    // ggml_get_rows makes one of F32
    ggml_tensor * res = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, from->ne[0], n, n_stream);
    res->op     = GGML_OP_GET_ROWS;
    res->src[0] = from;
    res->src[1] = state.gather.cold;
    state.gather.nodes.push_back(res);

    ggml_tensor * cur = ggml_reshape_3d(ctx, rows, from->ne[0], n_cur, n_stream);

    res = ggml_set_rows(ctx, res, flat_rows(ctx, ring), state.gather.ring);
    res = ggml_set_rows(ctx, res, cur, state.gather.cur);

    return ggml_reshape_4d(ctx, res, cold->ne[0], cold->ne[1], n, n_stream);
}

void llama_kv_cache_mixed_context::pin_gathered(const llm_graph_context & graph, int32_t il) const {
    ggml_backend_t backend = find_backend(graph, il);
    for (ggml_tensor * node : state.gather.nodes) {
        if (backend) {
            ggml_backend_sched_set_tensor_backend(graph.sched, node, backend);
        }
    }
    state.gather.nodes.clear();
}

ggml_tensor * llama_kv_cache_mixed_context::get_k(ggml_context * ctx, int32_t il) const {
    ggml_tensor * cold    = llama_kv_cache_context::get_k(ctx, il);
    ggml_tensor * subtracted_bias = state.angles.cells && !readers.is_fused(il) ? basis.build_subtracted_bias(ctx, state.angles.cells, il) : nullptr;

    if (readers.is_fused(il) || readers.is_in_place(il) || (!hot.has_rows() && !subtracted_bias)) {
        return cold;
    }
    if (readers.gathers_k(il)) {
        return gather_rows(ctx, cold, hot.get_k(ctx, il, sinfos[i_cur]), get_cur(il).k);
    }

    cold = cast_rows(ctx, cold, subtracted_bias);

    return hot.has_rows() ? merge(ctx, cold, hot.get_k(ctx, il, sinfos[i_cur]), get_cur(il).k) : cold;
}

ggml_tensor * llama_kv_cache_mixed_context::get_v(ggml_context * ctx, int32_t il) const {
    ggml_tensor * cold = llama_kv_cache_context::get_v(ctx, il);

    if (!hot.has_rows() || readers.is_fused(il) || readers.is_in_place(il)) {
        return cold;
    }
    if (readers.gathers_v(il)) {
        return gather_rows(ctx, cold, hot.get_v(ctx, il, sinfos[i_cur]), get_cur(il).v);
    }

    return merge(ctx, cast_rows(ctx, cold, nullptr), hot.get_v(ctx, il, sinfos[i_cur]), get_cur(il).v);
}
