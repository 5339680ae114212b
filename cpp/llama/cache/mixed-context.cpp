#include "cache/mixed-context.h"

#include "graph/guard.h"
#include "graph/in-place.h"
#include "graph/node.h"
#include "graph/query-sums.h"

#include "llama-impl.h"

#include <cmath>

// what the cache makes of them

llama_memory_context_ptr llama_kv_cache_mixed::init_full() {
    return std::make_unique<llama_kv_cache_mixed_context>(this);
}

std::unique_ptr<llama_kv_cache_context> llama_kv_cache_mixed::make_context(slot_info_vec_t sinfos, std::vector<llama_ubatch> ubatches) {
    place(sinfos, ubatches);

    return std::make_unique<llama_kv_cache_mixed_context>(this, std::move(sinfos), std::move(ubatches));
}

//
// llama_kv_cache_mixed_context
//

llama_kv_cache_mixed_context::llama_kv_cache_mixed_context(llama_kv_cache_mixed * kv) :
    llama_kv_cache_context(kv), kv_mixed(kv), hot(kv->get_hot()), basis(kv->get_basis()), readers(kv->get_readers()) {}

llama_kv_cache_mixed_context::llama_kv_cache_mixed_context(
        llama_kv_cache_mixed * kv,
        slot_info_vec_t sinfos,
        std::vector<llama_ubatch> ubatches) :
    llama_kv_cache_context(kv, std::move(sinfos), std::move(ubatches)),
    kv_mixed(kv), hot(kv->get_hot()), basis(kv->get_basis()), readers(kv->get_readers()) {}

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
    basis.update_angles(sinfo);
    kv_mixed->begin_pages(sinfo);

    if (hot.has_rows()) {
        ring_rows = hot.advance(sinfo, ubatches[i_cur]);
        hot.keep_rows(step->hot);
    }

    return true;
}

//
// graph
//

uint32_t llama_kv_cache_mixed_context::get_n_mask(const llama_ubatch & ubatch, const llama_cparams & cparams) const {
    if (!hot.has_rows()) {
        return get_n_kv();
    }

    const uint32_t n_stream = cparams.kv_unified ? 1 : ubatch.n_seqs_unq; // as build_attn_inp_kq_mask has it

    const uint32_t n = get_n_kv() + hot.get_n_rows() + ubatch.n_tokens/n_stream;

    return readers.pads_mask() ? GGML_PAD(n, llama_kv_cache_mixed::n_pad_view) : n;
}

// cosines and sines of the subtracted bias of K, for layers that are not fused
class llm_graph_input_rope_angles : public llm_graph_input_i {
public:
    llm_graph_input_rope_angles(llama_kv_row_basis & basis, ggml_tensor * cur, ggml_tensor * cells) : basis(basis), cur(cur), cells(cells) {}

    void set_input(const llama_ubatch * ubatch) override {
        basis.set_input_angles(cur, cells, *ubatch);
    }

    // the mask has the same numbers of tokens and cells, and its input looks at them
    bool can_reuse(const llm_graph_params & params) override {
        GGML_UNUSED(params);
        return true;
    }

    llama_kv_row_basis & basis;

    ggml_tensor * cur;   // F32 [n_angles, n_tokens]
    ggml_tensor * cells; // F32 [n_angles, n_kv, n_stream]
};

void llama_kv_cache_mixed_context::build_input_angles(ggml_context * ctx, const llama_ubatch & ubatch) const {
    if (const int64_t n_angles = readers.is_fused() ? 0 : basis.get_n_angles()) {
        state.angles.cur   = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_angles, ubatch.n_tokens, 1);
        state.angles.cells = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_angles, get_n_kv(), sinfos[i_cur].n_stream());

        ggml_set_input(state.angles.cur);
        ggml_set_input(state.angles.cells);
    }
}

ggml_tensor * llama_kv_cache_mixed_context::build_input_k_idxs(ggml_context * ctx, const llama_ubatch & ubatch) const {
    state = {}; // upstream asks for this input first

    build_input_angles(ctx, ubatch);

    if (basis.get_latent_rot() && readers.is_fused()) {
        state.rotation_k = state.rotation_v = basis.get_latent_rot()->ne[0];
    }

    if (!hot.has_rows()) {
        return llama_kv_cache_context::build_input_k_idxs(ctx, ubatch);
    }

    ggml_tensor * k_idxs = ggml_new_tensor_2d(ctx, GGML_TYPE_I64, ubatch.n_tokens, 2);

    ggml_set_input(k_idxs);
    ggml_set_name(k_idxs, "attn_inp_k_idxs");

    return k_idxs;
}

