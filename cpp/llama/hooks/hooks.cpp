// From the configuration of "the next context on this thread" to a cache inside a llama_model's memory.

#include "hooks/hooks.h"

#include "cache/mixed.h"
#include "graph/guard.h"
#include "graph/query-sums.h"
#include "hooks/setup.h"
#include "hooks/support.h"
#include "model/stream.h"
#include "rows/access.h"
#include "weights/weights.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <stdexcept>

bool llama_kv_mixed_admit(const llama_model * model, llama_context_params & params) {
    const mixedkv_config * config = llama_kv_mixed_take_next();

    llama_kv_mixed_set_error("");

    if (!model) {
        return true;
    }

    if (config && params.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_AUTO) {
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    }

    std::string problem = weights_error() ? weights_error() : "";

    if (problem.empty()) {
        problem = config ?
            llama_kv_mixed_problem(*model, *config, params.type_k, params.type_v) :
            llama_kv_mixed_type_problem(params.type_k, params.type_v);
    }
    if (config && problem.empty() && params.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_DISABLED) {
        problem = "the mixed KV cache and the fused attention keep V as rows, which llama.cpp does only with flash attention "
            "(architecture '" + model->arch_name() + "'): set flash_attn";
    }

    if (problem.empty()) {
        problem = llama_stream_admit(*model, params);
    }

    if (!problem.empty()) {
        llama_kv_mixed_drop_config();
        llama_kv_mixed_set_error(problem);
        LLAMA_LOG_ERROR("%s: %s\n", __func__, problem.c_str());
    }

    return problem.empty();
}

// a mixed cache that takes more than an F16 one saves nothing
static std::string size_problem(const std::vector<llama_kv_cache *> & caches) {
    uint64_t mine = 0;
    uint64_t f16  = 0;

    for (const llama_kv_cache * kv : caches) {
        const auto * mixed = dynamic_cast<const llama_kv_cache_mixed *>(kv);
        if (mixed && mixed->is_mixed()) {
            mine += mixed->get_bytes();
            f16  += mixed->get_bytes_f16();
        }
    }

    return mine <= f16 ? "" : "the mixed KV cache would take " + std::to_string(mine) + " bytes, more than the " + std::to_string(f16) +
        " of an F16 cache: raise n_ctx, lower quantization_threshold or the number of sequences, or use the 'f16' cache";
}

static void check_rows(const llama_kv_cache & kv) {
    const bool is_ours = dynamic_cast<const llama_kv_cache_mixed *>(&kv);

    for (const auto & layer : kv_access::get_layers(kv)) {
        for (const ggml_tensor * rows : { layer.k, layer.v }) {
            if (!rows || !rows->buffer) {
                continue;
            }
            ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(rows->buffer));

            llama_kv_guard_size(dev, rows, layer.il);
            if (ggml_is_quantized(rows->type)) {
                llama_kv_guard_rows(dev, rows->type, layer.il);
            }
            if (!is_ours) {
                llama_kv_guard_reader(dev, rows->type, layer.il);
            }
        }
    }
}

void llama_kv_mixed_check(llama_memory_i * memory, const llama_model & model) {
    try {
        for (const llama_kv_cache * kv : llama_kv_mixed_caches(memory)) {
            check_rows(*kv);
        }
    } catch (const std::exception &) {
        delete memory;
        throw;
    }

    if (!llama_kv_mixed_config()) {
        return;
    }

    const uint32_t hot_budget = llama_kv_mixed_config()->hot_budget;

    llama_kv_mixed_drop_config();

    uint32_t n_mixed = 0;
    uint32_t n_other = 0;

    for (llama_kv_cache * kv : llama_kv_mixed_caches(memory)) {
        if (!kv->get_layer_ids().empty()) {
            ++(dynamic_cast<llama_kv_cache_mixed *>(kv) ? n_mixed : n_other);
        }
    }

    if (n_mixed > 0 && n_other == 0) {
        const std::string problem = size_problem(llama_kv_mixed_caches(memory));
        if (!problem.empty() && hot_budget == MIXEDKV_HOT_BUDGET_AUTO) {
            delete memory;
            throw std::runtime_error(problem);
        }
        if (!problem.empty()) {
            LLAMA_LOG_WARN("%s: %s\n", __func__, problem.c_str());
        }
        return;
    }

    const char * reason = memory ? "has no full-attention layers in a cache of a known kind" : "has no KV cache";

    delete memory;

    throw std::runtime_error("the mixed KV cache is not supported: architecture '" + model.arch_name() + "' " + reason +
            "; use the 'f16' cache with llama.cpp's own attention");
}

