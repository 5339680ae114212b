#pragma once

#include "ggml.h"
#include "rows/equalize.h"
#include "rows/rope-angles.h"

#include <cstdint>
#include <optional>
#include <vector>

// x = H x for each block of n, H the orthonormal Walsh-Hadamard matrix in natural order, which is its own inverse
void llama_kv_rows_rotate(float * x, int64_t n_total, int64_t n);

// x = x times scale, element by element
void llama_kv_rows_scale(float * x, const std::vector<float> & scale);

// Types come from outside as any number; a cache can have the ones whose rows ggml reads and writes without further data:
// those of an importance matrix have no quantiser, others are only intermediate results.
bool llama_kv_row_is_readable(ggml_type type);
bool llama_kv_row_is_writable(ggml_type type);

// Whether n elements, in whole blocks, are numbers. A row that holds NaN spoils attention even where its weight is 0.
bool llama_kv_row_is_finite(ggml_type type, const void * data, int64_t n);

// The CPU backend's function that writes a row of this type, nullptr where it has none. The backend may be a plugin, which
// nothing can be linked with.
ggml_from_float_t llama_kv_row_writer(ggml_type type);

// Of Q4_0 and Q5_0 the function that finds the scales of least error, else the one above
ggml_from_float_t llama_kv_row_writer_of_least_error(ggml_type type);

// a row of the cache: its type, the edge of the Hadamard blocks that it is rotated by, 0: none, what it was multiplied by
// before that, nullptr: nothing, and whether the subtracted bias of cold rows was taken from it first of all
struct llama_kv_row_format {
    ggml_type type;
    uint32_t  rotation;

    const llama_kv_scales * scales = nullptr;
    bool                    cold   = false;

    uint32_t scales_id() const { return scales ? scales->id : 0; }
    bool     has_subtracted_bias() const { return cold && scales && !scales->pairs.empty(); }

    bool operator==(const llama_kv_row_format & other) const {
        return type == other.type && rotation == other.rotation && scales_id() == other.scales_id() &&
            has_subtracted_bias() == other.has_subtracted_bias();
    }
};

// whose RoPE rotates the biases
struct llama_kv_row_layer {
    const llama_model &   model;
    const llama_cparams & cparams;
    uint32_t              il;
};

// rows of one format to rows of another
class llama_kv_row_converter {
public:
    llama_kv_row_converter(const llama_kv_row_layer & layer, llama_kv_row_format src, llama_kv_row_format dst, int64_t n_embd);

    size_t src_size() const { return ggml_row_size(src.type, n_embd); }
    size_t dst_size() const { return ggml_row_size(dst.type, n_embd); }

    bool is_copy() const { return src == dst; }

    // pos: of the rows
    void convert(const void * from, void * to, const llama_pos * pos, int64_t n_rows);

private:
    void change_basis(llama_pos pos); // of `row`

    llama_kv_row_format src;
    llama_kv_row_format dst;
    int64_t             n_embd;
    int64_t             n_embd_head;
    std::vector<float>  row;

    std::optional<llama_kv_rope> src_rope; // of the bias that is subtracted from rows
    std::optional<llama_kv_rope> dst_rope;
};
