#pragma once

// Keys of real models have a few channels tens of times larger than the others, which 4-bit blocks cannot hold. So K is
// stored times one scale for each rotary pair of a head, and Q comes divided by it: see docs/decisions/011.

#include "ggml-cpp.h"

#include <cstdint>
#include <vector>

struct llama_model;

// of one layer
struct llama_kv_scales {
    std::vector<float> k; // [n_embd_head_k*n_head_kv], empty: keys are stored as they are
    std::vector<float> q; // 1/k

    // subtracted from cold rows: the bias of pairs of elements that it dwarfs the rest of, as RoPE rotates it
    std::vector<int32_t> pairs; // [n_pairs, 2], elements of a head; twice the same: RoPE does not rotate it
    std::vector<float>   bias;  // [n_pairs, n_head_kv, 2]

    uint32_t id = 0; // tells all of this apart, 0: none
};

// From the weights alone. Empty for a layer whose keys or queries are not those of the usual tensors.
llama_kv_scales llama_kv_make_scales(const llama_model & model, uint32_t il);

// Scales of the layers of a cache; as tensors where graphs multiply by them.
class llama_kv_equalizer {
public:
    void add(llama_kv_scales scales, ggml_backend_buffer_type_t buft);

    // for ggml_mul and nodes on devices: tensors of all layers, where their rows are
    void alloc(const std::vector<uint32_t> & n_embd_head);

    bool empty() const { return layers.empty(); }

    // nullptr: keys of the layer are stored as they are
    const llama_kv_scales * get(size_t ikv) const;

    // what alloc() has made, for nodes that multiply by themselves on a device; nullptr: nothing
    ggml_tensor * get_k(size_t ikv) const { return ikv < layers.size() ? layers[ikv].k : nullptr; }
    ggml_tensor * get_q(size_t ikv) const { return ikv < layers.size() ? layers[ikv].q : nullptr; }

    ggml_tensor * scale_k(ggml_context * ctx, ggml_tensor * k, size_t ikv) const;
    ggml_tensor * scale_q(ggml_context * ctx, ggml_tensor * q, size_t ikv) const;

private:
    struct layer {
        llama_kv_scales            scales;
        ggml_backend_buffer_type_t buft;

        ggml_tensor * k = nullptr; // F32 [n_embd_head, n_head_kv]
        ggml_tensor * q = nullptr; // F32 [n_embd_head, 1, n_head_kv]
    };

    std::vector<layer> layers;

    std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> bufs;
};
