#include "llama-kv-cache-mixed.h"

#include "llama-kv-node.h"

#include <cmath>
#include <cstring>

//
// llama_kv_cache_mixed_context
//

llama_kv_cache_mixed_context::llama_kv_cache_mixed_context(llama_kv_cache_mixed * kv) :
    llama_kv_cache_context(kv), kv_mixed(kv) {}

llama_kv_cache_mixed_context::llama_kv_cache_mixed_context(
        llama_kv_cache_mixed * kv,
        slot_info_vec_t sinfos,
        std::vector<llama_ubatch> ubatches) :
    llama_kv_cache_context(kv, std::move(sinfos), std::move(ubatches)), kv_mixed(kv) {}

llama_kv_cache_mixed_context::~llama_kv_cache_mixed_context() {
    if (step) {
        kv_mixed->roll_back(*step);
    }
}

bool llama_kv_cache_mixed_context::next() {
    step.reset();

    return llama_kv_cache_context::next();
}

bool llama_kv_cache_mixed_context::apply() {
    const auto & sinfo = sinfos[i_cur];

    step = kv_mixed->begin_step(sinfo);

    if (!llama_kv_cache_context::apply()) {
        return false;
    }

    kv_mixed->set_runs(ubatches[i_cur], sinfo.n_stream());

    if (kv_mixed->has_ring()) {
        ring_rows = kv_mixed->advance(sinfo, ubatches[i_cur]);
        kv_mixed->keep_rows(*step);
    }

    return true;
}

//
// graph
//

uint32_t llama_kv_cache_mixed_context::get_n_mask(const llama_ubatch & ubatch, uint32_t n_stream) const {
    return get_n_kv() + (kv_mixed->has_ring() ? kv_mixed->get_n_ring() + ubatch.n_tokens/n_stream : 0);
}

ggml_tensor * llama_kv_cache_mixed_context::build_input_k_idxs(ggml_context * ctx, const llama_ubatch & ubatch) const {
    if (!kv_mixed->has_ring()) {
        return llama_kv_cache_context::build_input_k_idxs(ctx, ubatch);
    }

    ggml_tensor * k_idxs = ggml_new_tensor_2d(ctx, GGML_TYPE_I64, ubatch.n_tokens, 2);

    ggml_set_input(k_idxs);
    ggml_set_name(k_idxs, "attn_inp_k_idxs");

    return k_idxs;
}

void llama_kv_cache_mixed_context::set_input_k_idxs(ggml_tensor * dst, const llama_ubatch * ubatch) const {
    llama_kv_cache_context::set_input_k_idxs(dst, ubatch);

    if (kv_mixed->has_ring()) {
        std::copy(ring_rows.begin(), ring_rows.end(), (int64_t *) dst->data + ubatch->n_tokens);
    }
}

static ggml_tensor * idxs_row(ggml_context * ctx, ggml_tensor * k_idxs, int64_t row) {
    return ggml_view_1d(ctx, k_idxs, k_idxs->ne[0], row*k_idxs->nb[1]);
}

// where all layers are fused their nodes do it
void llama_kv_cache_mixed_context::equalize(ggml_context * ctx, ggml_tensor *& q, ggml_tensor *& k, int32_t il) const {
    if (!kv_mixed->is_fused()) {
        kv_mixed->scale_qk(ctx, q, k, il);
    }
}

// the fused nodes rotate by themselves: upstream gets no matrix, and so leaves the rotation out of its graph
ggml_tensor * llama_kv_cache_mixed_context::build_input_k_rot(ggml_context * ctx) const {
    ggml_tensor * rot = llama_kv_cache_context::build_input_k_rot(ctx);

    return rot && kv_mixed->is_fused() ? (fold.k = rot->ne[0], nullptr) : rot;
}

ggml_tensor * llama_kv_cache_mixed_context::build_input_v_rot(ggml_context * ctx) const {
    ggml_tensor * rot = llama_kv_cache_context::build_input_v_rot(ctx);

    return rot && kv_mixed->is_fused() ? (fold.v = rot->ne[0], nullptr) : rot;
}

