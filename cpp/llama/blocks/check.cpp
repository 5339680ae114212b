#include "blocks/check.h"

#include "blocks/view.h"
#include "cache/mixed.h"
#include "hooks/hooks.h"
#include "rows/access.h"
#include "rows/convert.h"

#include "llama-model.h"

#include <algorithm>

static std::string check_layer(const llama_kv_cache & kv, const mixedkv_layer_rows & rows, const mixedkv_layer_info & have) {
    const std::string layer = "layer " + std::to_string(rows.il) + ": ";

    if (rows.n_head_kv != have.n_head_kv || rows.n_embd_head_k != have.n_embd_head_k || rows.n_embd_head_v != have.n_embd_head_v) {
        return layer + "the block has " + std::to_string(rows.n_head_kv) + " KV heads of " + std::to_string(rows.n_embd_head_k) +
            " and " + std::to_string(rows.n_embd_head_v) + ", the model " + std::to_string(have.n_head_kv) + " of " +
            std::to_string(have.n_embd_head_k) + " and " + std::to_string(have.n_embd_head_v);
    }

    for (const bool is_k : { true, false }) {
        const ggml_type type     = is_k ? rows.type_k : rows.type_v;
        const int64_t   rotation = is_k ? rows.rotation_k : rows.rotation_v;
        const int64_t   n_embd   = int64_t(rows.n_head_kv)*(is_k ? rows.n_embd_head_k : rows.n_embd_head_v);

        if (n_embd == 0) {
            continue; // MLA: no values
        }
        if (!llama_kv_row_is_readable(type) || n_embd % ggml_blck_size(type) != 0) {
            return layer + "no rows can have type " + std::to_string(int32_t(type));
        }
        if (rotation != 0 && ((rotation & (rotation - 1)) != 0 || n_embd % rotation != 0)) {
            return layer + "rotation " + std::to_string(rotation) + " is no power of 2 that divides a row";
        }

        const ggml_tensor * t = is_k ? kv_access::get_layers(kv)[kv_access::get_ids(kv).at(rows.il)].k :
                                       kv_access::get_layers(kv)[kv_access::get_ids(kv).at(rows.il)].v;
        const bool padded = !is_k && kv_access::get_v_trans(kv) && t->ne[0] > n_embd; // as upstream pads columns
        if (t->ne[0] != n_embd && !padded) {
            return layer + "rows of the cache are padded";
        }
    }

    return "";
}

// once all else about the layer is right
static std::string check_finite(const mixedkv_row_group & group, const mixedkv_layer_rows & rows) {
    const int64_t n_k = int64_t(rows.n_head_kv)*rows.n_embd_head_k;
    const int64_t n_v = int64_t(rows.n_head_kv)*rows.n_embd_head_v;

    const bool finite =
        llama_kv_row_is_finite(rows.type_k, rows.k, n_k*group.n_rows) && llama_kv_row_is_finite(GGML_TYPE_F16, rows.k_hot, n_k*group.n_hot) &&
        (n_v == 0 || (llama_kv_row_is_finite(rows.type_v, rows.v, n_v*group.n_rows) &&
                      llama_kv_row_is_finite(GGML_TYPE_F16, rows.v_hot, n_v*group.n_hot)));

    return finite ? "" : "layer " + std::to_string(rows.il) + ": rows of the block hold values that are no numbers, so it is damaged: "
        "evaluate its tokens anew";
}

static std::string check_order(const mixedkv_row_group & group, llama_pos shift) {
    for (uint32_t i = 0; i < group.n_rows; ++i) {
        const int64_t pos = int64_t(group.positions[i]) + shift;
        const bool ascends = i == 0 || group.positions[i] > group.positions[i - 1] || (group.xy && group.positions[i] == group.positions[i - 1]);
        if (group.positions[i] < 0 || pos < 0 || pos >= INT32_MAX || !ascends) {
            return "positions must ascend from 0 at least, before and after the shift";
        }
    }

    for (uint32_t i = 0; i < group.n_hot; ++i) {
        if (group.hot[i] < 0 || uint32_t(group.hot[i]) >= group.n_rows || (i > 0 && group.hot[i] <= group.hot[i - 1])) {
            return "hot must ascend within the rows";
        }
    }

    return "";
}

