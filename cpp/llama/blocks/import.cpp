#include "blocks/import.h"

#include "blocks/check.h"
#include "blocks/view.h"
#include "cache/mixed.h"
#include "rows/access.h"
#include "rows/convert.h"

#include "llama-model.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>

// a group, or the part of it that goes in, and the cells that it goes to
struct placement {
    llama_context &   ctx;
    llama_kv_cache &  kv;
    mixedkv_row_group group;

    // of a part
    std::vector<int32_t>            hot;
    std::vector<mixedkv_layer_rows> layers;

    // of layers whose rows have other scales than the cache, by layer
    std::map<int32_t, llama_kv_scales> scales;

    // rows of the sequence below this position make room too
    llama_pos forget = 0;

    llama_kv_cache::slot_info sinfo;

    const std::vector<uint32_t> & cells() const { return sinfo.idxs[0]; }
};

static void import_rows(ggml_tensor * t, const std::vector<uint32_t> & cells, const uint8_t * rows) {
    for (size_t i = 0, n; i < cells.size(); i += n) {
        for (n = 1; i + n < cells.size() && cells[i + n] == cells[i] + n; ++n) {
        }
        ggml_backend_tensor_set(t, rows + i*t->nb[1], cells[i]*t->nb[1], n*t->nb[1]);
    }
}

static void import_columns(ggml_tensor * t, int64_t n_embd, const std::vector<uint32_t> & cells, const uint8_t * rows) {
    const size_t size = ggml_type_size(t->type);

    std::vector<uint8_t> column(cells.size()*size);

    for (int64_t j = 0; j < n_embd; ++j) {
        for (size_t i = 0; i < cells.size(); ++i) {
            memcpy(column.data() + i*size, rows + (i*n_embd + j)*size, size);
        }
        for (size_t i = 0, n; i < cells.size(); i += n) {
            for (n = 1; i + n < cells.size() && cells[i + n] == cells[i] + n; ++n) {
            }
            ggml_backend_tensor_set(t, column.data() + i*size, (j*t->ne[1] + cells[i])*size, n*size);
        }
    }
}

// K, and V unless keys are all that is stored (MLA)
static std::vector<bool> kinds_of(const mixedkv_layer_rows & rows) {
    return rows.n_embd_head_v == 0 ? std::vector<bool>{ true } : std::vector<bool>{ true, false };
}

// K or V of a layer in a block, and what the cache makes of it
struct source {
    llama_kv_row_layer  layer;
    llama_kv_row_format format;
    llama_kv_row_format cold;
    int64_t             n_embd;
    const uint8_t *     rows;
    const uint8_t *     hot;
};

static source get_source(const placement & place, const mixedkv_layer_rows & rows, bool is_k) {
    const auto & kv = place.kv;

    source res = { { place.ctx.get_model(), place.ctx.get_cparams(), uint32_t(rows.il) }, {}, {}, 0, nullptr, nullptr };

    res.format = is_k ? llama_kv_row_format{ rows.type_k, rows.rotation_k } : llama_kv_row_format{ rows.type_v, rows.rotation_v };
    const auto & layer = kv_access::get_layers(kv)[kv_access::get_ids(kv).at(rows.il)];

    res.cold = { (is_k ? layer.k : layer.v)->type, uint32_t(llama_kv_rows_rotation(kv, is_k)) };
    if (is_k) {
        const auto other = place.scales.find(rows.il);
        res.cold.scales   = llama_kv_rows_scales(kv, rows.il);
        res.format.scales = rows.equalization == 0 ? nullptr : other != place.scales.end() ? &other->second : res.cold.scales;
        res.format.cold   = true;
        res.cold.cold     = true;
    }
    res.n_embd = int64_t(rows.n_head_kv)*(is_k ? rows.n_embd_head_k : rows.n_embd_head_v);
    res.rows   = (const uint8_t *) (is_k ? rows.k : rows.v);
    res.hot    = (const uint8_t *) (is_k ? rows.k_hot : rows.v_hot);

    return res;
}

