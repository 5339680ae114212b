// The C API: the library, the configuration of a context, and what a cache holds.

#include "mixedkv-api.h"

#include "attention/attention.h"
#include "attention/lm4.h"
#include "attention/tc3.h"
#include "attention/thread_memory.h"
#include "blocks/present.h"
#include "hooks/windows.h"
#include "rows/access.h"
#include "spec/spec.h"

#include "llama-model.h"

#include <algorithm>
#include <cmath>

using namespace mixedkv_api;

static_assert(MIXEDKV_TYPE_LM4 == LM4_TYPE);
static_assert(MIXEDKV_TYPE_TC3 == TC3_TYPE);

namespace {

void check_config(const mixedkv_config & config) {
    const mixedkv::hot_window window = { config.threshold, config.group_size, config.sink_tokens, config.n_draft };

    require(uint32_t(config.attention) <= MIXEDKV_ATTENTION_MERGED, MIXEDKV_INVALID,
            "attention must be auto, fused or merged");
    require(config.sparse_error >= 0.0f && config.sparse_error < 1.0f, MIXEDKV_INVALID,
            "sparse_error must be at least 0 and below 1");
    require(!config.mixed || window.problem().empty(), MIXEDKV_INVALID, window.problem());

    require(config.layers || config.n_layers == 0, MIXEDKV_INVALID, "layers is NULL");
    const std::string problem = llama_kv_mixed_layers_problem(config);
    require(problem.empty(), MIXEDKV_INVALID, problem);
}

template <typename T>
void copy_out(const std::vector<T> & src, T * out, uint32_t n, uint32_t * n_out) {
    require(n_out, MIXEDKV_INVALID, "n_out is NULL");
    require(out || n == 0, MIXEDKV_INVALID, "out is NULL");

    std::copy_n(src.begin(), std::min<size_t>(n, src.size()), out);
    *n_out = src.size();
}

std::vector<mixedkv_layer_info> get_layers(llama_context * ctx) {
    std::vector<mixedkv_layer_info> res;

    uint32_t group = 0;
    for (const auto * kv : get_caches(ctx)) {
        auto layers = llama_kv_rows_layers(*kv, ctx->get_model().hparams);
        for (auto & layer : layers) {
            layer.group = group;
        }
        group += !layers.empty();
        res.insert(res.end(), layers.begin(), layers.end());
    }

    std::sort(res.begin(), res.end(), [](const auto & a, const auto & b) { return a.il < b.il; });

    return res;
}

std::string window_problem(llama_context * ctx, const mixedkv::hot_window & window) {
    const auto caches = get_own_caches(ctx);
    require(!caches.empty(), MIXEDKV_NOT_AVAILABLE, "this KV cache is uniform: only a mixed cache has a window");

    std::string res;
    for (const auto * kv : caches) {
        res = res.empty() ? kv->window_problem(window) : res;
    }

    return res;
}

bool has_room_for_window(llama_context * ctx, const mixedkv::hot_window & window) {
    const auto caches = get_own_caches(ctx);
    return window_problem(ctx, window).empty() &&
           std::none_of(caches.begin(), caches.end(), [&](const auto * kv) { return kv->get_hot().is_wider(window); });
}

// what set_window takes without more memory, beside the other settings as they are
uint32_t get_most_threshold(llama_context * ctx, const llama_kv_cache_mixed & kv) {
    auto window = kv.get_hot().get_slots().get_window();

    // fits, does not
    uint32_t low  = window.threshold;
    uint32_t high = std::max(low, kv.get_size() - std::min(kv.get_size(), window.sink_tokens)) + 1;
    while (kv.is_mixed() && high - low > 1) {
        window.threshold                                = low + (high - low) / 2;
        (has_room_for_window(ctx, window) ? low : high) = window.threshold;
    }

    return low;
}

mixedkv_stats get_stats(llama_context * ctx) {
    const auto & kv = get_cache(ctx);

    mixedkv_stats res = {};

    res.n_ctx_seq    = kv.get_size();
    res.n_seq_max    = kv.get_n_seq_max();
    res.n_stream     = kv.get_n_stream();
    res.n_cells_used = llama_kv_rows_used(kv);

    if (const auto * mixed = dynamic_cast<const llama_kv_cache_mixed *>(&kv)) {
        const auto & hot       = mixed->get_hot();
        const auto & slots     = hot.get_slots();
        res.mixed              = mixed->is_mixed();
        res.threshold          = slots.get_window().threshold;
        res.threshold_capacity = get_most_threshold(ctx, *mixed);
        res.group_size         = slots.get_window().group_size;
        res.sink_tokens        = slots.get_window().sink_tokens;
        res.n_draft            = slots.get_window().n_draft;
        res.ring_rows          = hot.get_n_rows();
        res.n_cells_hot        = slots.get_n_cells_hot();
        res.hot_slots          = slots.get_layout().n_slots * mixed->get_n_stream();
        res.hot_shared         = slots.get_layout().is_shared();
        res.n_evicted          = slots.get_use().n_evicted;
        res.n_pages            = mixed->get_page_counts().pages;
        res.n_pages_read       = mixed->get_page_counts().pages_read;
    }

    for (const auto & layer : get_layers(ctx)) {
        ++res.n_layer;
        res.n_elements += uint64_t(layer.n_cells) * layer.n_head_kv * (layer.n_embd_head_k + layer.n_embd_head_v);
        res.bytes_cold += layer.bytes_cold;
        res.bytes_hot += layer.bytes_hot;
    }

    for (const auto * cache : get_caches(ctx)) {
        for (const auto & [buft, size] : cache->memory_breakdown()) {
            res.bytes_total += size;
        }
    }
    for (const auto * mixed : get_own_caches(ctx)) {
        res.bytes_view = std::max<uint64_t>(res.bytes_view, mixed->get_view_bytes());
        res.bytes_given_back += mixed->get_hot().get_bytes_given_back();
    }
    res.bytes_hot -= res.bytes_given_back;
    res.bytes_total += res.bytes_view;
    res.bytes_total -= res.bytes_given_back;

    for (const auto & [buft, memory] : ctx->memory_breakdown()) {
        res.bytes_compute += memory.compute;
    }

    return res;
}

} // namespace

