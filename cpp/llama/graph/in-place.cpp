#include "graph/in-place.h"

#include "graph/guard.h"

#include "attention/vulkan/node_params.h"

#include "ggml-cpp.h"

#include <algorithm>
#include <stdexcept>
#include <string>

using namespace mixedkv::vulkan;

// Each takes four nodes of the 50 that a layer has for its cache (llama_kv_mixed_nodes).
static constexpr int64_t most_cuts = 8;

static_assert(n_sources < GGML_MAX_SRC, "ggml_custom_4d takes one source less than a node has");

static void compute_elsewhere(ggml_tensor *, int, int, void *) {
    GGML_ABORT("attention that a Vulkan device reads in place was given to the CPU");
}

// Tokens first to first + n of each stream, of tensors with all tokens of the ubatch
static ggml_tensor * tokens(ggml_context * ctx, ggml_tensor * rows, int64_t n_stream, int64_t first, int64_t n) {
    const int64_t n_tps = rows->ne[2]/n_stream;

    return ggml_permute(ctx, ggml_view_4d(ctx, rows, rows->ne[0], rows->ne[1], n, n_stream,
            rows->nb[1], rows->nb[2], n_tps*rows->nb[2], first*rows->nb[2]), 0, 2, 1, 3);
}

// Attention of the queries that `mask` covers; rows: the sources that all queries share
static ggml_tensor * attend(ggml_context * ctx, const llama_kv_in_place_inputs & in, ggml_tensor * const * rows, const llama_kv_in_place_mask & mask) {
    const int64_t n_stream = in.cold_k->ne[3];

    ggml_tensor * srcs[n_sources];
    std::copy_n(rows, n_sources, srcs);
    srcs[src_q]    = tokens(ctx, in.q, n_stream, mask.first, mask.n);
    srcs[src_mask] = mask.parts;

    llama_kv_guard(mask.parts->ne[0] == first_mask(srcs, n_row_groups - 1) + in.cold_k->ne[2]*mask.n*n_stream, "a mask has a part for each tensor of rows");

    ggml_tensor * res = ggml_custom_4d(ctx, GGML_TYPE_F32, in.cold_v->ne[0], in.q->ne[1], mask.n, n_stream,
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

ggml_tensor * llama_kv_in_place_attention(ggml_context * ctx, const llama_kv_in_place_inputs & in, std::vector<ggml_tensor *> & nodes) {
    llama_kv_guard(!in.masks.empty() && (in.masks.back().first + in.masks.back().n)*in.cold_k->ne[3] == in.q->ne[2], "each query has a mask");

    const int64_t n_stream = in.cold_k->ne[3];
    const int64_t n_tps    = in.q->ne[2]/n_stream;

    const auto permuted = [&](ggml_tensor * rows) { return ggml_permute(ctx, rows, 0, 2, 1, 3); };

    ggml_tensor * rows[n_sources] = {};
    rows[src_cold_k] = permuted(in.cold_k);
    rows[src_cold_v] = permuted(in.cold_v);
    rows[src_sinks]  = in.sinks;
    rows[src_ring_k] = permuted(in.ring_k);
    rows[src_ring_v] = permuted(in.ring_v);
    rows[src_cur_k]  = tokens(ctx, in.cur_k, n_stream, 0, n_tps);
    rows[src_cur_v]  = tokens(ctx, in.cur_v, n_stream, 0, n_tps);

    ggml_tensor * res = nullptr;
    for (const auto & mask : in.masks) {
        nodes.push_back(attend(ctx, in, rows, mask));
        res = res ? ggml_concat(ctx, res, nodes.back(), 2) : nodes.back();
    }
    return res;
}

int64_t llama_kv_in_place_queries(int64_t n_tps, int64_t n_keys, int64_t n_stream, int64_t n_head, int64_t n_embd_head_v) {
    // each split keeps O, L and M of a query in F32; where there are many queries, each tensor of rows is one split
    const int64_t split_bytes = int64_t(sizeof(float))*(n_embd_head_v + 2)*n_head*n_row_groups;
    const int64_t mask_bytes  = int64_t(sizeof(ggml_fp16_t))*n_keys;

    const int64_t n_fits = most_bytes/(std::max(split_bytes, mask_bytes)*n_stream);
    if (n_tps <= n_fits) {
        return n_tps;
    }

    // the parts of a mask begin where any device can bind a buffer
    const int64_t res = n_fits/mask_align*mask_align;
    if (res == 0 || (n_tps + res - 1)/res > most_cuts) {
        throw std::runtime_error("a ubatch of " + std::to_string(n_tps) + " tokens over " + std::to_string(n_keys) + " rows in each of " +
                std::to_string(n_stream) + " streams is more than a Vulkan device need bind in place: use a smaller n_ubatch, or unset MIXEDKV_IN_PLACE");
    }
    return res;
}

static ggml_tensor * cut_mask(ggml_context * ctx, ggml_tensor * mask, int64_t n_kv, int64_t n_ring, int64_t n_cur) {
    const int64_t n_rows = mask->ne[1]*mask->ne[3];

    const auto part = [&](int64_t first, int64_t n) {
        ggml_tensor * columns = ggml_view_4d(ctx, mask, n, mask->ne[1], 1, mask->ne[3], mask->nb[1], mask->nb[2], mask->nb[3], first*mask->nb[0]);
        ggml_tensor * res     = ggml_reshape_1d(ctx, ggml_cont(ctx, columns), n*n_rows);

        const int64_t n_pad = GGML_PAD(n*n_rows, mask_align) - n*n_rows;
        return n_pad == 0 || first == 0 ? res : ggml_concat(ctx, res, ggml_view_1d(ctx, mask, n_pad, 0), 0);
    };

    // in the order of mixedkv::vulkan::keys
    ggml_tensor * hot = ggml_concat(ctx, part(n_kv, n_ring), part(n_kv + n_ring, n_cur), 0);
    return ggml_concat(ctx, hot, part(0, n_kv), 0);
}

std::vector<llama_kv_in_place_mask> llama_kv_in_place_masks(
        ggml_context * ctx, ggml_tensor * mask, int64_t n_kv, int64_t n_ring, int64_t n_queries) {
    const int64_t n_tps = mask->ne[1];

    std::vector<llama_kv_in_place_mask> res;
    for (int64_t first = 0; first < n_tps; first += n_queries) {
        const int64_t n    = std::min(n_queries, n_tps - first);
        ggml_tensor * rows = ggml_view_4d(ctx, mask, mask->ne[0], n, 1, mask->ne[3], mask->nb[1], mask->nb[2], mask->nb[3], first*mask->nb[1]);
        res.push_back({ first, n, cut_mask(ctx, rows, n_kv, n_ring, n_tps) });
    }
    return res;
}

bool llama_kv_in_place_runs_on(ggml_backend_dev_t dev, const llama_kv_layer_shape & layer, int64_t kv_size) {
    // a backend that computes elsewhere (RPC) says of any node that it can
    ggml_backend_reg_t reg = dev ? ggml_backend_dev_backend_reg(dev) : nullptr;
    if (!reg || std::string(ggml_backend_reg_name(reg)) != "Vulkan") {
        return false;
    }

    ggml_context_ptr ctx_ptr(ggml_init({ 64*ggml_tensor_overhead(), nullptr, true }));
    ggml_context *   ctx = ctx_ptr.get();

    const auto heads = [&](ggml_type type, int64_t n_embd_head, int64_t n) {
        ggml_tensor * rows = ggml_new_tensor_2d(ctx, type, n_embd_head*layer.n_head_kv, n);
        return ggml_view_4d(ctx, rows, n_embd_head, layer.n_head_kv, n, 1, ggml_row_size(type, n_embd_head), rows->nb[1], rows->nb[2], 0);
    };
    constexpr int64_t n_ring = 8;

    llama_kv_in_place_inputs in;
    in.q      = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, layer.n_embd_head_k, layer.n_head, 1);
    in.cold_k = heads(layer.type_k, layer.n_embd_head_k, kv_size);
    in.cold_v = heads(layer.type_v, layer.n_embd_head_v, kv_size);
    in.ring_k = heads(GGML_TYPE_F16, layer.n_embd_head_k, n_ring);
    in.ring_v = heads(GGML_TYPE_F16, layer.n_embd_head_v, n_ring);
    in.cur_k  = heads(GGML_TYPE_F16, layer.n_embd_head_k, 1);
    in.cur_v  = heads(GGML_TYPE_F16, layer.n_embd_head_v, 1);
    in.sinks  = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, layer.n_head);
    in.masks  = llama_kv_in_place_masks(ctx, ggml_new_tensor_2d(ctx, GGML_TYPE_F16, kv_size + n_ring + 1, 1), kv_size, n_ring, 1);

    std::vector<ggml_tensor *> nodes;
    return ggml_backend_dev_supports_op(dev, llama_kv_in_place_attention(ctx, in, nodes));
}