// of F16 rows beside cold ones
static llama_kv_row_format to_hot(llama_kv_row_format cold) {
    cold.type = GGML_TYPE_F16;
    cold.cold = false;
    return cold;
}

// the cold rows of the cache, from the most precise copy there is
static std::vector<uint8_t> convert_cold(const source & src, const mixedkv_row_group & group) {
    llama_kv_row_converter cold(src.layer, src.format, src.cold, src.n_embd);
    llama_kv_row_converter hot(src.layer, to_hot(src.format), src.cold, src.n_embd);

    std::vector<uint8_t> res(group.n_rows*cold.dst_size());

    cold.convert(src.rows, res.data(), group.positions, group.n_rows);

    for (uint32_t i = 0; i < group.n_hot && !cold.is_copy(); ++i) {
        hot.convert(src.hot + i*hot.src_size(), res.data() + group.hot[i]*hot.dst_size(), group.positions + group.hot[i], 1);
    }

    return res;
}

static void import_layer(const placement & place, uint32_t strm, const mixedkv_layer_rows & rows, bool is_k) {
    const auto & layer = kv_access::get_layers(place.kv)[kv_access::get_ids(place.kv).at(rows.il)];
    const auto   src   = get_source(place, rows, is_k);

    std::vector<uint8_t> converted;
    const uint8_t *      data = src.rows;

    if (!(src.format == src.cold)) {
        converted = convert_cold(src, place.group);
        data      = converted.data();
    }

    if (is_k || !kv_access::get_v_trans(place.kv)) {
        import_rows(is_k ? layer.k_stream[strm] : layer.v_stream[strm], place.cells(), data);
    } else {
        import_columns(layer.v_stream[strm], src.n_embd, place.cells(), data);
    }
}

// for each row the ring slot that it would like, or none: its cold row holds all that is known of it
static std::vector<int32_t> wanted_slots(const placement & place) {
    const auto & group = place.group;

    bool better = false;
    for (uint32_t i = 0; i < group.n_layers; ++i) {
        for (const bool is_k : kinds_of(group.layers[i])) {
            const auto src = get_source(place, group.layers[i], is_k);
            better = better || ggml_type_size(src.format.type)*ggml_blck_size(src.cold.type) >
                               ggml_type_size(src.cold.type)*ggml_blck_size(src.format.type);
        }
    }

    std::vector<int32_t> res(group.n_rows, better ? llama_kv_hot_slots::any_slot : mixedkv::hot_ring::none);

    for (uint32_t i = 0; i < group.n_hot; ++i) {
        res[group.hot[i]] = group.slots[i];
    }

    return res;
}

// F16 rows of `rows` of the group, which have these cells: from their F16 copy where there is one. False when the ring has no
// room for one of them.
static bool import_hot(
        const placement & place, llama_seq_id seq_id, llama_kv_cache_mixed & kv,
        const std::vector<int32_t> & rows, const std::vector<uint32_t> & cells, const std::vector<int32_t> & wanted) {
    const auto & group = place.group;
    const auto   strm  = kv.get_stream(seq_id);
    const auto   slots = kv.get_hot().adopt(seq_id, cells, wanted);

    for (uint32_t il = 0; il < group.n_layers; ++il) {
        for (const bool is_k : kinds_of(group.layers[il])) {
            const auto src  = get_source(place, group.layers[il], is_k);
            auto *     ring = is_k ? kv.get_hot().get_k_stream(group.layers[il].il, strm) :
                                     kv.get_hot().get_v_stream(group.layers[il].il, strm);

            const llama_kv_row_format dst = to_hot(src.cold);

            llama_kv_row_converter from_hot (src.layer, to_hot(src.format), dst, src.n_embd);
            llama_kv_row_converter from_cold(src.layer, src.format, dst, src.n_embd);

            std::vector<uint8_t> row(from_hot.dst_size());

            for (size_t i = 0; i < rows.size(); ++i) {
                const auto * hot = std::lower_bound(group.hot, group.hot + group.n_hot, rows[i]);
                if (slots[i] < 0) {
                    continue;
                }
                if (hot < group.hot + group.n_hot && *hot == rows[i]) {
                    from_hot.convert(src.hot + (hot - group.hot)*from_hot.src_size(), row.data(), group.positions + rows[i], 1);
                } else {
                    from_cold.convert(src.rows + rows[i]*from_cold.src_size(), row.data(), group.positions + rows[i], 1);
                }
                ggml_backend_tensor_set(ring, row.data(), slots[i]*ring->nb[1], ring->nb[1]);
            }
        }
    }

    return std::find(slots.begin(), slots.end(), mixedkv::hot_ring::none) == slots.end();
}

