// The C API: arguments from outside are checked here, and exceptions end here.

#include "mixedkv/mixedkv.h"

#include "attention/attention.h"
#include "llama-kv-cache-mixed.h"
#include "llama-kv-fill.h"
#include "llama-kv-mixed-setup.h"
#include "llama-kv-mixed-support.h"
#include "llama-kv-rows-export.h"
#include "llama-kv-rows-import.h"
#include "llama-kv-rows-view.h"

#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>
#include <stdexcept>

namespace {

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

void require(bool ok, mixedkv_status status, const std::string & message) {
    if (!ok) {
        throw api_error{ status, message };
    }
}

void check_config(const mixedkv_config & config) {
    const mixedkv::hot_window window = { config.threshold, config.group_size, config.sink_tokens, config.n_draft };

    require(uint32_t(config.attention) <= MIXEDKV_ATTENTION_MERGED, MIXEDKV_INVALID,
            "attention must be auto, fused or merged");
    require(!config.mixed || window.problem().empty(), MIXEDKV_INVALID, window.problem());
}

std::vector<llama_kv_cache *> get_caches(llama_context * ctx) {
    require(ctx, MIXEDKV_INVALID, "ctx is NULL");

    auto res = llama_kv_mixed_caches(ctx->get_memory());
    require(!res.empty(), MIXEDKV_NOT_AVAILABLE, "the context has no KV cache");

    return res;
}

llama_kv_cache & get_cache(llama_context * ctx) {
    return *get_caches(ctx).front();
}

const llama_kv_cache & find_layer(llama_context * ctx, int32_t il) {
    for (const auto * kv : get_caches(ctx)) {
        if (llama_kv_rows_has_layer(*kv, il)) {
            return *kv;
        }
    }
    throw api_error{ MIXEDKV_NOT_AVAILABLE, "layer " + std::to_string(il) + " has no KV cache" };
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

void check_seq(llama_context * ctx, int32_t seq_id) {
    const uint32_t n_seq_max = get_cache(ctx).get_n_seq_max();
    require(seq_id >= 0 && uint32_t(seq_id) < n_seq_max, MIXEDKV_NOT_AVAILABLE,
            "sequence " + std::to_string(seq_id) + " is out of range: the context has " + std::to_string(n_seq_max));
}

// pending shifts and copies are carried out first: what is read is what the next decode reads
void settle(llama_context * ctx) {
    ctx->memory_update(false);
    ctx->synchronize();
}

// The next decode turns K of all cells in one pass, however many blocks came before it. That can wait where this
// library sees to it that K is turned before it is saved, and where no copy between streams is pending.
bool can_turn_later(llama_context * ctx) {
    const auto caches = get_caches(ctx);
    return std::all_of(caches.begin(), caches.end(), [](const llama_kv_cache * kv) {
        return dynamic_cast<const llama_kv_cache_mixed *>(kv) && kv->get_n_stream() == 1;
    });
}

void check_blocks(llama_context * ctx, int32_t seq_id) {
    check_seq(ctx, seq_id);
    const std::string problem = llama_kv_rows_problem(*ctx);
    require(problem.empty(), MIXEDKV_UNSUPPORTED, problem);
}

// rows of a range, in the layers of one group
std::vector<llama_kv_row> find_range(const llama_kv_cache & kv, int32_t seq_id, int32_t p0, int32_t p1) {
    require(p0 >= 0, MIXEDKV_INVALID, "p0 is negative");

    std::string problem;
    auto        res = llama_kv_rows_range(kv, seq_id, p0, p1, problem);
    require(problem.empty(), MIXEDKV_NOT_AVAILABLE, problem);

    return res;
}

uint32_t count_hot(const std::vector<llama_kv_row> & rows) {
    return std::count_if(rows.begin(), rows.end(), [](const auto & row) { return row.slot >= 0; });
}

// the same, if there are as many as the caller has room for
std::vector<llama_kv_row> find_range(const llama_kv_cache & kv, int32_t seq_id, int32_t p0, int32_t p1, uint32_t n_rows,
                                     uint32_t n_hot) {
    auto res = find_range(kv, seq_id, p0, p1);
    require(res.size() == n_rows && count_hot(res) == n_hot, MIXEDKV_NOT_AVAILABLE,
            "the cache changed while rows were copied out: export them on the thread that decodes");

    return res;
}

const llama_kv_cache & get_group(llama_context * ctx, uint32_t group) {
    const auto groups = llama_kv_rows_groups(*ctx);
    require(group < groups.size(), MIXEDKV_NOT_AVAILABLE, "there is no group " + std::to_string(group));
    return *groups[group];
}

mixedkv_stats get_stats(llama_context * ctx) {
    const auto & kv = get_cache(ctx);

    mixedkv_stats res = {};

    res.n_ctx_seq    = kv.get_size();
    res.n_seq_max    = kv.get_n_seq_max();
    res.n_stream     = kv.get_n_stream();
    res.n_cells_used = llama_kv_rows_used(kv);

    if (const auto * mixed = dynamic_cast<const llama_kv_cache_mixed *>(&kv)) {
        res.mixed              = mixed->is_mixed();
        res.threshold          = mixed->get_window().threshold;
        res.threshold_capacity = mixed->get_capacity().threshold;
        res.group_size         = mixed->get_window().group_size;
        res.sink_tokens        = mixed->get_window().sink_tokens;
        res.n_draft            = mixed->get_capacity().n_draft;
        res.ring_rows          = mixed->get_n_ring();
        res.n_cells_hot        = mixed->get_n_cells_hot();
        res.hot_slots          = mixed->get_n_slots() * mixed->get_n_stream();
        res.hot_shared         = mixed->is_shared();
        res.n_evicted          = mixed->get_use().n_evicted;
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
        if (const auto * mixed = dynamic_cast<const llama_kv_cache_mixed *>(cache)) {
            res.bytes_view = std::max<uint64_t>(res.bytes_view, mixed->get_view_bytes());
        }
    }
    res.bytes_total += res.bytes_view;

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

mixedkv_status mixedkv_get_stats(llama_context * ctx, mixedkv_stats * out) {
    return guarded([&] {
        require(out, MIXEDKV_INVALID, "out is NULL");
        *out = get_stats(ctx);
    });
}

mixedkv_status mixedkv_get_layers(llama_context * ctx, mixedkv_layer_info * out, uint32_t n, uint32_t * n_out) {
    return guarded([&] { copy_out(get_layers(ctx), out, n, n_out); });
}

mixedkv_status mixedkv_get_sequences(llama_context * ctx, mixedkv_seq_info * out, uint32_t n, uint32_t * n_out) {
    return guarded([&] {
        const auto & kv = get_cache(ctx);

        std::vector<mixedkv_seq_info> res;
        for (uint32_t s = 0; s < kv.get_n_seq_max(); ++s) {
            res.push_back(llama_kv_rows_seq(kv, s));
        }

        copy_out(res, out, n, n_out);
    });
}

mixedkv_status mixedkv_get_short(llama_context * ctx, int32_t * out, uint32_t n, uint32_t * n_out) {
    return guarded([&] {
        std::vector<int32_t> res(get_cache(ctx).get_n_seq_max(), -1);

        for (const auto * kv : get_caches(ctx)) {
            const auto * mixed = dynamic_cast<const llama_kv_cache_mixed *>(kv);
            for (uint32_t s = 0; mixed && s < res.size(); ++s) {
                const int32_t from = mixed->get_use().short_from[s];
                res[s]             = from < 0 ? res[s] : res[s] < 0 ? from : std::min(res[s], from);
            }
        }

        copy_out(res, out, n, n_out);
    });
}

mixedkv_status mixedkv_window_is_whole(llama_context * ctx, int32_t seq_id, int32_t pos, bool * out) {
    return guarded([&] {
        check_seq(ctx, seq_id);
        require(out && pos >= 0, MIXEDKV_INVALID, "out is NULL or pos is negative");

        *out = true;
        for (const auto * kv : get_caches(ctx)) {
            const auto * mixed = dynamic_cast<const llama_kv_cache_mixed *>(kv);
            *out               = *out && (!mixed || !mixed->is_mixed() || mixed->is_window_whole(seq_id, pos));
        }
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

        const uint64_t budget = config->hot_budget != MIXEDKV_HOT_BUDGET_AUTO
                                    ? config->hot_budget
                                    : mixedkv::hot_layout::automatic(capacity, n_seq, n_cells, bytes_cold, bytes_f16);
        *n_out = mixedkv::hot_layout::rows(mixedkv::hot_layout::make(capacity, n_seq, n_cells, budget).n_slots);
    });
}

mixedkv_status mixedkv_get_scales(llama_context * ctx, int32_t il, float * out, uint32_t n, uint32_t * n_out) {
    return guarded([&] {
        const auto * scales = llama_kv_rows_scales(find_layer(ctx, il), il);
        copy_out(scales ? scales->k : std::vector<float>(), out, n, n_out);
    });
}

mixedkv_status mixedkv_set_window(llama_context * ctx, uint32_t threshold, uint32_t group_size, uint32_t sink_tokens) {
    return guarded([&] {
        for (auto * kv : get_caches(ctx)) {
            auto * mixed = dynamic_cast<llama_kv_cache_mixed *>(kv);
            require(mixed, MIXEDKV_NOT_AVAILABLE, "this KV cache is uniform: only a mixed cache has a window");

            const std::string problem = mixed->set_window({ threshold, group_size, sink_tokens });
            require(problem.empty(), MIXEDKV_INVALID, problem);
        }
    });
}

mixedkv_status mixedkv_read_rows(llama_context * ctx, int32_t il, int32_t seq_id, char which, int32_t p0, int32_t p1,
                                 bool unrotate, float * data, int32_t * positions, uint8_t * hot, uint32_t n_rows,
                                 uint32_t * n_rows_out) {
    return guarded([&] {
        require(n_rows_out, MIXEDKV_INVALID, "n_rows_out is NULL");
        require(which == 'k' || which == 'v', MIXEDKV_INVALID, "which must be 'k' or 'v'");

        check_seq(ctx, seq_id);
        settle(ctx);

        const auto & kv   = find_layer(ctx, il);
        const auto   rows = llama_kv_rows_find(kv, seq_id, p0, p1);

        *n_rows_out = rows.size();
        if (n_rows < rows.size()) {
            return;
        }

        require(!data || llama_kv_rows_read(*ctx, kv, il, seq_id, which == 'k', rows, unrotate, data),
                MIXEDKV_NOT_AVAILABLE, "layer " + std::to_string(il) + " stores no values (MLA)");

        for (size_t i = 0; i < rows.size(); ++i) {
            if (positions) {
                positions[i] = rows[i].pos;
            }
            if (hot) {
                hot[i] = rows[i].slot >= 0;
            }
        }
    });
}

mixedkv_status mixedkv_count_rows(llama_context * ctx, int32_t seq_id, uint32_t group, int32_t p0, int32_t p1,
                                  uint32_t * n_rows_out, uint32_t * n_hot_out) {
    return guarded([&] {
        require(n_rows_out && n_hot_out, MIXEDKV_INVALID, "n_rows_out or n_hot_out is NULL");
        check_blocks(ctx, seq_id);
        settle(ctx);

        const auto rows = find_range(get_group(ctx, group), seq_id, p0, p1);

        *n_rows_out = rows.size();
        *n_hot_out  = count_hot(rows);
    });
}

mixedkv_status mixedkv_export_group(llama_context * ctx, int32_t seq_id, uint32_t group, int32_t p0, int32_t p1,
                                    uint32_t n_rows, uint32_t n_hot, int32_t * positions, int32_t * hot,
                                    int32_t * slots, int32_t * xy) {
    return guarded([&] {
        check_blocks(ctx, seq_id);
        require(n_rows == 0 || positions, MIXEDKV_INVALID, "positions is NULL");
        require(n_hot == 0 || (hot && slots), MIXEDKV_INVALID, "hot or slots is NULL");

        const auto & kv    = get_group(ctx, group);
        const auto * mixed = dynamic_cast<const llama_kv_cache_mixed *>(&kv);
        const auto   rows  = find_range(kv, seq_id, p0, p1, n_rows, n_hot);

        require(n_rows == 0 || kv.has_cell_ext() == (xy != nullptr), MIXEDKV_INVALID, "xy is for models with M-RoPE");

        for (size_t i = 0; i < rows.size(); ++i) {
            positions[i] = rows[i].pos;
            if (xy) {
                const auto & ext = kv.get_cells(seq_id).ext_get(rows[i].cell);
                xy[2 * i]        = ext.x;
                xy[2 * i + 1]    = ext.y;
            }
            if (rows[i].slot >= 0) {
                *hot++   = i;
                *slots++ = mixed->get_own_slot(seq_id, rows[i].slot);
            }
        }
    });
}

mixedkv_status mixedkv_export_layer(llama_context * ctx, int32_t seq_id, int32_t il, int32_t p0, int32_t p1,
                                    uint32_t n_rows, uint32_t n_hot, void * k, void * v, void * k_hot, void * v_hot) {
    return guarded([&] {
        check_blocks(ctx, seq_id);
        require(n_rows == 0 || (k && v), MIXEDKV_INVALID, "k or v is NULL");
        require(n_hot == 0 || (k_hot && v_hot), MIXEDKV_INVALID, "k_hot or v_hot is NULL");

        const auto & kv   = find_layer(ctx, il);
        const auto   rows = find_range(kv, seq_id, p0, p1, n_rows, n_hot);

        llama_kv_rows_export(kv, ctx->get_model().hparams, il, seq_id, rows, k, v, k_hot, v_hot);
    });
}

namespace {

// import(context): empty, or the problem; may_wait: rows that are there may still have to be turned
template <typename F>
mixedkv_status import_with(llama_context * ctx, int32_t seq_id, const mixedkv_row_group * groups, uint32_t n_groups,
                           bool may_wait, F && import) {
    return guarded([&] {
        require(groups && n_groups > 0, MIXEDKV_INVALID, "groups is NULL or empty");
        check_blocks(ctx, seq_id);
        const bool turns_later = may_wait && can_turn_later(ctx);
        if (!turns_later) {
            settle(ctx);
        }

        const std::string problem = import(*ctx);
        require(problem.empty(), MIXEDKV_INVALID, problem);

        if (!turns_later) {
            settle(ctx); // upstream saves K as if a pending shift had been done
        }
    });
}

} // namespace

mixedkv_status mixedkv_import_rows(llama_context * ctx, int32_t seq_id, const mixedkv_row_group * groups,
                                   uint32_t n_groups, int32_t shift, int32_t drop_from) {
    return import_with(ctx, seq_id, groups, n_groups, true, [&](llama_context & to) {
        return llama_kv_rows_import(to, seq_id, groups, n_groups, shift, drop_from, true);
    });
}

mixedkv_status mixedkv_import_part(llama_context * ctx, int32_t seq_id, const mixedkv_row_group * groups,
                                   uint32_t n_groups) {
    return import_with(ctx, seq_id, groups, n_groups, true, [&](llama_context & to) {
        return llama_kv_rows_import(to, seq_id, groups, n_groups, 0, -1, false);
    });
}

mixedkv_status mixedkv_restore_window(llama_context * ctx, int32_t seq_id, const mixedkv_row_group * groups,
                                      uint32_t n_groups) {
    return import_with(ctx, seq_id, groups, n_groups, false,
                       [&](llama_context & to) { return llama_kv_rows_restore_window(to, seq_id, groups, n_groups); });
}

mixedkv_status mixedkv_fill(llama_context * ctx, int32_t seq_id, const llama_token * tokens,
                            const llama_pos * positions, uint32_t n, bool logits, int32_t last_layer, float * mass,
                            uint32_t n_mass) {
    return guarded([&] {
        require(tokens && positions, MIXEDKV_INVALID, "tokens or positions is NULL");
        require(mass || n_mass == 0, MIXEDKV_INVALID, "mass is NULL");
        check_blocks(ctx, seq_id);
        require(!llama_model_is_hybrid(&ctx->get_model()), MIXEDKV_UNSUPPORTED,
                "recurrent layers read tokens one after the other: none can be evaluated between others");

        const llama_kv_fill fill    = { seq_id, tokens, positions, n, logits, last_layer, mass, n_mass };
        const std::string   problem = llama_kv_fill_problem(*ctx, fill);
        require(problem.empty(), MIXEDKV_INVALID, problem);

        const int32_t res = llama_kv_fill_decode(*ctx, fill);
        require(res != 1, MIXEDKV_NOT_AVAILABLE, "no cells are free for " + std::to_string(n) + " tokens");
        require(res == 0, MIXEDKV_INVALID,
                "llama_decode returned " + std::to_string(res) + ": is every token in the vocabulary?");
    });
}
