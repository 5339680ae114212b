// A library to preload into llama.cpp's own programs: their contexts get the cache that MIXEDKV_KV names.
//
//   LD_PRELOAD=libmixedkv-environment.so MIXEDKV_KV=mixed:balanced llama-perplexity -m model.gguf -f text.txt
//
// It stands before llama_init_from_model(). The programs know nothing of it, so they can be any build of the pinned
// llama.cpp commit; docs/c-api.md has the commands. Specs are those of Python's parse_kv() without layers, budget,
// shrink and the types that need a calibration.

#include <llama.h>
#include <mixedkv/mixedkv.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <stdexcept>
#include <string>

namespace {

struct cache_spec {
    ggml_type      type_k = GGML_TYPE_Q4_0;
    ggml_type      type_v = GGML_TYPE_Q4_0;
    mixedkv_config config = {};

    cache_spec() {
        config.mixed       = true;
        config.threshold   = 64;
        config.group_size  = 16;
        config.sink_tokens = 4;
        config.n_draft     = 16;
        config.equalize    = true;
    }
};

ggml_type type_of(const std::string & name) {
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        if (ggml_type_name(ggml_type(i)) && name == ggml_type_name(ggml_type(i))) {
            return ggml_type(i);
        }
    }
    throw std::invalid_argument("'" + name + "' is no type that a cache can have here");
}

uint32_t number_of(const std::string & text) {
    if (text.empty() || text.size() > 9 || text.find_first_not_of("0123456789") != std::string::npos) {
        throw std::invalid_argument("'" + text + "' is not a whole number of tokens");
    }
    return std::stoul(text);
}

float share_of(const std::string & text) {
    char *      end = nullptr;
    const float res = std::strtof(text.c_str(), &end);
    if (text.empty() || *end) {
        throw std::invalid_argument("'" + text + "' is not a number");
    }
    return res;
}

void set_preset(cache_spec & spec, const std::string & name) {
    if (name == "balanced" || name == "quality") {
        spec.type_k            = GGML_TYPE_Q8_0;
        spec.type_v            = name == "quality" ? GGML_TYPE_Q8_0 : GGML_TYPE_Q4_0;
        spec.config.threshold  = name == "quality" ? 256 : 128;
        spec.config.group_size = 32;
    } else if (name != "compact") {
        throw std::invalid_argument("'" + name + "' is neither key=value nor one of compact, balanced, quality");
    }
}

void set_option(cache_spec & spec, const std::string & key, const std::string & value) {
    auto & config = spec.config;
    if (key == "cold") {
        spec.type_k = spec.type_v = type_of(value);
    } else if (key == "cold_k") {
        spec.type_k = type_of(value);
    } else if (key == "cold_v") {
        spec.type_v = type_of(value);
    } else if (key == "threshold") {
        config.threshold = number_of(value);
    } else if (key == "group") {
        config.group_size = number_of(value);
    } else if (key == "sinks") {
        config.sink_tokens = number_of(value);
    } else if (key == "draft") {
        config.n_draft = number_of(value);
    } else if (key == "equalize" && (value == "true" || value == "false")) {
        config.equalize = value == "true";
    } else if (key == "attention" && (value == "auto" || value == "fused" || value == "merged")) {
        config.attention = value == "auto"    ? MIXEDKV_ATTENTION_AUTO
                           : value == "fused" ? MIXEDKV_ATTENTION_FUSED
                                              : MIXEDKV_ATTENTION_MERGED;
    } else if (key == "rounding") {
        config.rounding = value == "auto" ? 0 : number_of(value);
    } else if (key == "v_skip") {
        config.v_skip = share_of(value);
    } else if (key == "sparse" && value.rfind("eps:", 0) == 0) {
        config.sparse_error = share_of(value.substr(4)) / 1.959964f; // farther off with a probability of 0.05
    } else {
        throw std::invalid_argument(key + "=" + value +
                                    " is not understood here: use cold, cold_k, cold_v, threshold, "
                                    "group, sinks, draft, equalize, attention, rounding, v_skip or sparse=eps:E");
    }
}

cache_spec parse(const std::string & text) {
    cache_spec spec;
    if (text.rfind("mixed", 0) != 0 || (text.size() > 5 && text[5] != ':')) {
        const size_t slash = text.find('/');
        spec.type_k        = type_of(text.substr(0, slash));
        spec.type_v        = slash == std::string::npos ? spec.type_k : type_of(text.substr(slash + 1));
        spec.config.mixed  = false;
        return spec;
    }
    for (size_t at = 6, first = 1; at < text.size(); first = 0) {
        const size_t      end   = std::min(text.find(',', at), text.size());
        const std::string item  = text.substr(at, end - at);
        const size_t      equal = item.find('=');
        if (equal == std::string::npos && first) {
            set_preset(spec, item);
        } else {
            set_option(spec, item.substr(0, equal), equal == std::string::npos ? "" : item.substr(equal + 1));
        }
        at = end + 1;
    }
    return spec;
}

[[noreturn]] void fail(const std::string & problem) {
    std::fprintf(stderr, "MIXEDKV_KV=%s: %s\n", std::getenv("MIXEDKV_KV"), problem.c_str());
    std::exit(EXIT_FAILURE);
}

} // namespace

extern "C" __attribute__((visibility("default"))) llama_context * llama_init_from_model(llama_model *        model,
                                                                                        llama_context_params params) {
    using init_t           = llama_context * (*)(llama_model *, llama_context_params);
    static const auto init = reinterpret_cast<init_t>(dlsym(RTLD_NEXT, "llama_init_from_model"));

    const char * text = std::getenv("MIXEDKV_KV");
    if (!text || !*text) {
        return init(model, params);
    }
    try {
        const cache_spec spec = parse(text);
        params.type_k         = spec.type_k;
        params.type_v         = spec.type_v;
        if (spec.config.mixed) {
            params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
            if (mixedkv_configure_next(&spec.config) != MIXEDKV_OK) {
                fail(mixedkv_last_error());
            }
        }
    } catch (const std::invalid_argument & error) {
        fail(error.what());
    }
    llama_context * ctx = init(model, params);
    if (!ctx && *mixedkv_last_error()) {
        fail(mixedkv_last_error());
    }
    return ctx;
}