// of rows that are there; those that have a slot keep it
static bool restore_hot(const placement & place, llama_seq_id seq_id, llama_kv_cache_mixed & kv) {
    const auto & group = place.group;

    std::vector<int32_t>  rows;
    std::vector<uint32_t> cells;
    std::vector<int32_t>  wanted;

    for (uint32_t i = 0; i < group.n_hot; ++i) {
        const int64_t cell = llama_kv_rows_cell(kv.get_cells(seq_id), seq_id, group, group.hot[i]);
        if (cell < 0) {
            continue; // a sliding window has left it: a sink, which no query sees any more
        }
        if (kv.get_hot().get_slots().get_ring(kv.get_stream(seq_id)).slot_of(cell) < 0) {
            rows.push_back(group.hot[i]);
            cells.push_back(cell);
            wanted.push_back(group.slots[i]);
        }
    }

    return import_hot(place, seq_id, kv, rows, cells, wanted);
}

// the lowest ones, so that where rows lie does not depend on what was there before
static std::vector<uint32_t> empty_cells(const llama_kv_cells & cells, uint32_t n) {
    std::vector<uint32_t> res;

    for (uint32_t i = 0; i < cells.size() && res.size() < n; ++i) {
        if (cells.is_empty(i)) {
            res.push_back(i);
        }
    }

    return res;
}

static void import_group(llama_context & ctx, placement & place, llama_seq_id seq_id, llama_pos shift) {
    const auto & group = place.group;
    const auto   strm  = place.kv.get_stream(seq_id);
    auto &       cells = kv_access::get_cells(place.kv)[strm];

    place.sinfo.s0   = strm;
    place.sinfo.s1   = strm;
    place.sinfo.strm = { llama_seq_id(strm) };
    place.sinfo.idxs = { empty_cells(cells, group.n_rows) };

    llama_batch_allocr balloc(ctx.get_model().hparams.n_pos_per_embd());
    llama_ubatch       ubatch = balloc.ubatch_reserve(group.n_rows, 1);

    ubatch.seq_id_unq[0] = seq_id;
    for (uint32_t i = 0; i < group.n_rows; ++i) {
        ubatch.pos[i]      = group.positions[i];
        if (group.xy) {
            ubatch.pos[i + group.n_rows]   = group.xy[2*i + 1];
            ubatch.pos[i + group.n_rows*2] = group.xy[2*i];
        }
        ubatch.n_seq_id[i] = 1;
        ubatch.seq_id[i]   = &seq_id;
    }

    auto * mixed = dynamic_cast<llama_kv_cache_mixed *>(&place.kv);
    if (mixed) {
        llama_kv_cache::slot_info_vec_t sinfos = { place.sinfo };
        mixed->place(sinfos, { ubatch });
        place.sinfo = sinfos[0];
        mixed->touch_rows(strm, place.cells());
    }

    place.kv.apply_ubatch(place.sinfo, ubatch);

    for (const uint32_t cell : place.cells()) {
        if (shift != 0) {
            cells.pos_add(cell, shift);
        }
        ctx.hooks.validity.mark_unverified(place.kv, strm, cell); // until the caller says more
    }

    for (uint32_t il = 0; il < group.n_layers; ++il) {
        for (const bool is_k : kinds_of(group.layers[il])) {
            import_layer(place, strm, group.layers[il], is_k);
        }
    }

    if (mixed && mixed->get_hot().has_rows()) {
        std::vector<int32_t> rows(place.group.n_rows);
        std::iota(rows.begin(), rows.end(), 0);
        import_hot(place, seq_id, *mixed, rows, place.cells(), wanted_slots(place));
    }
}