void llama_kv_cache_mixed_context::set_input_k_idxs(ggml_tensor * dst, const llama_ubatch * ubatch) const {
    llama_kv_cache_context::set_input_k_idxs(dst, ubatch);

    if (hot.has_rows()) {
        std::copy(ring_rows.begin(), ring_rows.end(), (int64_t *) dst->data + ubatch->n_tokens);
    }
}

ggml_tensor * llama_kv_cache_mixed_context::idxs_row(ggml_context * ctx, ggml_tensor * k_idxs, int64_t row) const {
    if (!state.idxs[row]) {
        state.idxs[row] = ggml_view_1d(ctx, k_idxs, k_idxs->ne[0], row*k_idxs->nb[1]);
    }
    return state.idxs[row];
}

// rows of the ubatch as the ring has them, or for nodes that store F16 rows of any others
static ggml_tensor * cast_cur(ggml_context * ctx, ggml_tensor * cur, bool is_stored) {
    return is_stored && ggml_is_contiguous(cur) ? cur : ggml_cast(ctx, cur, GGML_TYPE_F16);
}

// where all layers are fused their nodes do it
void llama_kv_cache_mixed_context::equalize(ggml_context * ctx, ggml_tensor *& q, ggml_tensor *& k, int32_t il) const {
    if (!readers.is_fused()) {
        basis.scale_qk(ctx, q, k, il);
    }

    // of other caches upstream does it after this
    if (ggml_tensor * rot = readers.is_fused() ? nullptr : basis.get_latent_rot()) {
        q = llama_mul_mat_hadamard(ctx, q, rot);
        k = llama_mul_mat_hadamard(ctx, k, rot);
    }
}

// the fused nodes rotate by themselves: upstream gets no matrix, and so leaves the rotation out of its graph
ggml_tensor * llama_kv_cache_mixed_context::build_input_k_rot(ggml_context * ctx) const {
    ggml_tensor * rot = llama_kv_cache_context::build_input_k_rot(ctx);

    return rot && readers.is_fused() ? (state.rotation_k = rot->ne[0], nullptr) : rot;
}

ggml_tensor * llama_kv_cache_mixed_context::build_input_v_rot(ggml_context * ctx) const {
    ggml_tensor * rot = llama_kv_cache_context::build_input_v_rot(ctx);

    return rot && readers.is_fused() ? (state.rotation_v = rot->ne[0], nullptr) : rot;
}

ggml_tensor * llama_kv_cache_mixed_context::cpy_k(ggml_context * ctx, ggml_tensor * k_cur, ggml_tensor * k_idxs, int32_t il) const {
    if (readers.is_fused(il)) {
        state.cur[il].k         = k_cur;
        state.cur[il].k_idxs    = k_idxs;
        state.cur[il].ring_idxs = hot.has_rows() ? idxs_row(ctx, k_idxs, 1) : nullptr;

        // else stored together with V
        return readers.is_latent(il) ? store_fused(ctx, nullptr, nullptr, il) : k_cur;
    }

    ggml_tensor * subtracted_bias = state.angles.cur ? basis.build_subtracted_bias(ctx, state.angles.cur, il) : nullptr;
    ggml_tensor * cold    = subtracted_bias ? ggml_sub(ctx, k_cur, subtracted_bias) : k_cur;

    if (!hot.has_rows()) {
        return llama_kv_cache_context::cpy_k(ctx, cold, k_idxs, il);
    }

    // rounded as the ring rounds: a key reads the same in its own ubatch and in the next
    state.cur[il].k         = cast_cur(ctx, k_cur, readers.gathers_k(il) && !readers.is_in_place(il));
    state.cur[il].ring_idxs = idxs_row(ctx, k_idxs, 1);

    return llama_kv_cache_context::cpy_k(ctx, cold, idxs_row(ctx, k_idxs, 0), il);
}

llama_kv_node & llama_kv_cache_mixed_context::get_node(int32_t il) const {
    auto & node = kv_mixed->get_node(il);

    node.rotation_k = state.rotation_k;
    node.rotation_v = state.rotation_v;
    node.scales     = readers.is_fused() ? basis.get_scales(il) : nullptr;
    node.pairs      = readers.is_fused() ? basis.get_pairs(il) : nullptr;
    node.pages      = kv_mixed->get_pages(il);
    node.all_pages  = &kv_mixed->get_all_pages();
    node.on_device  = readers.is_on_device(il);
    node.scale_k    = node.on_device && node.scales ? basis.get_scale_k(il) : nullptr;
    node.scale_q    = node.on_device && node.scales ? basis.get_scale_q(il) : nullptr;

    return node;
}