const char * mixedkv_version(void) {
    return MIXEDKV_VERSION;
}

const char * mixedkv_llama_commit(void) {
    return MIXEDKV_LLAMA_COMMIT;
}

const char * mixedkv_isa(void) {
    return mixedkv::attention_isa();
}

const char * mixedkv_last_error(void) {
    return llama_kv_mixed_get_error().c_str();
}

mixedkv_status mixedkv_parse(const char * spec, mixedkv_spec * out) {
    return guarded([&] {
        require(spec && out, MIXEDKV_INVALID, "spec or out is NULL");
        auto & layers = mixedkv::thread_memory<std::vector<mixedkv_layer_types>, struct parse_tag>();
        try {
            *out = mixedkv::to_native(mixedkv::parse_spec(spec), layers);
        } catch (const mixedkv::spec_error & err) {
            throw api_error{ MIXEDKV_INVALID, err.what() };
        }
    });
}

mixedkv_status mixedkv_check(const llama_model * model, const mixedkv_config * config, ggml_type type_k,
                             ggml_type type_v, uint32_t n_ctx) {
    return guarded([&] {
        require(model && config, MIXEDKV_INVALID, "model or config is NULL");
        check_config(*config);

        require(!config->mixed || uint64_t(config->threshold) + config->sink_tokens <= n_ctx, MIXEDKV_INVALID,
                "quantization_threshold " + std::to_string(config->threshold) + " + sink_tokens " +
                    std::to_string(config->sink_tokens) + " exceeds n_ctx " + std::to_string(n_ctx));

        const std::string problem = llama_kv_mixed_problem(*model, *config, type_k, type_v);
        require(problem.empty(), MIXEDKV_UNSUPPORTED, problem);
    });
}

mixedkv_status mixedkv_configure_next(const mixedkv_config * config) {
    return guarded([&] {
        if (config) {
            check_config(*config);
        }
        // llama.cpp's own cache with its own attention needs nothing from here
        const bool wanted = config && (config->mixed || config->attention == MIXEDKV_ATTENTION_FUSED);
        llama_kv_mixed_set_next(wanted ? config : nullptr);
    });
}

mixedkv_status mixedkv_enter(llama_context * ctx, bool wait) {
    return guarded([&] { enter(ctx, wait).release(); });
}

mixedkv_status mixedkv_leave(llama_context * ctx) {
    return guarded([&] {
        require(ctx, MIXEDKV_INVALID, "ctx is NULL");
        ctx->hooks.busy.unlock();
    });
}