// only the rows that the token after the block reads
static void trim(placement & place, llama_pos shift) {
    auto & group = place.group;

    const llama_pos next = group.positions[group.n_rows - 1] + 1 + shift;

    uint32_t rows = 0;
    while (kv_access::is_masked(place.kv, group.positions[rows] + shift, next)) {
        ++rows;
    }

    uint32_t n_hot = 0;
    for (uint32_t i = 0; i < group.n_hot; ++i) {
        if (group.hot[i] >= int32_t(rows)) {
            place.hot.push_back(group.hot[i] - rows);
        } else {
            ++n_hot;
        }
    }

    for (uint32_t i = 0; i < group.n_layers; ++i) {
        mixedkv_layer_rows layer = group.layers[i];

        const int64_t n_k = int64_t(layer.n_head_kv)*layer.n_embd_head_k;
        const int64_t n_v = int64_t(layer.n_head_kv)*layer.n_embd_head_v;

        layer.k     = (const uint8_t *) layer.k     + rows*ggml_row_size(layer.type_k, n_k);
        layer.v     = (const uint8_t *) layer.v     + rows*ggml_row_size(layer.type_v, n_v);
        layer.k_hot = (const uint8_t *) layer.k_hot + n_hot*ggml_row_size(GGML_TYPE_F16, n_k);
        layer.v_hot = (const uint8_t *) layer.v_hot + n_hot*ggml_row_size(GGML_TYPE_F16, n_v);

        place.layers.push_back(layer);
    }

    place.forget = group.positions[rows] + shift;

    group.positions += rows;
    group.xy         = group.xy ? group.xy + 2*rows : nullptr;
    group.slots     += n_hot;
    group.n_rows    -= rows;
    group.n_hot      = place.hot.size();
    group.hot        = place.hot.data();
    group.layers     = place.layers.data();
}

// cells that are empty, or will be
static uint32_t count_room(const placement & place, llama_seq_id seq_id, llama_pos drop_from) {
    const auto & cells = place.kv.get_cells(seq_id);

    uint32_t res = cells.size() - cells.get_used();

    for (const auto & [pos, cell] : cells.seq_pos_get(seq_id)) {
        const bool goes = pos < place.forget || (drop_from >= 0 && pos >= drop_from);
        res += goes && cells.seq_count(cell) == 1;
    }

    return res;
}

// Layers with a sliding window keep rows until others need their cells: what neither the last token of a sequence nor the
// next one sees makes room.
static void drop_unseen(llama_kv_cache & kv, uint32_t strm) {
    for (llama_seq_id seq_id = 0; seq_id < (llama_seq_id) kv.get_n_seq_max(); ++seq_id) {
        if (kv.get_stream(seq_id) != strm) {
            continue;
        }

        const auto & cells = kv.get_cells(seq_id);
        const auto & rows  = cells.seq_pos_get(seq_id);

        const auto seen = std::find_if(rows.begin(), rows.end(), [&](const auto & row) {
            return !kv_access::is_masked(kv, row.first, cells.seq_pos_max(seq_id));
        });
        if (seen != rows.begin() && seen != rows.end()) {
            kv.seq_rm(seq_id, 0, seen->first);
        }
    }
}

static placement make_place(
        llama_context & ctx, llama_kv_cache & kv, llama_seq_id seq_id, const mixedkv_row_group & group, llama_pos shift, llama_pos drop_from) {
    placement res = { ctx, kv, group, {}, {}, {}, 0, {} };

    for (uint32_t i = 0; i < group.n_layers; ++i) {
        const auto & rows   = group.layers[i];
        const auto * mixed = dynamic_cast<const llama_kv_cache_mixed *>(&kv);
        if (rows.equalization != 0 && rows.equalization != (mixed ? mixed->get_basis().get_scales_id(rows.il) : 0)) {
            res.scales[rows.il] = llama_kv_make_scales(ctx.get_model(), rows.il);
        }
    }

    if (count_room(res, seq_id, drop_from) < group.n_rows && kv_access::get_n_swa(kv) > 0) {
        drop_unseen(kv, kv.get_stream(seq_id));
    }
    if (count_room(res, seq_id, drop_from) < group.n_rows && kv_access::get_n_swa(kv) > 0) {
        trim(res, shift);
    }

    return res;
}