// the positions must not be there yet
static std::string check_absent(
        const llama_kv_cache & kv, llama_seq_id seq_id, const mixedkv_row_group & group, llama_pos shift, llama_pos drop_from) {
    if (group.n_rows == 0) {
        return "";
    }

    const auto &    there = kv.get_cells(seq_id).seq_pos_get(seq_id);
    const llama_pos first = group.positions[0] + shift;
    const llama_pos last  = group.positions[group.n_rows - 1] + shift;
    const auto      it    = there.lower_bound({ first, 0 });

    if (it != there.end() && it->first <= last && (drop_from < 0 || it->first < drop_from)) {
        return "sequence " + std::to_string(seq_id) + " already has position " + std::to_string(it->first) + ": remove [" +
            std::to_string(first) + ", " + std::to_string(last + 1) + ") first";
    }

    return "";
}

// rows whose F16 copies come must be there
static std::string check_present(const llama_kv_cache & kv, llama_seq_id seq_id, const mixedkv_row_group & group) {
    for (uint32_t i = 0; i < group.n_rows; ++i) {
        if (llama_kv_rows_cell(kv.get_cells(seq_id), seq_id, group, i) < 0) {
            return "sequence " + std::to_string(seq_id) + " does not have position " + std::to_string(group.positions[i]) +
                ", whose F16 copy comes: import its rows first";
        }
    }

    return "";
}

// the query after the last row must find its sliding window
static std::string check_window(
        const llama_kv_cache & kv, const mixedkv_row_group & group, const mixedkv_row_group & longest, llama_pos shift) {
    if (kv_access::get_n_swa(kv) == 0 || longest.n_rows == 0) {
        return group.n_rows == longest.n_rows ? "" : "rows are missing in some layers";
    }

    const llama_pos next = longest.positions[longest.n_rows - 1] + 1;

    for (uint32_t i = 0, at = 0; i < longest.n_rows; ++i) {
        const llama_pos pos = longest.positions[i];

        while (at < group.n_rows && group.positions[at] < pos) {
            ++at;
        }
        if ((at == group.n_rows || group.positions[at] != pos) && !kv_access::is_masked(kv, pos + shift, next + shift)) {
            return "layers with a sliding window have let go of position " + std::to_string(pos) +
                ", which the next token reads: end the block where its sequence ended, or make the context with swa_full";
        }
    }

    return "";
}

static std::string check_shift(llama_context & ctx, const llama_kv_cache & kv) {
    if (!kv.get_can_shift() || !ctx.get_memory()->get_can_shift()) {
        return "llama.cpp cannot shift positions of architecture '" + ctx.get_model().arch_name() + "' in this cache: load the block where "
            "it was, or use a mixed cache, or f16";
    }

    // upstream's K-shift of a rotated uniform cache reads whole blocks of 64
    const auto & hparams = ctx.get_model().hparams;
    for (const auto & layer : kv_access::get_layers(kv)) {
        if (!dynamic_cast<const llama_kv_cache_mixed *>(&kv) && ggml_is_quantized(layer.k->type) && hparams.n_embd_head_k(layer.il) % 64 != 0) {
            return "llama.cpp cannot shift a quantised uniform cache with heads of " +
                std::to_string(hparams.n_embd_head_k(layer.il)) + ": use a mixed cache, or f16";
        }
    }

    return "";
}

