// The nodes of a layer on CUDA: what they are given as tensors becomes problems for the kernels.

#include "cuda_device.h"
#include "ggml_nodes.h"
#include "launch.h"
#include "node_params.h"

#include <optional>

using namespace mixedkv::cuda;

namespace mixedkv {
namespace cuda {

#define MIXEDKV_HEADS(d)                                                                                      \
    extern template void run_attention<cuda_device, d>(cuda_device &, const attention_problem &, stored_type, \
                                                       stored_type);                                          \
    extern template void run_store<cuda_device, d>(cuda_device &, const store_problem &, stored_type, stored_type);
MIXEDKV_HEADS(64)
MIXEDKV_HEADS(96)
MIXEDKV_HEADS(128)
MIXEDKV_HEADS(256)

} // namespace cuda
} // namespace mixedkv

// Calls f(d as a constant) where there are kernels for such heads; false: there are none.
template <class F>
static bool with_head_size(int64_t d, F && f) {
    switch (d) {
    case 64:
        f(std::integral_constant<int, 64>());
        return true;
    case 96:
        f(std::integral_constant<int, 96>());
        return true;
    case 128:
        f(std::integral_constant<int, 128>());
        return true;
    case 256:
        f(std::integral_constant<int, 256>());
        return true;
    default:
        return false;
    }
}

// Of the types that heads of d can have
static std::optional<stored_type> find_stored(const ggml_tensor * rows, int64_t d) {
    static const std::pair<int, stored_type> all[] = {
        { GGML_TYPE_F16, stored_type::f16 },   { GGML_TYPE_Q8_0, stored_type::q8_0 },
        { GGML_TYPE_Q5_0, stored_type::q5_0 }, { GGML_TYPE_Q4_0, stored_type::q4_0 },
        { LM4_TYPE, stored_type::lm4 },        { TC3_TYPE, stored_type::tc3 },
    };
    for (const auto & [type, stored] : all) {
        if (rows && int(rows->type) == type && d % block_elements(stored) == 0) {
            return stored;
        }
    }
    return std::nullopt;
}

static stored_type to_stored(const ggml_tensor * rows) {
    return *find_stored(rows, 64);
}

static bool has_levels(const ggml_tensor * rows) {
    return rows->type == LM4_TYPE || rows->type == TC3_TYPE;
}

// t: [n_embd_head, n_head_kv, n_rows, n_stream]
static row_view to_view(const ggml_tensor * t) {
    row_view res;
    res.data   = static_cast<const char *>(t->data);
    res.head   = int64_t(t->nb[1]);
    res.row    = int64_t(t->nb[2]);
    res.stream = int64_t(t->nb[3]);
    return res;
}

static attention_problem to_attention(const ggml_tensor * node, const node_params & params) {
    const ggml_tensor * const * src = node->src;

    const ggml_tensor *q = src[0], *cold_k = src[1], *cold_v = src[2], *mask = src[3];
    int                next = 4;

    attention_problem p;
    p.n_stream  = int(cold_k->ne[3]);
    p.n_head    = int(q->ne[1]);
    p.n_head_kv = int(cold_k->ne[1]);
    p.n_tokens  = int(q->ne[2]) / p.n_stream;

    p.q       = static_cast<const char *>(q->data);
    p.q_head  = int64_t(q->nb[1]);
    p.q_token = int64_t(q->nb[2]);

    p.cold = { to_view(cold_k), to_view(cold_v), int(cold_k->ne[2]) };
    if (params.has_ring) {
        const ggml_tensor *ring_k = src[next], *ring_v = src[next + 1], *cur = src[next + 2], *idxs = src[next + 3];
        next += 4;
        p.ring = { to_view(ring_k), to_view(ring_v), int(ring_k->ne[2]) };

        row_view rows;
        rows.data   = static_cast<const char *>(cur->data);
        rows.row    = int64_t(cur->nb[1]);
        rows.stream = p.n_tokens * rows.row;
        rows.head   = cold_k->ne[0] * int64_t(sizeof(ggml_fp16_t));
        p.current   = { rows, rows, p.n_tokens };
        p.current.v.data += p.n_head_kv * rows.head;

        if (params.writes_ring) {
            p.ring_rows      = static_cast<const int64_t *>(idxs->data);
            p.first_ring_row = int64_t(ring_k->view_offs / ring_k->nb[2]);
        }
    }
    p.sinks   = params.has_sinks ? static_cast<const float *>(src[next++]->data) : nullptr;
    p.scale_q = params.has_scales ? static_cast<const float *>(src[next++]->data) : nullptr;

    p.mask          = static_cast<const uint16_t *>(mask->data);
    p.mask_token    = int64_t(mask->nb[1] / sizeof(ggml_fp16_t));
    p.mask_stream   = int64_t(mask->nb[3] / sizeof(ggml_fp16_t));
    p.first_hot_key = p.cold.n;

    p.rotation_q     = params.rotation_k;
    p.rotation_v     = params.rotation_v;
    p.scale          = params.scale;
    p.max_alibi_bias = params.max_bias;
    p.logit_softcap  = params.logit_softcap;
    p.out            = static_cast<float *>(node->data);
    return p;
}

