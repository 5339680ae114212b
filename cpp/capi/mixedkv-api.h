// What the functions of the C API share: arguments from outside are checked here, and exceptions end here.

#pragma once

#include "mixedkv/mixedkv.h"

#include "blocks/view.h"
#include "cache/mixed.h"
#include "hooks/setup.h"
#include "hooks/support.h"

#include "llama-context.h"

#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace mixedkv_api {

struct api_error {
    mixedkv_status status;
    std::string    message;
};

template <typename F>
mixedkv_status guarded(F && body) {
    llama_kv_mixed_set_error("");
    try {
        body();
        return MIXEDKV_OK;
    } catch (const api_error & err) {
        llama_kv_mixed_set_error(err.message);
        return err.status;
    } catch (const std::exception & err) {
        llama_kv_mixed_set_error(err.what());
        return MIXEDKV_INTERNAL;
    }
}

inline void require(bool ok, mixedkv_status status, const std::string & message) {
    if (!ok) {
        throw api_error{ status, message };
    }
}

inline std::unique_lock<std::recursive_mutex> enter(llama_context * ctx, bool wait) {
    require(ctx, MIXEDKV_INVALID, "ctx is NULL");

    std::unique_lock<std::recursive_mutex> res(ctx->hooks.busy, std::defer_lock);
    require(wait ? (res.lock(), true) : res.try_lock(), MIXEDKV_BUSY,
            "another thread is using this context, and llama.cpp takes one at a time: call this on the thread that "
            "evaluates, or again later");

    return res;
}

// of what touches rows: one thread at a time
template <typename F>
mixedkv_status guarded(llama_context * ctx, F && body) {
    return guarded([&] {
        const auto inside = enter(ctx, false);
        body();
    });
}

inline std::vector<llama_kv_cache *> get_caches(llama_context * ctx) {
    require(ctx, MIXEDKV_INVALID, "ctx is NULL");

    auto res = llama_kv_mixed_caches(ctx->get_memory());
    require(!res.empty(), MIXEDKV_NOT_AVAILABLE, "the context has no KV cache");

    return res;
}

// those of ours, whether mixed or with our attention alone
inline std::vector<llama_kv_cache_mixed *> get_own_caches(llama_context * ctx) {
    std::vector<llama_kv_cache_mixed *> res;
    for (auto * kv : get_caches(ctx)) {
        if (auto * mixed = dynamic_cast<llama_kv_cache_mixed *>(kv)) {
            res.push_back(mixed);
        }
    }
    return res;
}

inline llama_kv_cache & get_cache(llama_context * ctx) {
    return *get_caches(ctx).front();
}

inline const llama_kv_cache & find_layer(llama_context * ctx, int32_t il) {
    for (const auto * kv : get_caches(ctx)) {
        if (llama_kv_rows_has_layer(*kv, il)) {
            return *kv;
        }
    }
    throw api_error{ MIXEDKV_NOT_AVAILABLE, "layer " + std::to_string(il) + " has no KV cache" };
}

inline void check_seq(llama_context * ctx, int32_t seq_id) {
    const uint32_t n_seq_max = get_cache(ctx).get_n_seq_max();
    require(seq_id >= 0 && uint32_t(seq_id) < n_seq_max, MIXEDKV_NOT_AVAILABLE,
            "sequence " + std::to_string(seq_id) + " is out of range: the context has " + std::to_string(n_seq_max));
}

} // namespace mixedkv_api
