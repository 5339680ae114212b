#include "graph/in-place.h"

#include "graph/guard.h"

#include "attention/vulkan/node_params.h"

#include "ggml-cpp.h"

#include <string>

using namespace mixedkv::vulkan;

static_assert(n_sources < GGML_MAX_SRC, "ggml_custom_4d takes one source less than a node has");

static void compute_elsewhere(ggml_tensor *, int, int, void *) {
    GGML_ABORT("attention that a Vulkan device reads in place was given to the CPU");
}

ggml_tensor * llama_kv_in_place_attention(ggml_context * ctx, const llama_kv_in_place_inputs & in) {
    const int64_t n_stream = in.cold_k->ne[3];
    const int64_t n_tps    = in.q->ne[2]/n_stream;

    const auto permuted = [&](ggml_tensor * rows) { return ggml_permute(ctx, rows, 0, 2, 1, 3); };
    const auto split    = [&](ggml_tensor * rows) {
        return permuted(ggml_view_4d(ctx, rows, rows->ne[0], rows->ne[1], n_tps, n_stream, rows->nb[1], rows->nb[2], n_tps*rows->nb[2], 0));
    };

    ggml_tensor * srcs[n_sources] = {};
    srcs[src_q]      = split(in.q);
    srcs[src_cold_k] = permuted(in.cold_k);
    srcs[src_cold_v] = permuted(in.cold_v);
    srcs[src_mask]   = in.mask;
    srcs[src_sinks]  = in.sinks;
    srcs[src_ring_k] = permuted(in.ring_k);
    srcs[src_ring_v] = permuted(in.ring_v);
    srcs[src_cur_k]  = split(in.cur_k);
    srcs[src_cur_v]  = split(in.cur_v);

    llama_kv_guard(in.mask->ne[0] == first_mask(srcs, n_keys - 1) + in.cold_k->ne[2]*n_tps*n_stream, "a mask has a part for each tensor of rows");

    ggml_tensor * res = ggml_custom_4d(ctx, GGML_TYPE_F32, in.cold_v->ne[0], in.q->ne[1], n_tps, n_stream,
            srcs, n_sources, compute_elsewhere, 1, nullptr);

    mixedkv::cuda::node_params params;
    params.magic         = magic_number;
    params.is_attention  = true;
    params.scale         = in.scale;
    params.max_bias      = in.max_bias;
    params.logit_softcap = in.logit_softcap;
    mixedkv::cuda::set_node_params(res->op_params, params);

    return res;
}

ggml_tensor * llama_kv_in_place_mask(ggml_context * ctx, ggml_tensor * mask, int64_t n_kv, int64_t n_ring) {
    const int64_t n_rows = mask->ne[1]*mask->ne[3];

    const auto part = [&](int64_t first, int64_t n) {
        ggml_tensor * columns = ggml_view_4d(ctx, mask, n, mask->ne[1], 1, mask->ne[3], mask->nb[1], mask->nb[2], mask->nb[3], first*mask->nb[0]);
        ggml_tensor * res     = ggml_reshape_1d(ctx, ggml_cont(ctx, columns), n*n_rows);

        const int64_t n_pad = GGML_PAD(n*n_rows, mask_align) - n*n_rows;
        return n_pad == 0 || first == 0 ? res : ggml_concat(ctx, res, ggml_view_1d(ctx, mask, n_pad, 0), 0);
    };

    // in the order of mixedkv::vulkan::keys
    ggml_tensor * hot = ggml_concat(ctx, part(n_kv, n_ring), part(n_kv + n_ring, mask->ne[1]), 0);
    return ggml_concat(ctx, hot, part(0, n_kv), 0);
}

bool llama_kv_in_place_runs_on(
        ggml_backend_dev_t dev,
        ggml_tensor * cold_k, ggml_tensor * cold_v,
        int64_t n_embd_head_k, int64_t n_embd_head_v,
        int64_t n_head, int64_t n_head_kv) {
    // a backend that computes elsewhere (RPC) says of any node that it can
    ggml_backend_reg_t reg = dev ? ggml_backend_dev_backend_reg(dev) : nullptr;
    if (!reg || std::string(ggml_backend_reg_name(reg)) != "Vulkan") {
        return false;
    }

    ggml_context_ptr ctx_ptr(ggml_init({ 64*ggml_tensor_overhead(), nullptr, true }));
    ggml_context *   ctx = ctx_ptr.get();

    const auto heads = [&](ggml_tensor * rows, int64_t n_embd_head) {
        return ggml_view_4d(ctx, rows, n_embd_head, n_head_kv, rows->ne[1], 1, ggml_row_size(rows->type, n_embd_head), rows->nb[1], rows->nb[2], 0);
    };
    const auto f16 = [&](int64_t n_embd_head, int64_t n) { return ggml_new_tensor_3d(ctx, GGML_TYPE_F16, n_embd_head, n_head_kv, n); };

    llama_kv_in_place_inputs in;
    in.q      = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_embd_head_k, n_head, 1);
    in.cold_k = heads(cold_k, n_embd_head_k);
    in.cold_v = heads(cold_v, n_embd_head_v);
    in.ring_k = f16(n_embd_head_k, 8);
    in.ring_v = f16(n_embd_head_v, 8);
    in.cur_k  = f16(n_embd_head_k, 1);
    in.cur_v  = f16(n_embd_head_v, 1);
    in.sinks  = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_head);
    in.mask   = llama_kv_in_place_mask(ctx, ggml_new_tensor_2d(ctx, GGML_TYPE_F16, cold_k->ne[1] + 8 + 1, 1), cold_k->ne[1], 8);

    return ggml_backend_dev_supports_op(dev, llama_kv_in_place_attention(ctx, in));
}
