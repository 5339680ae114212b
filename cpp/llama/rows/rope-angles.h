#pragma once

// The bias that is subtracted from cold rows of K, of a few pairs of elements, is rotated by RoPE like K. Here are the
// cosines and sines: see docs/decisions/017.

#include "attention/attention.h"
#include "llama-kv-cells.h"
#include "rows/equalize.h"

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

struct llama_cparams;
struct llama_model;

// Of pairs of elements of a layer's heads, by position, as the graph's RoPE computes them.
class llama_kv_rope {
public:
    // pairs: [n_pairs, 2]
    llama_kv_rope(const llama_model & model, const llama_cparams & cparams, uint32_t il, const std::vector<int32_t> & pairs);

    // [n_pairs, 2], cosine and sine
    const float * at(llama_pos pos);

private:
    std::vector<float> compute(llama_pos first) const;

    const llama_model &   model;
    const llama_cparams & cparams;
    const uint32_t        il;
    const std::vector<int32_t> pairs;

    std::map<llama_pos, std::vector<float>> chunks; // of positions, by the first
};

// subtracts the bias from a row of K, as the model computes it, with these angles [n_pairs, 2]; sign -1: adds it again
void llama_kv_subtract_bias(float * row, int64_t n_embd_head, const llama_kv_scales & scales, const float * angles, float sign = 1.0f);

// Of the cells of a cache: layers whose RoPE is the same share them.
class llama_kv_rope_angles {
public:
    // for each layer of the cache, in order; scales live as long as this
    void add(const llama_model & model, uint32_t il, const llama_kv_scales * scales);

    void alloc(uint32_t n_cells, uint32_t n_stream);

    bool empty() const { return groups.empty(); }

    // the subtracted bias of K of the layer; cosines and sines are those of the cells of all streams
    const std::vector<mixedkv::attention_pair> & get(size_t ikv) const { return layers[ikv].pairs; }

    // for the positions that cells of a stream have now
    void update(const llama_model & model, const llama_cparams & cparams, uint32_t strm, const llama_kv_cells & cells);

    //
    // for graphs that add the subtracted bias by themselves
    //

    // tensors by which that is multiplied: on the devices of the layers, in the basis in which rows are stored
    void alloc_tensors(const std::vector<ggml_backend_buffer_type_t> & bufts, const std::vector<uint32_t> & n_embd_head, int rotation);

    // cosines and sines of all pairs
    uint32_t n_angles() const { return n_rows; }

    // [n_angles] floats of a position, which some cell has
    void get_position(llama_pos pos, float * out);

    // F32 [n_angles, n, n_stream] of the first n cells, from stream s0 on
    void get_cells(uint32_t s0, ggml_tensor * dst) const;

    // F32 [n_embd_k_gqa, n], the subtracted bias of rows with these angles [n_angles, n]; nullptr: nothing
    ggml_tensor * build_subtracted_bias(ggml_context * ctx, size_t ikv, ggml_tensor * angles) const;

private:
    // pairs that the same RoPE rotates
    struct group {
        uint32_t                       il;
        std::vector<int32_t>           pairs;
        size_t                         first; // row of `data`
        std::unique_ptr<llama_kv_rope> rope;
    };

    struct layer {
        const llama_kv_scales * scales;
        size_t                  group;
        std::vector<mixedkv::attention_pair> pairs;

        ggml_tensor * tensor = nullptr; // F32 [n_angles, n_embd_k_gqa]
    };

          float * row(const group & g, size_t i)       { return data.data() + (g.first + i)*stride; }
    const float * row(const group & g, size_t i) const { return data.data() + (g.first + i)*stride; }

    std::vector<group> groups;
    std::vector<layer> layers;

    uint32_t n_cells = 0;
    uint32_t n_rows  = 0;
    size_t   stride  = 0;

    std::vector<float>     data; // cosines of the first pair, sines of it, ... [n_cells*n_stream] each
    std::vector<llama_pos> pos;  // that they are of, -1: none

    std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> bufs;
};