// counts that no cache can have, and arrays that are not there: from here on every array can be read
static std::string check_arrays(const llama_kv_cache & kv, const mixedkv_row_group & group, size_t n_layers) {
    if (group.n_rows > 0 && kv.has_cell_ext() != (group.xy != nullptr)) {
        return group.xy ? "positions of the block have several parts (M-RoPE), those of the model one" :
                          "positions of the block have one part, those of the model several (M-RoPE)";
    }
    if (group.n_layers != n_layers) {
        return "the block has " + std::to_string(group.n_layers) + " layers in a group, the model " + std::to_string(n_layers);
    }
    if (group.n_rows > (kv_access::get_n_swa(kv) > 0 ? uint32_t(INT32_MAX) : kv.get_size())) {
        return "no room for " + std::to_string(group.n_rows) + " more tokens in a cache of " + std::to_string(kv.get_size()) +
            ": make the context with a larger n_ctx";
    }
    if (group.n_hot > group.n_rows) {
        return "n_hot must not exceed n_rows";
    }
    if ((group.n_rows > 0 && !group.positions) || (group.n_hot > 0 && (!group.hot || !group.slots)) || !group.layers) {
        return "positions, hot, slots or layers is NULL";
    }

    for (uint32_t i = 0; i < n_layers; ++i) {
        const auto & rows = group.layers[i];
        const bool has_v = rows.n_embd_head_v > 0;
        if ((group.n_rows > 0 && (!rows.k || (has_v && !rows.v))) || (group.n_hot > 0 && (!rows.k_hot || (has_v && !rows.v_hot)))) {
            return "layer " + std::to_string(rows.il) + ": k, v, k_hot or v_hot is NULL";
        }
    }

    return "";
}

// rows with other scales than the cache's are converted if the scales are known
static std::string check_scales(const llama_model & model, const mixedkv_layer_rows & rows, const mixedkv_layer_info & have) {
    if (rows.equalization == 0 || rows.equalization == have.equalization ||
        rows.equalization == llama_kv_make_scales(model, rows.il).id) {
        return "";
    }

    return "layer " + std::to_string(rows.il) + ": keys of the block are equalised by scales that this machine does not get from the "
        "model: evaluate its tokens anew";
}

static std::string check_layers(
        const llama_model & model, const llama_kv_cache & kv, const mixedkv_row_group & group, const std::vector<mixedkv_layer_info> & have) {
    for (uint32_t i = 0; i < group.n_layers; ++i) {
        const auto it = std::find_if(have.begin(), have.end(), [&](const auto & info) { return info.il == group.layers[i].il; });
        if (it == have.end()) {
            return "layer " + std::to_string(group.layers[i].il) + " has no KV cache in this group";
        }
        for (uint32_t j = 0; j < i; ++j) {
            if (group.layers[j].il == group.layers[i].il) {
                return "layer " + std::to_string(group.layers[i].il) + " is there twice";
            }
        }

        std::string res = check_layer(kv, group.layers[i], *it);
        res = res.empty() ? check_scales(model, group.layers[i], *it) : res;
        res = res.empty() ? check_finite(group, group.layers[i]) : res;
        if (!res.empty()) {
            return res;
        }
    }

    return "";
}

std::string llama_kv_rows_check(
        llama_context & ctx, llama_seq_id seq_id, const mixedkv_row_group * groups, uint32_t n_groups, llama_pos shift,
        llama_pos drop_from, llama_kv_rows_mode mode) {
    const auto caches = llama_kv_rows_groups(ctx);

    if (n_groups != caches.size()) {
        return "the block has " + std::to_string(n_groups) + " groups of layers, the cache " + std::to_string(caches.size());
    }

    std::string res;

    for (uint32_t i = 0; i < n_groups && res.empty(); ++i) {
        const auto have = llama_kv_rows_layers(*caches[i], ctx.get_model().hparams);

        res = check_arrays(*caches[i], groups[i], have.size());
        res = res.empty() ? check_layers(ctx.get_model(), *caches[i], groups[i], have) : res;
        res = res.empty() ? check_order(groups[i], shift) : res;
        if (res.empty() && mode == LLAMA_KV_ROWS_WINDOW) {
            res = kv_access::get_n_swa(*caches[i]) == 0 ? check_present(*caches[i], seq_id, groups[i]) : "";
        } else if (res.empty()) {
            res = check_absent(*caches[i], seq_id, groups[i], shift, drop_from);
        }
    }

    const auto * longest = std::max_element(groups, groups + n_groups, [](const auto & a, const auto & b) { return a.n_rows < b.n_rows; });

    for (uint32_t i = 0; i < n_groups && res.empty(); ++i) {
        res = mode == LLAMA_KV_ROWS_WHOLE ? check_window(*caches[i], groups[i], *longest, shift) : "";
        res = res.empty() && shift != 0 ? check_shift(ctx, *caches[i]) : res;
    }

    return res;
}