mixedkv_status mixedkv_want_logits(llama_context * ctx, const uint32_t * tokens, uint32_t n) {
    return guarded(ctx, [&] {
        const uint32_t n_words = (uint32_t(llama_vocab_n_tokens(llama_model_get_vocab(&ctx->get_model()))) + 31) / 32;
        require(!tokens || n == n_words, MIXEDKV_INVALID,
                "n is " + std::to_string(n) + ": the vocabulary has " + std::to_string(n_words) + " words of 32 bits");
        ctx->hooks.wanted.set(ctx->hooks.evals, tokens, n);
    });
}

mixedkv_status mixedkv_take_not_finite(llama_context * ctx, mixedkv_not_finite * out, uint32_t n, uint32_t * n_out) {
    return guarded(ctx, [&] {
        const auto found = ctx->hooks.finite.get();
        copy_out(found, out, n, n_out);
        if (n >= found.size()) {
            ctx->hooks.finite.forget();
        }
    });
}

mixedkv_status mixedkv_clear_unused(llama_context * ctx) {
    return guarded(ctx, [&] { llama_kv_clear_unused(*ctx); });
}

mixedkv_status mixedkv_get_stats(llama_context * ctx, mixedkv_stats * out) {
    return guarded(ctx, [&] {
        require(out, MIXEDKV_INVALID, "out is NULL");
        *out = get_stats(ctx);
    });
}

mixedkv_status mixedkv_get_layers(llama_context * ctx, mixedkv_layer_info * out, uint32_t n, uint32_t * n_out) {
    return guarded([&] { copy_out(get_layers(ctx), out, n, n_out); });
}

mixedkv_status mixedkv_get_sequences(llama_context * ctx, mixedkv_seq_info * out, uint32_t n, uint32_t * n_out) {
    return guarded(ctx, [&] {
        const auto & kv = get_cache(ctx);

        std::vector<mixedkv_seq_info> res;
        for (uint32_t s = 0; s < kv.get_n_seq_max(); ++s) {
            res.push_back(llama_kv_rows_seq(kv, s));
        }

        copy_out(res, out, n, n_out);
    });
}

mixedkv_status mixedkv_get_short(llama_context * ctx, int32_t * out, uint32_t n, uint32_t * n_out) {
    return guarded(ctx, [&] {
        std::vector<int32_t> res(get_cache(ctx).get_n_seq_max(), -1);

        for (const auto * kv : get_own_caches(ctx)) {
            for (uint32_t s = 0; s < res.size(); ++s) {
                const int32_t from = kv->get_hot().get_slots().get_use().short_from[s];
                res[s]             = from < 0 ? res[s] : res[s] < 0 ? from : std::min(res[s], from);
            }
        }

        copy_out(res, out, n, n_out);
    });
}

mixedkv_status mixedkv_window_is_whole(llama_context * ctx, int32_t seq_id, int32_t pos, bool * out) {
    return guarded(ctx, [&] {
        check_seq(ctx, seq_id);
        require(out && pos >= 0, MIXEDKV_INVALID, "out is NULL or pos is negative");

        *out = true;
        for (const auto * kv : get_own_caches(ctx)) {
            *out = *out && (!kv->is_mixed() || kv->get_hot().get_slots().is_window_whole(seq_id, pos));
        }
    });
}

mixedkv_status mixedkv_find_cut(llama_context * ctx, int32_t seq_id, int32_t n, mixedkv_cut * out) {
    return guarded(ctx, [&] {
        require(out && n >= 0, MIXEDKV_INVALID, "out is NULL or n is negative");
        require(ctx->get_memory(), MIXEDKV_NOT_AVAILABLE, "the context has no memory");
        const uint32_t n_seq_max = llama_n_seq_max(ctx);
        require(seq_id >= 0 && uint32_t(seq_id) < n_seq_max, MIXEDKV_NOT_AVAILABLE,
                "sequence " + std::to_string(seq_id) + " is out of range: the context has " +
                    std::to_string(n_seq_max));
        *out = llama_kv_find_cut(*ctx, seq_id, n);
    });
}

