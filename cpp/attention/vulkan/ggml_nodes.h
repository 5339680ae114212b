// Included by ggml-vulkan-common.h (vendor/patches/25-vulkan-attention.patch): flash attention over several tensors of
// rows, which may differ in type. llama.cpp splits the keys of one tensor over workgroups and then reduces what the
// splits have summed up; here each tensor gets a group of the splits, and all groups are reduced at once.

#pragma once

#include <cstdint>

// The splits of one group, as ggml_vk_flash_attn takes them.
struct mixedkv_vk_splits {
    uint32_t n     = 0; // its own: ggml_vk_flash_attn chooses them
    uint32_t first = 0; // those of the groups before it
    uint32_t total = 0; // of all groups; 0: only n is asked for

    // Whether that is all that is asked for. llama.cpp chooses 0 where it does not split: that is one.
    bool is_plan(uint32_t & n_chosen) {
        n = n_chosen = n_chosen > 0 ? n_chosen : 1;
        return total == 0;
    }

    bool is_last() const { return first + n == total; }

    // `first` in bits of mask_n_head_log2 that flash_attn_base.glsl uses for nothing else
    uint32_t                  first_bits() const { return (first & 0xFF) << 16 | (first >> 8) << 25; }
    static constexpr uint32_t most = 1 << 15;
};

// Whether this custom node is such attention. Its first five sources are those of ggml_flash_attn_ext, and supports_op
// goes on with what it asks of these.
bool mixedkv_vk_is_attention(const ggml_tensor * node);

void mixedkv_vk_attend(ggml_backend_vk_context * ctx, vk_context & subctx, ggml_tensor * node);