ggml_backend_t llama_kv_cache_mixed_context::find_backend(const llm_graph_context & graph, int32_t il) const {
    for (int i = 0; i < ggml_backend_sched_get_n_backends(graph.sched); ++i) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(graph.sched, i);
        if (ggml_backend_get_device(backend) == readers.get_device(il)) {
            return backend;
        }
    }
    return nullptr; // the scheduler chooses
}

ggml_tensor * llama_kv_cache_mixed_context::store_fused(ggml_context * ctx, ggml_tensor * v_cur, ggml_tensor * v_idxs, int32_t il) const {
    auto & rows = state.cur[il];
    auto & node = get_node(il);

    llama_kv_guard(rows.k, "a graph stores K of a layer and then V");

    node.has_ring = hot.has_rows();

    llama_kv_store_inputs in;
    in.k = { rows.k, llama_kv_cache_context::get_k(ctx, il)->view_src, rows.k_idxs };
    if (v_cur) {
        in.v = { v_cur, llama_kv_cache_context::get_v(ctx, il)->view_src, v_idxs };
    }

    for (const ggml_tensor * cold : llama_kv_tensors(in.k.cold, in.v.cold)) {
        llama_kv_guard(cold && cold->ne[1] == kv_mixed->get_size(), "what a graph reads of the cache are views of all its rows");
    }

    rows.stored = llama_kv_node_store(ctx, node, in);

    return rows.stored;
}

ggml_tensor * llama_kv_cache_mixed_context::cpy_v(ggml_context * ctx, ggml_tensor * v_cur, ggml_tensor * v_idxs, int32_t il) const {
    if (readers.is_fused(il)) {
        return store_fused(ctx, v_cur, v_idxs, il);
    }

    if (hot.has_rows()) {
        state.cur[il].v = cast_cur(ctx, v_cur, readers.gathers_v(il) && !readers.is_in_place(il));
    }

    return llama_kv_cache_context::cpy_v(ctx, v_cur, v_idxs, il);
}

const llama_kv_cache_mixed_context::cur_rows & llama_kv_cache_mixed_context::get_cur(int32_t il) const {
    const auto rows = state.cur.find(readers.get_layer_id(il));

    llama_kv_guard(rows != state.cur.end() && (rows->second.stored || (rows->second.k && (rows->second.v || readers.is_latent(il)))),
            "a graph stores the rows of a layer before it reads them");

    return rows->second;
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
    llama_kv_guard(!kq_b && (!v_mla || readers.is_latent(il)), "no bias reaches attention, and values are compressed in a latent cache alone");
    llama_kv_guard_mask(kq_mask, get_n_mask(graph.ubatch, graph.cparams), q->ne[2]);

    // the first layer that needs them
    if (state.angles.cur && !state.angles.added && basis.get_pairs(il)) {
        graph.res->add_input(std::make_unique<llm_graph_input_rope_angles>(basis, state.angles.cur, state.angles.cells));
        state.angles.added = true;
    }

    pin_gathered(graph, il);

    if (readers.is_fused(il)) {
        llama_kv_sum_queries(graph, *kv_mixed, q, il);
    }

    ggml_tensor * res =
        readers.is_fused(il)    ? build_attn_fused   (graph, q, k, v, kq_mask, sinks, kq_scale, il) :
        readers.is_in_place(il) ? build_attn_in_place(graph, q, k, v, kq_mask, sinks, kq_scale, il) :
        llama_kv_cache_context::build_attn(graph, q, k, v, kq_b, kq_mask, sinks, nullptr, kq_scale, il);

    if (readers.is_latent(il)) {
        res = expand(graph.ctx0, res, v_mla, q->ne[1]);
        ggml_build_forward_expand(graph.gf, res);
    }

    // after the last attention that reads the slots as they were
    if (hot.has_rows() && readers.is_last_reader(il) && !readers.is_fused(il)) {
        const auto & rows = get_cur(il);

        ggml_build_forward_expand(graph.gf, hot.cpy_k(graph.ctx0, rows.k, rows.ring_idxs, il));
        if (rows.v) {
            ggml_build_forward_expand(graph.gf, hot.cpy_v(graph.ctx0, rows.v, rows.ring_idxs, il));
        }
    }

    return res;
}