std::string llama_kv_rows_import(
        llama_context & ctx, llama_seq_id seq_id, const mixedkv_row_group * groups, uint32_t n_groups, llama_pos shift,
        llama_pos drop_from, bool whole) {
    const std::string problem =
        llama_kv_rows_check(ctx, seq_id, groups, n_groups, shift, drop_from, whole ? LLAMA_KV_ROWS_WHOLE : LLAMA_KV_ROWS_PART);
    if (!problem.empty()) {
        return problem;
    }

    const auto caches = llama_kv_rows_groups(ctx);

    std::vector<placement> places;

    for (uint32_t i = 0; i < n_groups; ++i) {
        places.push_back(make_place(ctx, *caches[i], seq_id, groups[i], shift, drop_from));
        if (count_room(places[i], seq_id, drop_from) < places[i].group.n_rows) {
            return "no room for " + std::to_string(places[i].group.n_rows) + " more tokens in a cache of " +
                std::to_string(caches[i]->get_size()) + ": remove sequences, or make the context with a larger n_ctx";
        }
    }

    for (auto & place : places) {
        if (drop_from >= 0) {
            place.kv.seq_rm(seq_id, drop_from, -1);
        }
        place.kv.seq_rm(seq_id, 0, place.forget);
    }

    try {
        for (auto & place : places) {
            if (place.group.n_rows > 0) {
                import_group(ctx, place, seq_id, shift);
            }
        }
    } catch (...) {
        for (const auto & place : places) {
            if (place.group.n_rows > 0) {
                place.kv.seq_rm(seq_id, place.group.positions[0] + shift, place.group.positions[place.group.n_rows - 1] + shift + 1);
            }
        }
        throw;
    }

    return "";
}

static bool has_rows(const llama_kv_cache & kv, llama_seq_id seq_id, const mixedkv_row_group & group) {
    for (uint32_t i = 0; i < group.n_rows; ++i) {
        if (llama_kv_rows_cell(kv.get_cells(seq_id), seq_id, group, i) < 0) {
            return false;
        }
    }

    return true;
}

std::string llama_kv_rows_restore_window(
        llama_context & ctx, llama_seq_id seq_id, const mixedkv_row_group * groups, uint32_t n_groups) {
    const std::string problem = llama_kv_rows_check(ctx, seq_id, groups, n_groups, 0, -1, LLAMA_KV_ROWS_WINDOW);
    if (!problem.empty()) {
        return problem;
    }

    const auto caches = llama_kv_rows_groups(ctx);

    std::vector<placement> places;

    std::vector<bool> replaced; // rows of sliding windows, where the sequence lacks some

    for (uint32_t i = 0; i < n_groups; ++i) {
        const bool slides = kv_access::get_n_swa(*caches[i]) > 0 && !has_rows(*caches[i], seq_id, groups[i]);
        places.push_back(make_place(ctx, *caches[i], seq_id, groups[i], 0, slides ? 0 : -1));
        replaced.push_back(slides);
        if (slides && count_room(places[i], seq_id, 0) < places[i].group.n_rows) {
            return "no room for a sliding window of " + std::to_string(places[i].group.n_rows) + " tokens: remove sequences";
        }
    }

    bool complete = true;

    for (uint32_t i = 0; i < n_groups; ++i) {
        auto & place = places[i];
        auto * mixed = dynamic_cast<llama_kv_cache_mixed *>(&place.kv);
        if (replaced[i]) {
            place.kv.seq_rm(seq_id, -1, -1);
            import_group(ctx, place, seq_id, 0);
            ctx.hooks.validity.copy_from_full_layers(ctx.get_memory(), place.kv, seq_id);
        } else if (place.group.n_hot > 0 && mixed && mixed->get_hot().has_rows()) {
            complete = restore_hot(place, seq_id, *mixed) && complete;
        }
    }

    return complete ? "" : "no room for all F16 rows of the window: remove sequences";
}
