#include "llama-kv-node.h"

#include "attention/attention.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>

// Beyond the largest F16 number lies an infinite row of the ring, and an infinite scale in most cold types. A product with
// it is NaN even where its weight is zero: it would reach every query that has a key of the same block.
static void saturate(float * x, int64_t n) {
    constexpr float   max  = 65504.0f;
    constexpr int32_t bits = 0x477fe000; // its own: larger ones belong to larger magnitudes, infinity and NaN

    int32_t beyond = 0;
    for (int64_t i = 0; i < n; ++i) {
        int32_t xi;
        memcpy(&xi, x + i, sizeof(xi));
        beyond |= (xi & INT32_MAX) > bits;
    }
    for (int64_t i = 0; beyond && i < n; ++i) {
        x[i] = std::isnan(x[i]) ? 0.0f : std::clamp(x[i], -max, max);
    }
}

// One token's row of K or V, all heads, F32, scaled and rotated. Valid until the thread's next call.
static const float * load_row(const ggml_tensor * cur, int64_t token, const llama_kv_scales * scales, int rotation) {
    thread_local std::vector<float> row;

    const size_t n_head = cur->ne[0];
    row.resize(n_head*cur->ne[1]);

    for (int64_t h = 0; h < cur->ne[1]; ++h) {
        memcpy(row.data() + h*n_head, (const char *) cur->data + token*cur->nb[2] + h*cur->nb[1], n_head*sizeof(float));
    }
    for (size_t j = 0; scales && j < row.size(); ++j) {
        row[j] *= scales->k[j];
    }
    if (rotation) {
        mixedkv::rotate_row(row.data(), row.size(), rotation);
    }

    saturate(row.data(), row.size());

    return row.data();
}

// cur: src[i], cold: src[i + 2], idxs: src[i + 4]; i = 0 for K, 1 for V
static void store_token(ggml_tensor * dst, const llama_kv_node & node, int i, int64_t token) {
    const ggml_tensor * cur  = dst->src[i];
    const ggml_tensor * cold = dst->src[i + 2];

    const int64_t row = ((const int64_t *) dst->src[i + 4]->data)[token];
    const int64_t n   = cur->ne[0]*cur->ne[1];

    const float * x = i == 0 ? load_row(cur, token, node.scales, node.rotation_k) : load_row(cur, token, nullptr, node.rotation_v);

    // as SET_ROWS does it
    ggml_get_type_traits_cpu(cold->type)->from_float(x, (char *) cold->data + row*cold->nb[1], n);

    if (node.has_ring) {
        const size_t first = i == 0 ? 0 : dst->src[0]->ne[0]*dst->src[0]->ne[1];
        ggml_get_type_traits_cpu(GGML_TYPE_F16)->from_float(
                x, (char *) dst->data + token*dst->nb[1] + first*sizeof(ggml_fp16_t), n);
    }
}

static void store_compute(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const auto & node = *(const llama_kv_node *) userdata;

    const int64_t n = 2*dst->ne[1];

    for (int64_t i = n*ith/nth; i < n*(ith + 1)/nth; ++i) {
        store_token(dst, node, i % 2, i / 2);
    }
}

ggml_tensor * llama_kv_node_store(
        ggml_context * ctx,
        llama_kv_node & node,
        ggml_tensor * cold_k, ggml_tensor * cold_v,
        ggml_tensor * cur_k,  ggml_tensor * cur_v,
        ggml_tensor * k_idxs, ggml_tensor * v_idxs) {
    GGML_ASSERT(cur_k->type == GGML_TYPE_F32 && cur_k->nb[0] == sizeof(float));
    GGML_ASSERT(cur_v->type == GGML_TYPE_F32 && cur_v->nb[0] == sizeof(float));

    ggml_tensor * srcs[] = { cur_k, cur_v, cold_k, cold_v, k_idxs, v_idxs };

    return ggml_custom_4d(ctx, GGML_TYPE_F16, cold_k->ne[0] + cold_v->ne[0], cur_k->ne[2], 1, 1,
            srcs, 6, store_compute, GGML_N_TASKS_MAX, &node);
}

void llama_kv_node_write_ring(
        const ggml_tensor * rows, const ggml_tensor * idxs, const ggml_tensor * ring_k, const ggml_tensor * ring_v) {
    for (int64_t token = 0; token < rows->ne[1]; ++token) {
        const int64_t row = ((const int64_t *) idxs->data)[token];
        const char *  src = (const char *) rows->data + token*rows->nb[1];

        memcpy((char *) ring_k->data + row*ring_k->nb[1], src,                  ring_k->nb[1]);
        memcpy((char *) ring_v->data + row*ring_v->nb[1], src + ring_k->nb[1], ring_v->nb[1]);
    }
}
