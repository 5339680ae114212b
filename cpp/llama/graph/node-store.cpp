#include "graph/node.h"
#include "rows/rope-angles.h"

#include "graph/guard.h"

#include "attention/attention.h"
#include "attention/cuda/node_params.h"
#include "attention/thread_memory.h"
#include "rows/convert.h"

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

// One token's row of K or V, all heads, F32, as the model computes it. Valid until the thread's next call.
static std::vector<float> & load_row(const ggml_tensor * cur, int64_t token) {
    auto & row = mixedkv::thread_memory<std::vector<float>, struct load_row_tag>();

    const size_t n_head = cur->ne[0];
    row.resize(n_head*cur->ne[1]);

    for (int64_t h = 0; h < cur->ne[1]; ++h) {
        memcpy(row.data() + h*n_head, (const char *) cur->data + token*cur->nb[2] + h*cur->nb[1], n_head*sizeof(float));
    }

    return row;
}

// scaled and rotated
static const float * change_basis(std::vector<float> & row, const llama_kv_scales * scales, int rotation) {
    for (size_t j = 0; scales && j < row.size(); ++j) {
        row[j] *= scales->k[j];
    }
    if (rotation) {
        mixedkv::rotate_row(row.data(), row.size(), rotation);
    }

    saturate(row.data(), row.size());

    return row.data();
}

static void subtract_bias(std::vector<float> & row, const llama_kv_node & node, int64_t n_embd_head, int64_t cell) {
    auto & angles = mixedkv::thread_memory<std::vector<float>, struct subtract_bias_tag>();

    angles.clear();
    for (const auto & pair : *node.pairs) {
        angles.insert(angles.end(), { pair.cosines[cell], pair.sines[cell] });
    }

    llama_kv_subtract_bias(row.data(), n_embd_head, *node.scales, angles.data());
}

// The sources of the node: cur, cold and idxs of K and V, as devices too read them (cpp/attention/cuda/nodes.cu)
static std::vector<ggml_tensor *> to_sources(const llama_kv_store_inputs & in) {
    if (!in.v.cold) {
        return { in.k.cur, in.k.cold, in.k.idxs };
    }
    return { in.k.cur, in.v.cur, in.k.cold, in.v.cold, in.k.idxs, in.v.idxs };
}

static llama_kv_store_inputs to_inputs(const ggml_tensor * dst) {
    ggml_tensor * const * src = dst->src;
    if (!src[3]) {
        return { { src[0], src[1], src[2] }, {} };
    }
    return { { src[0], src[2], src[4] }, { src[1], src[3], src[5] } };
}

static void store_token(ggml_tensor * dst, const llama_kv_node & node, const llama_kv_store_inputs & in, bool is_v, int64_t token) {
    const auto & [cur, cold, idxs] = is_v ? in.v : in.k;

    const int64_t cell = ((const int64_t *) idxs->data)[token];
    const int64_t n    = cur->ne[0]*cur->ne[1];

    const auto * scales   = is_v ? nullptr : node.scales;
    const int    rotation = is_v ? node.rotation_v : node.rotation_k;

    const float * x = change_basis(load_row(cur, token), scales, rotation);

    if (node.has_ring) {
        const size_t first = is_v ? in.k.cur->ne[0]*in.k.cur->ne[1] : 0;
        llama_kv_row_writer(GGML_TYPE_F16)(x, (char *) dst->data + token*dst->nb[1] + first*sizeof(ggml_fp16_t), n);
    }

    if (!is_v && node.pairs) {
        auto & row = load_row(cur, token);
        subtract_bias(row, node, cur->ne[0], cell);
        x = change_basis(row, scales, rotation);
    }

    // without a window the cache has the rows of llama.cpp's own, as SET_ROWS writes them
    const auto write = node.has_ring ? llama_kv_row_writer_of_least_error(cold->type) : llama_kv_row_writer(cold->type);
    write(x, (char *) cold->data + cell*cold->nb[1], n);
}

static void store_compute(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const auto & node = *(const llama_kv_node *) userdata;

    const auto    in      = to_inputs(dst);
    const int64_t n_kinds = in.v.cold ? 2 : 1; // K alone, or V besides
    const int64_t n       = n_kinds*dst->ne[1];

    for (int64_t i = n*ith/nth; i < n*(ith + 1)/nth; ++i) {
        store_token(dst, node, in, i % n_kinds == 1, i / n_kinds);
    }

    // of rows that are there already
    const size_t n_due = node.pages ? node.all_pages->get_due().size() : 0;
    for (size_t i = n_due*ith/nth; i < n_due*(ith + 1)/nth; ++i) {
        node.pages->make(llama_kv_node_rows(in.k.cold, in.k.cur->ne[0]), node.all_pages->get_due()[i]);
    }
}

ggml_tensor * llama_kv_node_store(ggml_context * ctx, llama_kv_node & node, const llama_kv_store_inputs & in) {
    const int64_t n_tokens = in.k.cur->ne[2];

    for (const auto & [cur, cold, idxs] : { in.k, in.v }) {
        if (cold) {
            llama_kv_guard(cur->type == GGML_TYPE_F32 && cur->nb[0] == sizeof(float), "K and V of a token come as rows of F32");
            llama_kv_guard(idxs->type == GGML_TYPE_I64 && idxs->ne[0] == n_tokens, "each token comes with the row that it goes to");
        }
    }

    auto srcs = to_sources(in);
    if (node.on_device && node.scale_k) {
        srcs.push_back(node.scale_k);
    }

    ggml_tensor * res = ggml_custom_4d(ctx, GGML_TYPE_F16, in.k.cold->ne[0] + (in.v.cold ? in.v.cold->ne[0] : 0), n_tokens, 1, 1,
            srcs.data(), (int) srcs.size(), store_compute, GGML_N_TASKS_MAX, &node);

    if (node.on_device) {
        mixedkv::cuda::node_params params;
        params.magic      = params.magic_number;
        params.rotation_k = node.rotation_k;
        params.rotation_v = node.rotation_v;
        params.has_ring   = node.has_ring;
        params.has_scales = node.scale_k != nullptr;
        mixedkv::cuda::set_node_params(res->op_params, params);
    }

    return res;
}

void llama_kv_node_write_ring(
        const ggml_tensor * rows, const ggml_tensor * idxs, const ggml_tensor * ring_k, const ggml_tensor * ring_v) {
    const int64_t n_ring = ring_k->ne[1];

    for (int64_t token = 0; token < rows->ne[1]; ++token) {
        const int64_t row = ((const int64_t *) idxs->data)[token];
        const char *  src = (const char *) rows->data + token*rows->nb[1];

        if (row % n_ring == n_ring - 1) {
            continue; // the row that nobody reads
        }

        memcpy((char *) ring_k->data + row*ring_k->nb[1], src, ring_k->nb[1]);
        if (ring_v) {
            memcpy((char *) ring_v->data + row*ring_v->nb[1], src + ring_k->nb[1], ring_v->nb[1]);
        }
    }
}