mixedkv_status mixedkv_gpus_read(ggml_type type_k, ggml_type type_v, uint32_t n_embd_head_k, uint32_t n_embd_head_v,
                                 uint32_t n_head, uint32_t n_head_kv, bool * out) {
    return guarded([&] {
        const std::string problem = llama_kv_mixed_type_problem(type_k, type_v);
        require(problem.empty(), MIXEDKV_INVALID, problem);
        require(out, MIXEDKV_INVALID, "out is NULL");

        // the numbers may be those of a damaged file, and ggml ends the process where a tensor of them is too large
        constexpr uint32_t most_elements = 1 << 13, most_heads = 1 << 16;

        const auto is_size = [](uint32_t n, ggml_type type) {
            return n > 0 && n <= most_elements && n % ggml_blck_size(type) == 0;
        };
        const bool sound = is_size(n_embd_head_k, type_k) && is_size(n_embd_head_v, type_v) && n_head > 0 &&
                           n_head <= most_heads && n_head_kv > 0 && n_head % n_head_kv == 0;
        *out = sound && llama_kv_devices_read({ type_k, type_v, n_embd_head_k, n_embd_head_v, n_head, n_head_kv });
    });
}

mixedkv_status mixedkv_count_ring_rows(const mixedkv_config * config, uint32_t n_seq, uint32_t n_cells,
                                       uint64_t bytes_cold, uint64_t bytes_f16, uint32_t * n_out,
                                       uint32_t * least_out) {
    return guarded([&] {
        require(config && n_out && least_out, MIXEDKV_INVALID, "config, n_out or least_out is NULL");
        check_config(*config);

        const mixedkv::hot_window capacity = { config->threshold, config->group_size, config->sink_tokens,
                                               config->n_draft };

        *least_out = uint32_t(mixedkv::hot_layout::least(capacity, n_seq, n_cells));

        const uint64_t budget =
            config->hot_budget != MIXEDKV_HOT_BUDGET_AUTO
                ? config->hot_budget
                : mixedkv::hot_layout::automatic(capacity, n_seq, n_cells, { bytes_cold, bytes_f16 });
        *n_out = mixedkv::hot_layout::rows(mixedkv::hot_layout::make(capacity, n_seq, n_cells, budget).n_slots);
    });
}

mixedkv_status mixedkv_get_scales(llama_context * ctx, int32_t il, float * out, uint32_t n, uint32_t * n_out) {
    return guarded([&] {
        const auto * scales = llama_kv_rows_scales(find_layer(ctx, il), il);
        copy_out(scales ? scales->k : std::vector<float>(), out, n, n_out);
    });
}

mixedkv_status mixedkv_check_pages(llama_context * ctx, uint32_t * n_pages, uint32_t * n_wrong) {
    return guarded(ctx, [&] {
        require(n_pages && n_wrong, MIXEDKV_INVALID, "n_pages or n_wrong is NULL");
        *n_pages = *n_wrong = 0;
        for (auto * kv : get_own_caches(ctx)) {
            const auto found = kv->check_pages();
            *n_pages += found.n_known;
            *n_wrong += found.n_wrong;
        }
    });
}

mixedkv_status mixedkv_set_window(llama_context * ctx, uint32_t threshold, uint32_t group_size, uint32_t sink_tokens) {
    return guarded(ctx, [&] {
        const mixedkv::hot_window window  = { threshold, group_size, sink_tokens };
        const std::string         problem = window_problem(ctx, window);
        require(problem.empty(), MIXEDKV_INVALID, problem);

        const auto caches = get_own_caches(ctx);
        for (auto * kv : caches) {
            kv->make_room(window);
        }
        for (auto * kv : caches) {
            kv->get_hot().set_window(window);
        }
        ctx->hooks.setting.touch(); // what is there was computed under another
    });
}

static mixedkv_status for_hot_rows(llama_context * ctx, int32_t seq_id, void (llama_kv_hot_rows::*call)(llama_seq_id)) {
    return guarded(ctx, [&] {
        check_seq(ctx, seq_id);
        for (auto * kv : get_own_caches(ctx)) {
            (kv->get_hot().*call)(seq_id);
        }
    });
}

mixedkv_status mixedkv_release_hot_rows(llama_context * ctx, int32_t seq_id) {
    return for_hot_rows(ctx, seq_id, &llama_kv_hot_rows::rest);
}

mixedkv_status mixedkv_hold_hot_rows(llama_context * ctx, int32_t seq_id) {
    return for_hot_rows(ctx, seq_id, &llama_kv_hot_rows::wake);
}

void mixedkv_limit_sliding(uint32_t n_windows) {
    llama_kv_mixed_limit_sliding(n_windows);
}

mixedkv_status mixedkv_drop_sliding(llama_context * ctx, int32_t seq_id) {
    return guarded(ctx, [&] {
        check_seq(ctx, seq_id);
        for (auto * kv : get_caches(ctx)) {
            if (kv_access::get_n_swa(*kv) > 0) {
                kv->seq_rm(seq_id, -1, -1);
            }
        }
    });
}
