// What a node that attends to several tensors of rows says of them: cpp/llama/graph/in-place.cpp makes it, nodes.cpp
// reads it.

#pragma once

#include "attention/cuda/node_params.h"

#include <cstdint>

namespace mixedkv {
namespace vulkan {

constexpr uint32_t magic_number = 0x6d6b7632; // "mkv2"

// The sources; K and V are permuted as ggml_flash_attn_ext takes them
enum source {
    src_q,
    src_cold_k,
    src_cold_v,
    src_mask, // F16 [n]: of each tensor of rows as ggml_flash_attn_ext takes it, at first_mask
    src_sinks,
    src_ring_k, // F16
    src_ring_v,
    src_cur_k,
    src_cur_v,
    n_sources
};

// K and V in the order in which they have their splits: cold rows, which have most of them, come last, and so the first
// split of a group is a small number.
constexpr source keys[]       = { src_ring_k, src_cur_k, src_cold_k };
constexpr int    n_row_groups = 3;

constexpr source values_of(source k) {
    return source(k + 1);
}

// F16 elements at a multiple of which any device can bind a buffer
constexpr int64_t mask_align = 128;

// Most bytes of a node's split buffer, and of its mask: Vulkan guarantees a maxStorageBufferRange of 128 MiB.
constexpr int64_t most_bytes = 1 << 27;

// Elements of src_mask before the part that belongs to keys[i_keys]. Tensor: ggml_tensor
template <class Tensor>
int64_t first_mask(Tensor * const * src, int i_keys) {
    int64_t res = 0;
    for (int i = 0; i < i_keys; ++i) {
        res += src[keys[i]]->ne[1] * src[src_q]->ne[1] * src[src_q]->ne[3];
        res = (res + mask_align - 1) / mask_align * mask_align;
    }
    return res;
}

} // namespace vulkan
} // namespace mixedkv
