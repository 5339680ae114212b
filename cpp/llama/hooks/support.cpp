#include "hooks/support.h"

#include "attention/attention.h"

#include "llama-kv-cache-iswa.h"
#include "rows/convert.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"

static std::string check_isa(const mixedkv_config & config) {
    const char * error = config.attention == MIXEDKV_ATTENTION_MERGED ? nullptr : mixedkv::attention_isa_error();
    return error ? error : "";
}

static std::string check_memory(const llama_model & model) {
    const auto & hparams = model.hparams;

    const std::string arch = "architecture '" + model.arch_name() + "' ";

    if (llm_arch_is_recurrent(model.arch)) {
        return arch + "is recurrent and has no KV cache";
    }
    if (hparams.indexer_head_size > 0) {
        return arch + "chooses keys by an indexer, which has a cache and an attention of its own";
    }
    if (hparams.n_rel_attn_bkts > 0) {
        return arch + "adds a relative position bias, which needs attention without flash attention";
    }
    switch (model.arch) {
        // as llama_model::create_memory has it
        case LLM_ARCH_BERT:
        case LLM_ARCH_JINA_BERT_V2:
        case LLM_ARCH_JINA_BERT_V3:
        case LLM_ARCH_NOMIC_BERT:
        case LLM_ARCH_NOMIC_BERT_MOE:
        case LLM_ARCH_NEO_BERT:
        case LLM_ARCH_EUROBERT:
        case LLM_ARCH_WAVTOKENIZER_DEC:
        case LLM_ARCH_MODERN_BERT:
        case LLM_ARCH_GEMMA_EMBEDDING:
        case LLM_ARCH_DREAM:
        case LLM_ARCH_LLADA:
        case LLM_ARCH_LLADA_MOE:
        case LLM_ARCH_RND1:
            return arch + "reads its whole input at once and has no KV cache";
        case LLM_ARCH_EAGLE3:
        case LLM_ARCH_DFLASH:
        case LLM_ARCH_GEMMA4_ASSISTANT:
            return arch + "is a draft model that shares memory with another context";
        case LLM_ARCH_GROK:
            return arch + "cannot use flash attention";
        default:
            return "";
    }
}

static std::string check_heads(const llama_model & model, const mixedkv_config & config, ggml_type type_k, ggml_type type_v) {
    const auto & hparams = model.hparams;

    if (hparams.is_mla() && type_k != type_v) {
        return "architecture '" + model.arch_name() + "' caches one row for keys and values (MLA): cold_type_k and cold_type_v must be "
            "the same, not '" + ggml_type_name(type_k) + "' and '" + ggml_type_name(type_v) + "'";
    }

    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        if (!hparams.has_kv(il) || hparams.is_recr(il)) {
            continue;
        }

        const auto check = [&](const char * name, ggml_type type, uint32_t n_embd_head) -> std::string {
            const int64_t n_block = ggml_blck_size(type);
            if (n_embd_head % n_block == 0) {
                return "";
            }
            return std::string("cold_type_") + name + " '" + ggml_type_name(type) + "' has blocks of " + std::to_string(n_block) +
                " elements, which do not divide the head size " + std::to_string(n_embd_head) + " of layer " + std::to_string(il) +
                " (architecture '" + model.arch_name() + "'): use " +
                (n_embd_head % 32 == 0 ? "a type with blocks of 32, as q4_0" : "the 'f16' cache");
        };

        std::string res = check("k", llama_kv_mixed_type(config, il, true, type_k), hparams.n_embd_head_k(il));
        res = res.empty() ? check("v", llama_kv_mixed_type(config, il, false, type_v), hparams.n_embd_head_v(il)) : res;
        if (!res.empty()) {
            return res;
        }
    }

    return "";
}

std::string llama_kv_mixed_type_problem(ggml_type type_k, ggml_type type_v) {
    for (const bool is_k : { true, false }) {
        const ggml_type type = is_k ? type_k : type_v;
        if (!llama_kv_row_is_writable(type)) {
            return std::string(is_k ? "type_k " : "type_v ") + std::to_string(int32_t(type)) + " is no type that a KV cache can have: "
                "use f16, or a type that ggml quantises to without an importance matrix, as q8_0 and q4_0";
        }
    }

    return "";
}