static store_rows to_store(const ggml_tensor * cur, const ggml_tensor * cold, const ggml_tensor * idxs, int rotation) {
    store_rows res;
    res.from       = static_cast<const char *>(cur->data);
    res.from_head  = int64_t(cur->nb[1]);
    res.from_token = int64_t(cur->nb[2]);
    res.rotation   = rotation;
    res.cold       = static_cast<char *>(cold->data);
    res.cold_row   = int64_t(cold->nb[1]);
    res.cold_rows  = static_cast<const int64_t *>(idxs->data);
    return res;
}

static void attend(ggml_backend_cuda_context & ctx, ggml_tensor * node, const node_params & params) {
    const auto &      info   = ggml_cuda_info().devices[ctx.device];
    attention_problem p      = to_attention(node, params);
    const int         d      = int(node->src[1]->ne[0]);
    const stored_type type_k = to_stored(node->src[1]), type_v = to_stored(node->src[2]);

    device_size size;
    size.n_processors      = info.nsm;
    size.blocks_of_decode  = d > 128 || (type_k == stored_type::f16 && type_v == stored_type::f16) ? 1 : 2;
    size.blocks_of_prefill = d > 128 || info.smpbo < 200 * 1024 ? 1 : 2;
    with_head_size(
        d, [&](auto size_of_head) { plan_splits(p, size, usual_prefill<decltype(size_of_head)::value>::rows); });

    ggml_cuda_pool_alloc<float> sums(ctx.pool(), sums_floats(p, d));
    ggml_cuda_pool_alloc<float> weights(ctx.pool(), weights_floats(p));
    p.sums    = sums.get();
    p.weights = weights.get();

    cuda_device device{ ctx.stream() };
    with_head_size(d, [&](auto size) { run_attention<cuda_device, decltype(size)::value>(device, p, type_k, type_v); });
}

static void store(ggml_backend_cuda_context & ctx, ggml_tensor * node, const node_params & params) {
    const ggml_tensor * const * src = node->src;

    store_problem p;
    p.n_tokens  = int(src[0]->ne[2]);
    p.n_head_kv = int(src[0]->ne[1]);
    p.k         = to_store(src[0], src[2], src[4], params.rotation_k);
    p.v         = to_store(src[1], src[3], src[5], params.rotation_v);
    p.k.scale   = params.has_scales ? static_cast<const float *>(src[6]->data) : nullptr;
    p.f16       = params.has_ring ? static_cast<uint16_t *>(node->data) : nullptr;

    cuda_device device{ ctx.stream() };
    with_head_size(src[0]->ne[0], [&](auto size) {
        run_store<cuda_device, decltype(size)::value>(device, p, to_stored(src[2]), to_stored(src[3]));
    });
}

// The shared memory that the largest kernels for these heads take
static size_t most_shared_bytes(int64_t d, int64_t group) {
    size_t res = 0;
    with_head_size(d, [&](auto size) {
        constexpr int n = decltype(size)::value;
        res             = std::max(size_t(prefill_layout<n, usual_prefill<n>>::bytes(int(group))),
                                   size_t(decode_layout<f16_rows, f16_rows, n, n, 1>::bytes));
    });
    return res;
}

