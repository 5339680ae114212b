// The attention node of a layer on Vulkan: llama.cpp's own shaders read each tensor of its rows as it lies.

#include "ggml-vulkan-common.h"

#include "node_params.h"

using namespace mixedkv::vulkan;
using mixedkv::cuda::get_node_params;

bool mixedkv_vk_is_attention(const ggml_tensor * node) {
    return node->op == GGML_OP_CUSTOM && get_node_params(node->op_params).magic == magic_number;
}

// The node as ggml_vk_flash_attn reads it: with the parameters of ggml_flash_attn_ext
static ggml_tensor as_flash_attn(const ggml_tensor * node) {
    const auto  params   = get_node_params(node->op_params);
    const float floats[] = { params.scale, params.max_bias, params.logit_softcap };

    ggml_tensor res = *node;
    memset(res.op_params, 0, sizeof(res.op_params));
    memcpy(res.op_params, floats, sizeof(floats));
    res.op_params[3] = GGML_PREC_F32;
    return res;
}

// The part of src_mask that belongs to keys[i_keys]: F16 [n, n_tokens, 1, n_stream]
static ggml_tensor mask_of(ggml_tensor * const * src, int i_keys) {
    const size_t offset = first_mask(src, i_keys) * sizeof(ggml_fp16_t);

    ggml_tensor res = *src[src_mask];
    res.ne[0]       = src[keys[i_keys]]->ne[1];
    res.ne[1]       = src[src_q]->ne[1];
    res.ne[2]       = 1;
    res.ne[3]       = src[src_q]->ne[3];
    for (int i = 1; i < GGML_MAX_DIMS; ++i) {
        res.nb[i] = res.nb[i - 1] * res.ne[i - 1];
    }
    if (!res.view_src) {
        res.view_src = src[src_mask];
    }
    res.view_offs += offset;
    res.data = static_cast<char *>(res.data) + offset;
    return res;
}

void mixedkv_vk_attend(ggml_backend_vk_context * ctx, vk_context & subctx, ggml_tensor * node) {
    ggml_tensor * const * src = node->src;

    ggml_tensor       dst = as_flash_attn(node);
    mixedkv_vk_splits groups[n_row_groups];

    const auto attend = [&](int i) {
        const ggml_tensor mask = mask_of(src, i);
        ggml_vk_flash_attn(ctx, subctx, src[src_q], src[keys[i]], src[values_of(keys[i])], &mask, src[src_sinks], &dst,
                           &groups[i]);
    };

    uint32_t total = 0;
    for (int i = 0; i < n_row_groups; ++i) {
        attend(i);
        groups[i].first = total;
        total += groups[i].n;
    }
    GGML_ASSERT(total >= n_row_groups);
    GGML_ASSERT(groups[n_row_groups - 1].first < mixedkv_vk_splits::most);

    for (int i = 0; i < n_row_groups; ++i) {
        groups[i].total = total;
        attend(i);
    }
}