ggml_tensor * llama_kv_cache_mixed_context::cpy_k(ggml_context * ctx, ggml_tensor * k_cur, ggml_tensor * k_idxs, int32_t il) const {
    if (kv_mixed->is_fused(il)) {
        // stored together with V
        cur[il].k         = k_cur;
        cur[il].k_idxs    = k_idxs;
        cur[il].ring_idxs = kv_mixed->has_ring() ? idxs_row(ctx, k_idxs, 1) : nullptr;

        return k_cur;
    }

    if (!kv_mixed->has_ring()) {
        return llama_kv_cache_context::cpy_k(ctx, k_cur, k_idxs, il);
    }

    // rounded as the ring rounds: a key reads the same in its own ubatch and in the next
    cur[il].k         = ggml_cast(ctx, k_cur, GGML_TYPE_F16);
    cur[il].ring_idxs = idxs_row(ctx, k_idxs, 1);

    return llama_kv_cache_context::cpy_k(ctx, k_cur, idxs_row(ctx, k_idxs, 0), il);
}

ggml_tensor * llama_kv_cache_mixed_context::cpy_v(ggml_context * ctx, ggml_tensor * v_cur, ggml_tensor * v_idxs, int32_t il) const {
    if (kv_mixed->is_fused(il)) {
        auto & rows = cur.at(il);
        auto & node = kv_mixed->get_node(il);

        node.rotation_k = fold.k;
        node.rotation_v = fold.v;
        node.scales     = kv_mixed->is_fused() ? kv_mixed->get_scales(il) : nullptr;
        node.has_ring   = kv_mixed->has_ring();

        rows.stored = llama_kv_node_store(ctx, node,
                llama_kv_cache_context::get_k(ctx, il)->view_src, llama_kv_cache_context::get_v(ctx, il)->view_src,
                rows.k, v_cur, rows.k_idxs, v_idxs);

        return rows.stored;
    }

    if (kv_mixed->has_ring()) {
        cur[il].v = ggml_cast(ctx, v_cur, GGML_TYPE_F16);
    }

    return llama_kv_cache_context::cpy_v(ctx, v_cur, v_idxs, il);
}

ggml_tensor * llama_kv_cache_mixed_context::merge(ggml_context * ctx, ggml_tensor * cold, ggml_tensor * ring, ggml_tensor * rows) const {
    const int64_t n_stream = cold->ne[3];

    // via F32: backends convert quantised rows to nothing else
    ggml_tensor * res = ggml_cast(ctx, ggml_cast(ctx, cold, GGML_TYPE_F32), GGML_TYPE_F16);

    res = ggml_concat(ctx, res, ring, 2);

    return ggml_concat(ctx, res, ggml_reshape_4d(ctx, rows, rows->ne[0], rows->ne[1], rows->ne[2]/n_stream, n_stream), 2);
}

ggml_tensor * llama_kv_cache_mixed_context::get_k(ggml_context * ctx, int32_t il) const {
    ggml_tensor * cold = llama_kv_cache_context::get_k(ctx, il);

    if (!kv_mixed->has_ring() || kv_mixed->is_fused(il)) {
        return cold;
    }

    return merge(ctx, cold, kv_mixed->get_k_ring(ctx, il, sinfos[i_cur]), cur.at(kv_mixed->get_layer_id(il)).k);
}

ggml_tensor * llama_kv_cache_mixed_context::get_v(ggml_context * ctx, int32_t il) const {
    ggml_tensor * cold = llama_kv_cache_context::get_v(ctx, il);

    if (!kv_mixed->has_ring() || kv_mixed->is_fused(il)) {
        return cold;
    }

    return merge(ctx, cold, kv_mixed->get_v_ring(ctx, il, sinfos[i_cur]), cur.at(kv_mixed->get_layer_id(il)).v);
}

ggml_tensor * llama_kv_cache_mixed_context::build_attn(
        const llm_graph_context & graph,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * v,
        ggml_tensor * kq_b,
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
        ggml_tensor * v_mla,
              float   kq_scale,
                int   il) const {
    // models with either are refused when the context is made
    GGML_ASSERT(!kq_b && !v_mla);

    ggml_tensor * res = kv_mixed->is_fused(il) ?
        build_attn_fused(graph, q, k, v, kq_mask, sinks, kq_scale, il) :
        llama_kv_cache_context::build_attn(graph, q, k, v, kq_b, kq_mask, sinks, v_mla, kq_scale, il);

    // after the last attention that reads the slots as they were
    if (kv_mixed->has_ring() && kv_mixed->is_last_reader(il) && !kv_mixed->is_fused(il)) {
        const auto & rows = cur.at(kv_mixed->get_layer_id(il));

        ggml_build_forward_expand(graph.gf, kv_mixed->cpy_k_ring(graph.ctx0, rows.k, rows.ring_idxs, il));
        ggml_build_forward_expand(graph.gf, kv_mixed->cpy_v_ring(graph.ctx0, rows.v, rows.ring_idxs, il));
    }

    return res;
}

