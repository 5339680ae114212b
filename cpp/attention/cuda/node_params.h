// What the two nodes of a layer tell a device, behind ggml's own parameters of a custom node: cpp/llama/graph writes
// it, ggml-cuda reads it (nodes.cu). Nodes have their sources in the order of cpp/llama/graph/node.h.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace mixedkv {
namespace cuda {

struct node_params {
    static constexpr uint32_t magic_number = 0x6d6b7631; // "mkv1"

    uint32_t magic        = 0;
    uint16_t rotation_k   = 0; // edge of the Hadamard blocks, 0: none
    uint16_t rotation_v   = 0;
    uint8_t  is_attention = 0; // else the node stores rows
    uint8_t  has_ring     = 0;
    uint8_t  has_sinks    = 0;
    uint8_t  has_scales   = 0; // the last source: of K for a node that stores, of Q for one that attends
    uint8_t  writes_ring  = 0;

    float scale         = 1.0f;
    float max_bias      = 0.0f;
    float logit_softcap = 0.0f;
};

constexpr size_t node_params_offset = 24; // of ggml_custom_op_params, which node-attention.cpp compares

// op_params: of a custom node
inline void set_node_params(void * op_params, const node_params & params) {
    std::memcpy(static_cast<char *>(op_params) + node_params_offset, &params, sizeof(params));
}

// Of any custom node; those of others have no such magic number.
inline node_params get_node_params(const void * op_params) {
    node_params res;
    std::memcpy(&res, static_cast<const char *>(op_params) + node_params_offset, sizeof(res));
    return res;
}

} // namespace cuda
} // namespace mixedkv