// ggml's own nodes over rows of lm4 or tc3: those that get some, make F32 of a view of heads, and set some
static bool gets_levels(const ggml_tensor * node) {
    return node->op == GGML_OP_GET_ROWS && has_levels(node->src[0]) && node->src[0]->ne[3] == 1 &&
           node->src[1]->type == GGML_TYPE_I32 && (node->type == GGML_TYPE_F32 || node->type == GGML_TYPE_F16);
}

static bool casts_levels(const ggml_tensor * node) {
    return node->op == GGML_OP_CPY && has_levels(node->src[0]) && node->type == GGML_TYPE_F32 &&
           ggml_is_contiguous(node) && ggml_are_same_shape(node, node->src[0]) &&
           node->src[0]->nb[1] == ggml_row_size(node->src[0]->type, node->ne[0]);
}

static bool sets_levels(const ggml_tensor * node) {
    return node->op == GGML_OP_SET_ROWS && has_levels(node) && node->ne[2] == 1 && node->ne[3] == 1 &&
           node->src[0]->type == GGML_TYPE_F32 && node->src[0]->nb[0] == sizeof(float) &&
           (node->src[1]->type == GGML_TYPE_I32 || node->src[1]->type == GGML_TYPE_I64);
}

// [n_embd, n_rows, n_stream], or with heads: [n_embd_head, n_head, n_rows, n_stream]
static row_view to_rows(const ggml_tensor * t, bool with_heads) {
    row_view res;
    res.data   = static_cast<const char *>(t->data);
    res.row    = int64_t(t->nb[1 + with_heads]);
    res.stream = int64_t(t->nb[2 + with_heads]);
    return res;
}

static void convert(ggml_backend_cuda_context & ctx, const ggml_tensor * node) {
    const bool          sets = sets_levels(node), casts = casts_levels(node);
    const ggml_tensor * plain  = sets ? node->src[0] : node;
    const ggml_tensor * stored = sets ? node : node->src[0];

    convert_problem p;
    p.n_elements = int(casts ? node->ne[0] * node->ne[1] : node->ne[0]);
    p.n_rows     = int(plain->ne[1 + casts]);
    p.n_stream   = int(plain->ne[2 + casts]);
    p.stored     = to_rows(stored, casts);
    p.plain      = to_rows(plain, casts);
    p.to_f16     = node->type == GGML_TYPE_F16;
    if (!casts) {
        const ggml_tensor * numbers = node->src[1];
        p.numbers                   = { static_cast<const char *>(numbers->data), numbers->type == GGML_TYPE_I64,
                                        int64_t(numbers->nb[1] / ggml_type_size(numbers->type)) };
    }

    cuda_device device{ ctx.stream() };
    sets ? run_set(device, p, to_stored(stored)) : run_get(device, p, to_stored(stored));
}

static bool is_own(const ggml_tensor * node) {
    return node->op == GGML_OP_CUSTOM && get_node_params(node->op_params).magic == node_params::magic_number;
}

bool mixedkv_cuda_supports(int device, const ggml_tensor * node) {
    if (!is_own(node)) {
        return gets_levels(node) || casts_levels(node) || sets_levels(node);
    }
    const node_params   params = get_node_params(node->op_params);
    const auto &        info   = ggml_cuda_info().devices[device];
    const bool          att    = params.is_attention;
    // tensors of K and V as they are stored: heads of the same size
    const ggml_tensor * k = att ? node->src[1] : node->src[2], *v = att ? node->src[2] : node->src[3];
    const ggml_tensor * heads = att ? node->src[1] : node->src[0];
    const int64_t       d     = heads->ne[0];
    const int64_t       d_v   = att ? node->src[2]->ne[0] : node->src[1] ? node->src[1]->ne[0] : 0;
    return info.cc >= GGML_CUDA_CC_AMPERE && find_stored(k, d) && find_stored(v, d) && d == d_v &&
           with_head_size(d, [](auto) {}) &&
           (!att || most_shared_bytes(d, node->src[0]->ne[1] / heads->ne[1]) <= info.smpbo);
}

bool mixedkv_cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node) {
    if (is_own(node)) {
        const node_params params = get_node_params(node->op_params);
        params.is_attention ? attend(ctx, node, params) : store(ctx, node, params);
    } else if (gets_levels(node) || casts_levels(node) || sets_levels(node)) {
        convert(ctx, node);
    } else {
        return false;
    }
    CUDA_CHECK(cudaGetLastError());
    return true;
}