bool llama_kv_mixed_has_shift(llama_memory_i * memory) {
    const auto caches = llama_kv_mixed_caches(memory);

    return std::any_of(caches.begin(), caches.end(), [](const auto * kv) { return !kv_access::is_shared(*kv) && kv->get_has_shift(); });
}

void llama_kv_mixed_failed(const std::exception & err) {
    llama_kv_mixed_drop_config();
    llama_kv_mixed_set_error(err.what());
}

ggml_type llama_kv_mixed_layer_type(int32_t il, bool is_k, ggml_type type) {
    const mixedkv_config * config = llama_kv_mixed_config();

    return config ? llama_kv_mixed_type(*config, il, is_k, type) : type;
}

uint32_t llama_kv_mixed_nodes(llama_memory_i * memory) {
    // the merged view takes most: two casts, three concatenations, views, the biases of K, and the ring's rows, for K and V
    static constexpr uint32_t n_nodes_layer = 50;

    uint32_t res = 0;

    for (llama_kv_cache * kv : llama_kv_mixed_caches(memory)) {
        if (const auto * mixed = dynamic_cast<llama_kv_cache_mixed *>(kv)) {
            res += n_nodes_layer*mixed->get_readers().get_n_readers();
        }
    }

    return res;
}

llama_kv_cache * llama_kv_cache_new(
        const llama_model & model,
      const llama_hparams & hparams,
                ggml_type   type_k,
                ggml_type   type_v,
                     bool   v_trans,
                     bool   offload,
                     bool   unified,
                 uint32_t   kv_size,
                 uint32_t   n_seq_max,
                 uint32_t   n_pad,
                 uint32_t   n_swa,
           llama_swa_type   swa_type,
           llama_memory_t   mem_other,
    const llama_memory_i::layer_filter_cb & filter,
    const llama_memory_i::layer_reuse_cb  & reuse,
    const llama_memory_i::layer_share_cb  & share) {
    if (const mixedkv_config * config = llama_kv_mixed_config()) {
        mixedkv_config own = *config;

        // they are there only while the context is made, for llama_kv_mixed_layer_type
        own.layers   = nullptr;
        own.n_layers = 0;

        return new llama_kv_cache_mixed(own, model, hparams, type_k, type_v, v_trans, offload, unified, kv_size, n_seq_max,
                n_pad, n_swa, swa_type, mem_other, filter, reuse, share);
    }
    return new llama_kv_cache(model, hparams, type_k, type_v, v_trans, offload, unified, kv_size, n_seq_max,
            n_pad, n_swa, swa_type, mem_other, filter, reuse, share);
}

std::unique_ptr<llama_kv_cache_context> llama_kv_cache_context::make(
        llama_kv_cache * kv, slot_info_vec_t sinfos, std::vector<llama_ubatch> ubatches) {
    if (auto * mixed = dynamic_cast<llama_kv_cache_mixed *>(kv)) {
        return mixed->make_context(std::move(sinfos), std::move(ubatches));
    }
    return std::make_unique<llama_kv_cache_context>(kv, std::move(sinfos), std::move(ubatches));
}

//
// upstream's own context: what 01-virtual-kv-cache.patch adds to it
//

uint32_t llama_kv_cache_context::get_n_mask(const llama_ubatch & ubatch, const llama_cparams & cparams) const {
    GGML_UNUSED(ubatch);
    GGML_UNUSED(cparams);

    return get_n_kv();
}

void llama_kv_cache_context::equalize(ggml_context * ctx, ggml_tensor *& q, ggml_tensor *& k, int32_t il) const {
    GGML_UNUSED(ctx);
    GGML_UNUSED(q);
    GGML_UNUSED(k);
    GGML_UNUSED(il);
}

ggml_tensor * llama_kv_cache_context::build_attn(
        const llm_graph_context & graph,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * v,
        ggml_tensor * kq_b,
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
        ggml_tensor * v_mla,
              float   kq_scale,
                int   il) const {
    llama_kv_sum_queries(graph, *kv, q, il);

    return graph.build_attn_mha(q, k, v, kq_b, kq_mask, sinks, v_mla, 0, kq_scale, il);
}