static std::string range_text(const mixedkv_layer_types & range) {
    return std::to_string(range.first) + (range.last == range.first ? "" : "-" + (range.last < 0 ? "" : std::to_string(range.last)));
}

static int64_t end_of(const mixedkv_layer_types & range) {
    return range.last < 0 ? INT32_MAX : range.last;
}

std::string llama_kv_mixed_layers_problem(const mixedkv_config & config) {
    for (uint32_t i = 0; i < config.n_layers; ++i) {
        const auto & range = config.layers[i];

        if (range.first < 0 || range.first > end_of(range)) {
            return "layers " + std::to_string(range.first) + " to " + std::to_string(range.last) + " are no range: use first <= last, or last -1";
        }
        for (uint32_t j = 0; j < i; ++j) {
            const auto & other = config.layers[j];
            if (range.first <= end_of(other) && other.first <= end_of(range)) {
                return "layers " + range_text(other) + " and " + range_text(range) + " overlap: name each layer once";
            }
        }

        const std::string types = llama_kv_mixed_type_problem(range.type_k, range.type_v);
        if (!types.empty()) {
            return "layers " + range_text(range) + ": " + types;
        }
    }

    return "";
}

ggml_type llama_kv_mixed_type(const mixedkv_config & config, int32_t il, bool is_k, ggml_type type) {
    for (uint32_t i = 0; config.mixed && i < config.n_layers; ++i) {
        const auto & range = config.layers[i];
        if (range.first <= il && il <= end_of(range)) {
            return is_k ? range.type_k : range.type_v;
        }
    }

    return type;
}

static std::string check_layers(const llama_model & model, const mixedkv_config & config) {
    const int32_t n_layer = model.hparams.n_layer_all;

    for (uint32_t i = 0; config.mixed && i < config.n_layers; ++i) {
        const auto & range = config.layers[i];
        if (range.first >= n_layer || range.last >= n_layer) {
            return "layers " + range_text(range) + ": the model has " + std::to_string(n_layer) + " layers, 0 to " + std::to_string(n_layer - 1);
        }
    }

    return "";
}

static std::string check_sparse(const llama_model & model, const mixedkv_config & config) {
    if (!config.mixed || config.sparse_error == 0.0f) {
        return "";
    }
    if (config.attention == MIXEDKV_ATTENTION_MERGED) {
        return "sparse leaves out pages of keys in the fused attention only: leave sparse out, or attention 'merged'";
    }
    if (model.hparams.is_mla()) {
        return "sparse is not supported: architecture '" + model.arch_name() + "' caches one row for keys and values (MLA): leave it out";
    }

    return "";
}

std::string llama_kv_mixed_problem(const llama_model & model, const mixedkv_config & config, ggml_type type_k, ggml_type type_v) {
    const std::string isa = check_isa(config);
    if (!isa.empty()) {
        return isa;
    }

    const std::string types = llama_kv_mixed_type_problem(type_k, type_v);
    if (!types.empty()) {
        return types;
    }

    const std::string memory = check_memory(model);
    if (!memory.empty()) {
        return (config.mixed ? "the mixed KV cache" : "attention 'fused'") + std::string(" is not supported: ") + memory +
            "; use the 'f16' cache with llama.cpp's own attention";
    }

    const std::string layers = check_layers(model, config);
    if (!layers.empty()) {
        return layers;
    }

    const std::string heads = check_heads(model, config, type_k, type_v);

    return heads.empty() ? check_sparse(model, config) : heads;
}

std::vector<llama_kv_cache *> llama_kv_mixed_caches(llama_memory_i * memory) {
    if (auto * kv = dynamic_cast<llama_kv_cache *>(memory)) {
        return { kv };
    }
    if (auto * iswa = dynamic_cast<llama_kv_cache_iswa *>(memory)) {
        return { iswa->get_base(), iswa->get_swa() };
    }
    if (dynamic_cast<llama_memory_hybrid_idx *>(memory)) {
        return {};
    }
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return { hybrid->get_mem_attn() };
    }
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        return { hybrid->get_mem_attn()->get_base(), hybrid->get_mem_attn()->get_swa() };
    }
    return {};
}

llama_memory_recurrent * llama_kv_mixed_states(llama_memory_i * memory) {
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return hybrid->get_mem_recr();
    }
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        return hybrid->get_mem_recr();
    }
    return dynamic_cast<llama_memory_recurrent *>(memory);
}
