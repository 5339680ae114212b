// A library to preload into llama.cpp's own programs: their contexts get the cache that MIXEDKV_KV names.
//
//   LD_PRELOAD=libmixedkv-environment.so MIXEDKV_KV=mixed:balanced llama-perplexity -m model.gguf -f text.txt
//
// It stands before llama_init_from_model(). The programs know nothing of it, so they can be any build of the pinned
// llama.cpp commit; docs/c-api.md has the commands. Specs are those of Python's `kv`, but for budget.

#include <llama.h>
#include <mixedkv/mixedkv.h>

#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <string>

namespace {

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
    mixedkv_spec spec;
    if (mixedkv_parse(text, &spec) != MIXEDKV_OK) {
        fail(mixedkv_last_error());
    }
    if (spec.budget_bytes > 0 || spec.budget_bits > 0.0) {
        fail("a budget's types are chosen for a model: ask `mixedkv info` for them, and name them in layers");
    }
    params.type_k = spec.type_k;
    params.type_v = spec.type_v;
    if (spec.config.mixed || spec.config.attention != MIXEDKV_ATTENTION_AUTO) {
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
        if (mixedkv_configure_next(&spec.config) != MIXEDKV_OK) {
            fail(mixedkv_last_error());
        }
    }
    llama_context * ctx = init(model, params);
    if (!ctx && *mixedkv_last_error()) {
        fail(mixedkv_last_error());
    }
    return ctx;
}
