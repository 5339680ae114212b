// The C API: rows that are read, that leave and that come back.

#include "mixedkv-api.h"

#include "attention/thread_memory.h"
#include "blocks/export.h"
#include "blocks/fill.h"
#include "blocks/import.h"

#include "llama-model.h"

#include <algorithm>

using namespace mixedkv_api;

namespace {

// pending shifts and copies are carried out first: what is read is what the next decode reads
void settle(llama_context * ctx) {
    ctx->memory_update(false);
    ctx->synchronize();
}

// what rows are, seen from the setting that the next tokens are computed under
llama_kv_validity & get_validity(llama_context * ctx) {
    ctx->hooks.validity.use_setting(ctx->hooks.setting.get(*ctx));
    return ctx->hooks.validity;
}

// any thread may ask: while another one evaluates, it is what that evaluates under
std::string get_present_setting(llama_context * ctx) {
    auto & setting = ctx->hooks.setting;

    std::unique_lock<std::recursive_mutex> inside(ctx->hooks.busy, std::try_to_lock);
    const std::string                      latest = inside ? "" : setting.get_latest();
    if (!latest.empty()) {
        return latest;
    }
    if (!inside) {
        inside.lock();
    }

    return setting.get_text(setting.get(*ctx));
}

std::string get_row_setting(llama_context * ctx, int32_t seq_id, int32_t p) {
    const auto inside = enter(ctx, false);
    if (llama_kv_mixed_caches(ctx->get_memory()).empty()) {
        return "";
    }
    check_seq(ctx, seq_id);

    return ctx->hooks.setting.get_text(get_validity(ctx).get_setting(ctx->get_memory(), seq_id, p));
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

// import(context): empty, or the problem; may_wait: rows that are there may still have to be turned
template <typename F>
mixedkv_status import_with(llama_context * ctx, int32_t seq_id, const mixedkv_row_group * groups, uint32_t n_groups,
                           bool may_wait, F && import) {
    return guarded(ctx, [&] {
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

mixedkv_status mixedkv_read_rows(llama_context * ctx, int32_t il, int32_t seq_id, char which, int32_t p0, int32_t p1,
                                 bool unrotate, float * data, int32_t * positions, uint8_t * hot, uint32_t n_rows,
                                 uint32_t * n_rows_out) {
    return guarded(ctx, [&] {
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

mixedkv_status mixedkv_count_computed(llama_context * ctx, int32_t seq_id, int32_t p0, const llama_token * tokens,
                                      uint32_t n, int32_t * out) {
    return guarded(ctx, [&] {
        require(out && p0 >= 0 && (tokens || n == 0), MIXEDKV_INVALID, "out or tokens is NULL, or p0 is negative");
        *out = INT32_MAX;
        if (!llama_kv_mixed_caches(ctx->get_memory()).empty()) {
            check_seq(ctx, seq_id);
            settle(ctx);
            *out = get_validity(ctx).count_computed(ctx->get_memory(), seq_id, p0, tokens, n);
        }
    });
}

mixedkv_status mixedkv_get_validity(llama_context * ctx, int32_t seq_id, int32_t p0, const llama_token * tokens,
                                    uint32_t n, mixedkv_validity * out) {
    return guarded(ctx, [&] {
        require(p0 >= 0 && n <= uint32_t(INT32_MAX - p0) && ((tokens && out) || n == 0), MIXEDKV_INVALID,
                "out or tokens is NULL, or p0 is negative, or too many tokens follow it");
        std::fill_n(out, n, MIXEDKV_COMPUTED);
        if (!llama_kv_mixed_caches(ctx->get_memory()).empty()) {
            check_seq(ctx, seq_id);
            settle(ctx);
            const auto validity = get_validity(ctx).query(ctx->get_memory(), seq_id, p0, tokens, n);
            std::copy(validity.begin(), validity.end(), out);
        }
    });
}

static void check_validity(mixedkv_validity validity) {
    require(uint32_t(validity) <= MIXEDKV_UNVERIFIED, MIXEDKV_INVALID, "validity is none of mixedkv_validity");
}

mixedkv_status mixedkv_get_past(llama_context * ctx, int32_t seq_id, int32_t p0, uint32_t n, uint64_t * out) {
    return guarded(ctx, [&] {
        require((out || n == 0) && p0 >= 0 && n <= uint32_t(INT32_MAX - p0), MIXEDKV_INVALID,
                "out is NULL, or p0 is negative, or too many positions follow it");
        std::fill_n(out, n, 0);
        if (!llama_kv_mixed_caches(ctx->get_memory()).empty()) {
            check_seq(ctx, seq_id);
            settle(ctx);
            for (uint32_t i = 0; i < n; ++i) {
                out[i] = ctx->hooks.validity.get_past(ctx->get_memory(), seq_id, p0 + int32_t(i));
            }
        }
    });
}

uint64_t mixedkv_extend_past(uint64_t past, const llama_token * tokens, uint32_t n) {
    for (uint32_t i = 0; tokens && i < n; ++i) {
        past = llama_kv_validity::extend_past(past, tokens[i]);
    }
    return past;
}

mixedkv_status mixedkv_set_validity(llama_context * ctx, int32_t seq_id, int32_t p0, uint64_t past,
                                    const llama_token * tokens, uint32_t n, mixedkv_validity validity,
                                    const char * setting) {
    return guarded(ctx, [&] {
        require(p0 >= 0 && (tokens || n == 0), MIXEDKV_INVALID, "tokens is NULL, or p0 is negative");
        check_validity(validity);
        if (!llama_kv_mixed_caches(ctx->get_memory()).empty()) {
            check_seq(ctx, seq_id);
            auto &         known  = get_validity(ctx);
            const uint32_t number = setting ? ctx->hooks.setting.find_or_add(setting) : 0;
            known.record(ctx->get_memory(), seq_id, p0, past, tokens, n, validity, number);
        }
    });
}

mixedkv_status mixedkv_limit_validity(llama_context * ctx, int32_t seq_id, int32_t p0, int32_t p1,
                                      mixedkv_validity validity) {
    return guarded(ctx, [&] {
        require(p0 >= 0, MIXEDKV_INVALID, "p0 is negative");
        check_validity(validity);
        if (!llama_kv_mixed_caches(ctx->get_memory()).empty()) {
            check_seq(ctx, seq_id);
            ctx->hooks.validity.limit(ctx->get_memory(), seq_id, p0, p1, validity);
        }
    });
}

mixedkv_status mixedkv_name_model(llama_context * ctx, const char * name) {
    return guarded([&] {
        require(ctx && name, MIXEDKV_INVALID, "ctx or name is NULL");
        ctx->hooks.setting.name_model(name);
    });
}

mixedkv_status mixedkv_get_setting(llama_context * ctx, int32_t seq_id, int32_t p, const char ** out) {
    return guarded([&] {
        require(ctx && out, MIXEDKV_INVALID, "ctx or out is NULL");

        auto & text = mixedkv::thread_memory<std::string, struct get_setting_tag>();
        *out        = (text = p < 0 ? get_present_setting(ctx) : get_row_setting(ctx, seq_id, p)).c_str();
    });
}

const char * mixedkv_refused(llama_context * ctx) {
    return ctx ? ctx->hooks.validity.refused.c_str() : "";
}

mixedkv_status mixedkv_check_rows(llama_context * ctx) {
    return guarded(ctx, [&] {
        ctx->synchronize();
        for (const auto * kv : llama_kv_mixed_caches(ctx->get_memory())) {
            const int32_t il = llama_kv_rows_find_damage(*kv);
            require(il < 0, MIXEDKV_INVALID, "layer " + std::to_string(il) + " holds values that are no numbers");
        }
    });
}

mixedkv_status mixedkv_count_rows(llama_context * ctx, int32_t seq_id, uint32_t group, int32_t p0, int32_t p1,
                                  uint32_t * n_rows_out, uint32_t * n_hot_out) {
    return guarded(ctx, [&] {
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
    return guarded(ctx, [&] {
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
                *slots++ = mixed->get_hot().get_slots().get_own_slot(seq_id, rows[i].slot);
            }
        }
    });
}

mixedkv_status mixedkv_export_layer(llama_context * ctx, int32_t seq_id, int32_t il, int32_t p0, int32_t p1,
                                    uint32_t n_rows, uint32_t n_hot, void * k, void * v, void * k_hot, void * v_hot) {
    return guarded(ctx, [&] {
        check_blocks(ctx, seq_id);
        require(n_rows == 0 || (k && v), MIXEDKV_INVALID, "k or v is NULL");
        require(n_hot == 0 || (k_hot && v_hot), MIXEDKV_INVALID, "k_hot or v_hot is NULL");

        const auto & kv   = find_layer(ctx, il);
        const auto   rows = find_range(kv, seq_id, p0, p1, n_rows, n_hot);

        llama_kv_rows_export(kv, ctx->get_model().hparams, il, seq_id, rows, k, v, k_hot, v_hot);
    });
}

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
    return guarded(ctx, [&] {
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
        require(res != 2, MIXEDKV_INTERRUPTED, "the evaluation was broken off: the sequence is what it was before");
        require(res == 0, MIXEDKV_INVALID,
                "llama_decode returned " + std::to_string(res) + ": is every token in the vocabulary?");
    });
}
