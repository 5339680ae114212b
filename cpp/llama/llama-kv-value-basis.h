#pragma once

// Values of a calibrated cache are stored in a basis of their own: in directions of falling variance, each in units of its
// standard deviation. Where the bits of a row type go is then the same for all models. See docs/decisions/048.

#include "mixedkv/mixedkv.h"

#include "ggml-cpp.h"

#include <cstdint>
#include <vector>

// of one layer
struct llama_kv_value_basis {
    explicit llama_kv_value_basis(const mixedkv_value_basis & given);

    int64_t n_embd_head;
    int64_t n_head_kv;

    std::vector<float> to;   // [n_head_kv, n_embd_head, n_embd_head], rows are what an element of the basis is made of
    std::vector<float> from; // its inverse

    uint32_t id; // tells it apart, never 0

    // x: [n_head_kv*n_embd_head], a row of values
    void apply(float * x) const { multiply(to,   x); }
    void undo (float * x) const { multiply(from, x); }

private:
    void multiply(const std::vector<float> & matrix, float * x) const;
};

// Of the layers of a cache; as tensors for its graphs.
class llama_kv_value_bases {
public:
    // of the layer of that number in the cache; rotation: the edge of the Hadamard blocks by which the graph rotates values
    // before it stores them and what is made of them after it reads them, 0: it does not
    void add(const mixedkv_value_basis & given, ggml_backend_buffer_type_t buft, int64_t rotation);

    bool empty() const { return layers.empty(); }

    // nullptr: values are stored as they are
    const llama_kv_value_basis * get(size_t ikv) const { return empty() ? nullptr : &layers.at(ikv).basis; }

    // v: F32 [n_embd_head, n_head_kv, n_tokens]; the result is no longer contiguous
    ggml_tensor * build_to(ggml_context * ctx, ggml_tensor * v, size_t ikv) const;

    // out: F32 [n_embd_head*n_head, n_tokens]
    ggml_tensor * build_from(ggml_context * ctx, ggml_tensor * out, size_t ikv) const;

private:
    struct layer {
        llama_kv_value_basis    basis;
        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buf;

        ggml_tensor * to   = nullptr; // F32 [n_embd_head, n_embd_head, n_head_kv]
        ggml_tensor * from = nullptr;
    };

    std::vector<layer> layers;
};