ggml_tensor * llama_kv_cache_mixed_context::build_attn_fused(
        const llm_graph_context & graph,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * v,
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
              float   kq_scale,
                int   il) const {
    const auto & hparams = graph.hparams;

    auto & node = kv_mixed->get_node(il);

    node.rotation_k    = fold.k;
    node.rotation_v    = fold.v;
    node.scales        = kv_mixed->is_fused() ? kv_mixed->get_scales(il) : nullptr;
    node.writes_ring   = kv_mixed->has_ring() && kv_mixed->is_last_reader(il);
    node.scale         = kq_scale;
    node.max_bias      = hparams.f_max_alibi_bias;
    node.logit_softcap = hparams.attn_soft_cap ? hparams.f_attn_logit_softcapping : 0.0f;

    ggml_context * ctx = graph.ctx0;

    cur_rows      rows;
    ggml_tensor * ring_k = nullptr;
    ggml_tensor * ring_v = nullptr;

    if (kv_mixed->has_ring()) {
        rows   = cur.at(kv_mixed->get_layer_id(il));
        ring_k = kv_mixed->get_k_ring(ctx, il, sinfos[i_cur]);
        ring_v = kv_mixed->get_v_ring(ctx, il, sinfos[i_cur]);
    }

    ggml_tensor * res = llama_kv_node_attention(ctx, node, q, k, v, ring_k, ring_v, rows.stored, rows.ring_idxs, kq_mask, sinks);

    graph.cb(res, "fattn_mixed", il);
    ggml_build_forward_expand(graph.gf, res);

    return res;
}

//
// mask
//

static constexpr ggml_fp16_t F16_NEG_INF = 0xFC00;

void llama_kv_cache_mixed_context::set_input_kq_mask(ggml_tensor * dst, const llama_ubatch * ubatch, bool causal_attn) const {
    if (!kv_mixed->has_ring()) {
        llama_kv_cache_context::set_input_kq_mask(dst, ubatch, causal_attn);
        return;
    }

    GGML_ASSERT(dst->type == GGML_TYPE_F16); // flash attention is on

    const int64_t n_kv   = get_n_kv();
    const int64_t n_mask = dst->ne[0];

    // upstream decides what is visible, in rows of n_kv columns at the front of the same memory
    ggml_tensor narrow = *dst;
    narrow.ne[0] = n_kv;
    llama_kv_cache_context::set_input_kq_mask(&narrow, ubatch, causal_attn);

    ggml_fp16_t * data = (ggml_fp16_t *) dst->data;

    for (int64_t i = dst->ne[1]*dst->ne[3] - 1; i >= 0; --i) {
        ggml_fp16_t * row = data + i*n_mask;

        memmove(row, data + i*n_kv, n_kv*sizeof(ggml_fp16_t));
        std::fill(row + n_kv, row + n_mask, F16_NEG_INF);
    }

    route_hot(dst, *ubatch);
}

// For each visible pair exactly one column stays open: the hot one where there is an F16 row, the cold one otherwise.
void llama_kv_cache_mixed_context::route_hot(ggml_tensor * mask, const llama_ubatch & ubatch) const {
    const auto & sinfo  = sinfos[i_cur];
    const auto & window = kv_mixed->get_window();

    const int64_t n_kv   = get_n_kv();
    const int64_t n_ring = kv_mixed->get_n_ring();
    const int64_t n_tps  = sinfo.size();

    for (uint32_t s = 0; s < sinfo.n_stream(); ++s) {
        const auto & cells  = kv_mixed->get_stream_cells(sinfo.strm[s]);
        const auto & owners = step->owners[s];

        for (int64_t ii = 0; ii < n_tps; ++ii) {
            const int64_t i = s*n_tps + ii;

            ggml_fp16_t * row = (ggml_fp16_t *) mask->data + i*mask->ne[0];

            const llama_pos begin = window.begin(ubatch.pos[i]);

            const auto route = [&](int64_t cell, llama_pos p, int64_t column) {
                if (row[cell] != F16_NEG_INF && window.contains(p, begin)) {
                    row[column] = row[cell];
                    row[cell]   = F16_NEG_INF;
                }
            };

            for (size_t slot = 0; slot < owners.size(); ++slot) {
                const int64_t cell = owners[slot];
                if (cell >= 0 && cell < n_kv && !cells.is_empty(cell)) {
                    route(cell, cells.pos_get(cell), n_kv + slot);
                }
            }

            for (int64_t jj = 0; jj < n_tps; ++jj) {
                route(sinfo.idxs[s][jj], ubatch.pos[s*n_tps + jj], n_kv + n_ring + jj);
            }
        }
    }
}