ggml_tensor * llama_kv_cache_mixed_context::expand(ggml_context * ctx, ggml_tensor * res, ggml_tensor * v_mla, int64_t n_head) const {
    if (basis.get_latent_rot() && !readers.is_fused()) {
        res = llama_mul_mat_hadamard(ctx, res, basis.get_latent_rot());
    }
    if (v_mla) {
        res = ggml_reshape_3d(ctx, res, res->ne[0]/n_head, n_head, res->ne[1]);
        res = ggml_mul_mat(ctx, v_mla, ggml_permute(ctx, res, 0, 2, 1, 3));
        res = ggml_permute(ctx, res, 0, 2, 1, 3);
        res = ggml_cont_2d(ctx, res, res->ne[0]*res->ne[1], res->ne[2]);
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

    auto & node = get_node(il);

    node.is_latent     = readers.is_latent(il);
    node.is_deep       = uint32_t(il) >= hparams.n_layer()/2;
    node.most_splits   = (kv_mixed->get_all_pages().empty() ? kv_mixed->get_cold_splits().most : 0) + (hot.has_rows() ? kv_mixed->get_hot_splits(q->ne[2]).most : 0);
    node.writes_ring   = hot.has_rows() && readers.is_last_reader(il);
    node.scale         = kq_scale;
    node.max_bias      = hparams.f_max_alibi_bias;
    node.logit_softcap = hparams.attn_soft_cap ? hparams.f_attn_logit_softcapping : 0.0f;

    ggml_context * ctx = graph.ctx0;

    llama_kv_attention_inputs in;
    in.q      = q;
    in.cold_k = k;
    in.cold_v = v;
    in.mask   = kq_mask;
    in.sinks  = sinks;

    if (hot.has_rows()) {
        in.cur    = get_cur(il).stored;
        in.idxs   = get_cur(il).ring_idxs;
        in.ring_k = hot.get_k(ctx, il, sinfos[i_cur]);
        in.ring_v = hot.get_v(ctx, il, sinfos[i_cur]);
    }

    ggml_tensor * choice = nullptr;
    ggml_tensor * res    = llama_kv_node_attention(ctx, node, in, &choice);

    // the nodes call functions of this process, and a backend that computes elsewhere (RPC) takes any node
    ggml_backend_t backend = node.on_device ? find_backend(graph, il) : graph.backend_cpu;
    for (ggml_tensor * cur : { get_cur(il).stored, choice, res }) {
        if (cur) {
            ggml_backend_sched_set_tensor_backend(graph.sched, cur, backend);
        }
    }

    graph.cb(res, "fattn_mixed", il);
    ggml_build_forward_expand(graph.gf, res);

    return res;
}

ggml_tensor * llama_kv_cache_mixed_context::build_attn_in_place(
        const llm_graph_context & graph,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * v,
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
              float   kq_scale,
                int   il) const {
    const auto & hparams = graph.hparams;

    ggml_context * ctx = graph.ctx0;

    const int64_t n_queries = llama_kv_in_place_queries(kq_mask->ne[1], kq_mask->ne[0], k->ne[3], q->ne[1], v->ne[0]);

    auto & masks = state.parted_masks[n_queries];
    if (masks.empty()) {
        masks = llama_kv_in_place_masks(ctx, kq_mask, get_n_kv(), hot.get_n_rows(), n_queries);
    }

    llama_kv_in_place_inputs in;
    in.q      = q;
    in.cold_k = k;
    in.cold_v = v;
    in.ring_k = hot.get_k(ctx, il, sinfos[i_cur]);
    in.ring_v = hot.get_v(ctx, il, sinfos[i_cur]);
    in.cur_k  = get_cur(il).k;
    in.cur_v  = get_cur(il).v;
    in.sinks  = sinks;
    in.masks  = masks;

    in.scale         = kq_scale;
    in.max_bias      = hparams.f_max_alibi_bias;
    in.logit_softcap = hparams.attn_soft_cap ? hparams.f_attn_logit_softcapping : 0.0f;

    std::vector<ggml_tensor *> nodes;
    ggml_tensor *  res     = llama_kv_in_place_attention(ctx, in, nodes);
    ggml_backend_t backend = find_backend(graph, il);
    for (ggml_tensor * node : nodes) {
        if (backend) {
            ggml_backend_sched_set_tensor_backend(graph.sched, node, backend);
        }
    }
    res = ggml_reshape_2d(ctx, res, res->ne[0]*res->ne[1], q->ne[2]);

    graph.cb(res, "fattn_mixed", il);
    ggml_build_forward_expand(graph.gf, res);

    return res;
}
