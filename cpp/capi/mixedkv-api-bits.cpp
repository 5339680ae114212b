// Whether a prompt has the same bits however it is cut: docs/decisions/049-the-same-bits-for-any-cut.md.

#include "mixedkv-api.h"

#include "attention/attention.h"
#include "attention/thread_memory.h"
#include "blocks/view.h"
#include "graph/node.h"
#include "weights/weights.h"

#include "ggml-backend.h"
#include "llama-model.h"

#include <cstring>

using namespace mixedkv_api;

namespace {

// Of a matrix that columns are multiplied with
bool has_same_bits(const ggml_tensor & matrix) {
    if (matrix.type == GGML_TYPE_F32) {
        return matrix.ne[1] % 4 != 0; // llama.cpp makes products of several columns in another way with rows in fours
    }
    if (!matrix.buffer || ggml_backend_buffer_is_host(matrix.buffer)) {
        return weights_same_bits(matrix.type);
    }
    const bool is_repacked = std::strcmp(ggml_backend_buffer_name(matrix.buffer), "CPU_REPACK") == 0;
    return is_repacked && weights_same_bits(weights_repacked(matrix.type));
}

// Rows are looked up in the embeddings of tokens; vectors are no matrices.
bool is_multiplied(const llama_model & model, const std::string & name, const ggml_tensor * weight) {
    const bool is_table = name.find("_embd") != std::string::npos && weight != model.output;
    return weight->ne[1] > 1 && !is_table;
}

std::string weights_problem(const llama_model & model) {
    if (std::strcmp(weights_choice(), "bf16") == 0) {
        return "MIXEDKV_WEIGHTS=bf16 multiplies many columns in BF16, and few in integers";
    }
    for (const auto & [name, weight] : model.tensors_by_name) {
        if (is_multiplied(model, name, weight) && !has_same_bits(*weight)) {
            return "products of single columns with " + std::string(ggml_type_name(weight->type)) +
                   " weights round otherwise than those of several (" + name + ")";
        }
    }
    return "";
}

std::string layer_problem(const mixedkv_layer_info & layer) {
    const std::string name = "layer " + std::to_string(layer.il);
    if (!layer.fused || layer.on_device) {
        return name + (layer.on_device ? ": attention on a device" : ": llama.cpp's attention") +
               " rounds otherwise in other steps";
    }
    if (!mixedkv::attention_same_bits(llama_kv_node_row_type(layer.type_k), llama_kv_node_row_type(layer.type_v),
                                      layer.n_embd_head_k, layer.n_embd_head_v)) {
        return name + ": attention over " + ggml_type_name(layer.type_k) + "/" + ggml_type_name(layer.type_v) +
               " rows of heads of " + std::to_string(layer.n_embd_head_k) +
               " rounds otherwise in a prompt than in an " + "answer (" + mixedkv::attention_isa() + ")";
    }
    return "";
}

std::string find_problem(llama_context * ctx) {
    require(ctx, MIXEDKV_INVALID, "ctx is NULL");
    if (llama_model_is_recurrent(&ctx->get_model()) || llama_model_is_hybrid(&ctx->get_model())) {
        return "layers that keep a state are llama.cpp's";
    }
    for (const auto * kv : get_caches(ctx)) {
        const auto * own = dynamic_cast<const llama_kv_cache_mixed *>(kv);
        if (own && !own->get_all_pages().empty()) {
            return "sparse leaves out rows";
        }
        if (own && own->is_mixed() && own->get_hot().get_slots().get_use().n_evicted > 0) {
            return "F16 rows made room for those of other sequences";
        }
        for (const auto & layer : llama_kv_rows_layers(*kv, ctx->get_model().hparams)) {
            const std::string res = layer_problem(layer);
            if (!res.empty()) {
                return res;
            }
        }
    }
    return weights_problem(ctx->get_model());
}

} // namespace

const char * mixedkv_bits_problem(llama_context * ctx) {
    auto & res = mixedkv::thread_memory<std::string, struct bits_problem_tag>();
    try {
        res = find_problem(ctx);
    } catch (const api_error & err) {
        res = err.message;
    } catch (const std::exception & err) {
        res = err.what();
    }
    return res.c_str();
}
