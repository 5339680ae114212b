#include "blocks/view.h"

#include "cache/mixed.h"
#include "hooks/support.h"
#include "rows/access.h"
#include "rows/convert.h"
#include "rows/rope-angles.h"

#include "ggml-backend.h"
#include "llama-hparams.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>

std::vector<llama_kv_cache *> llama_kv_rows_groups(llama_context & ctx) {
    std::vector<llama_kv_cache *> res;

    for (llama_kv_cache * kv : llama_kv_mixed_caches(ctx.get_memory())) {
        if (!kv->get_layer_ids().empty()) {
            res.push_back(kv);
        }
    }

    return res;
}

bool llama_kv_rows_has_layer(const llama_kv_cache & kv, int32_t il) {
    return kv_access::get_ids(kv).count(il) > 0;
}

const llama_kv_scales * llama_kv_rows_scales(const llama_kv_cache & kv, int32_t il) {
    const auto * mixed = dynamic_cast<const llama_kv_cache_mixed *>(&kv);
    return mixed ? mixed->get_basis().get_scales(il) : nullptr;
}

std::vector<mixedkv_layer_info> llama_kv_rows_layers(const llama_kv_cache & kv, const llama_hparams & hparams) {
    std::vector<mixedkv_layer_info> res;

    const auto * mixed = dynamic_cast<const llama_kv_cache_mixed *>(&kv);

    for (const auto & layer : kv_access::get_layers(kv)) {
        mixedkv_layer_info info = {};

        info.il            = layer.il;
        info.mixed         = mixed && mixed->is_mixed();
        info.fused         = mixed && mixed->get_readers().is_fused(layer.il);
        info.on_device     = mixed && mixed->get_readers().is_on_device(layer.il);
        info.in_place      = mixed && mixed->get_readers().is_in_place(layer.il);
        info.n_head_kv     = hparams.n_head_kv(layer.il);
        info.n_embd_head_k = hparams.n_embd_head_k(layer.il);
        info.n_embd_head_v = layer.v ? hparams.n_embd_head_v(layer.il) : 0; // MLA: keys only
        info.n_cells       = layer.k->ne[1]*layer.k->ne[2];
        info.type_k        = layer.k->type;
        info.type_v        = layer.v ? layer.v->type : layer.k->type;
        info.rotation_k    = llama_kv_rows_rotation(kv, true);
        info.rotation_v    = layer.v ? llama_kv_rows_rotation(kv, false) : 0;
        info.equalization  = mixed ? mixed->get_basis().get_scales_id(layer.il) : 0;
        info.bytes_cold    = ggml_nbytes(layer.k) + (layer.v ? ggml_nbytes(layer.v) : 0);
        info.bytes_hot     = mixed ? mixed->get_hot().get_bytes(layer.il) : 0;
        info.n_swa         = kv_access::get_n_swa(kv);

        res.push_back(info);
    }

    return res;
}

static bool is_finite(const ggml_tensor * t) {
    if (!t) {
        return true;
    }

    std::vector<uint8_t> data(t->nb[1]*256);
    for (int64_t i = 0, n; i < ggml_nrows(t); i += n) {
        n = std::min<int64_t>(256, ggml_nrows(t) - i);
        ggml_backend_tensor_get(t, data.data(), i*t->nb[1], n*t->nb[1]);
        if (!llama_kv_row_is_finite(t->type, data.data(), n*t->ne[0])) {
            return false;
        }
    }

    return true;
}

int32_t llama_kv_rows_find_damage(const llama_kv_cache & kv) {
    const auto * mixed = dynamic_cast<const llama_kv_cache_mixed *>(&kv);

    for (const auto & layer : kv_access::get_layers(kv)) {
        bool finite = is_finite(layer.k) && is_finite(layer.v);
        for (uint32_t s = 0; mixed && mixed->get_hot().has_rows() && s < kv.get_n_stream(); ++s) {
            finite = finite && is_finite(mixed->get_hot().get_k_stream(layer.il, s));
            finite = finite && (!layer.v || is_finite(mixed->get_hot().get_v_stream(layer.il, s)));
        }
        if (!finite) {
            return layer.il;
        }
    }

    return -1;
}

uint32_t llama_kv_rows_used(const llama_kv_cache & kv) {
    uint32_t res = 0;

    for (const auto & cells : kv_access::get_cells(kv)) {
        res += cells.get_used();
    }

    return res;
}

mixedkv_seq_info llama_kv_rows_seq(const llama_kv_cache & kv, llama_seq_id seq_id) {
    const auto * mixed = dynamic_cast<const llama_kv_cache_mixed *>(&kv);
    const auto & cells = kv.get_cells(seq_id);

    mixedkv_seq_info res = {};

    res.seq_id    = seq_id;
    res.pos_min   = cells.seq_pos_min(seq_id);
    res.pos_max   = cells.seq_pos_max(seq_id);
    res.short_from = mixed ? mixed->get_hot().get_slots().get_use().short_from[seq_id] : -1;
    res.hot_begin = mixed && mixed->is_mixed() ? mixed->get_hot().get_slots().get_window().begin(res.pos_max) : res.pos_max + 1;

    for (const auto & [pos, cell] : cells.seq_pos_get(seq_id)) {
        const bool hot = mixed && mixed->get_hot().get_slots().get_hot_slot(kv.get_stream(seq_id), cell, res.hot_begin) >= 0;
        ++(hot ? res.n_hot : res.n_cold);
    }

    return res;
}

// row `i` of a tensor of rows in F32
static void read_row(const ggml_tensor * t, int64_t i, float * dst, std::vector<uint8_t> & buf) {
    buf.resize(t->nb[1]);
    ggml_backend_tensor_get(t, buf.data(), i*t->nb[1], t->nb[1]);

    if (t->type == GGML_TYPE_F32) {
        memcpy(dst, buf.data(), t->nb[1]);
    } else {
        ggml_get_type_traits(t->type)->to_float(buf.data(), dst, t->ne[0]);
    }
}

// without flash attention upstream keeps V transposed: element j of cell i at j*n_cells + i
static void read_row_trans(const ggml_tensor * t, int64_t i, float * dst) {
    const size_t size = ggml_type_size(t->type);

    for (int64_t j = 0; j < t->ne[0]; ++j) {
        uint8_t x[8];
        ggml_backend_tensor_get(t, x, (j*t->ne[1] + i)*size, size);

        if (t->type == GGML_TYPE_F32) {
            memcpy(dst + j, x, size);
        } else {
            ggml_get_type_traits(t->type)->to_float(x, dst + j, 1);
        }
    }
}

std::vector<llama_kv_row> llama_kv_rows_find(
        const llama_kv_cache & kv, llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    const auto * mixed = dynamic_cast<const llama_kv_cache_mixed *>(&kv);
    const auto & cells = kv.get_cells(seq_id);

    const bool      ringed = mixed && mixed->get_hot().has_rows();
    const llama_pos begin  = ringed ? mixed->get_hot().get_slots().get_window().begin(cells.seq_pos_max(seq_id)) : 0;

    std::vector<llama_kv_row> res;

    const auto & rows = cells.seq_pos_get(seq_id);

    for (auto it = rows.lower_bound({ p0, 0 }); it != rows.end() && (p1 < 0 || it->first < p1); ++it) {
        res.push_back({ it->first, it->second, ringed ? mixed->get_hot().get_slots().get_hot_slot(kv.get_stream(seq_id), it->second, begin) : -1 });
    }

    return res;
}

int64_t llama_kv_rows_cell(const llama_kv_cells & cells, llama_seq_id seq_id, const mixedkv_row_group & group, uint32_t i) {
    const auto & there = cells.seq_pos_get(seq_id);

    for (auto it = there.lower_bound({ group.positions[i], 0 }); it != there.end() && it->first == group.positions[i]; ++it) {
        const auto & ext = cells.ext_get(it->second);
        if (!group.xy || (ext.x == group.xy[2*i] && ext.y == group.xy[2*i + 1])) {
            return it->second;
        }
    }

    return -1;
}

bool llama_kv_rows_read(
        const llama_context & ctx, const llama_kv_cache & kv, int32_t il, llama_seq_id seq_id, bool is_k,
        const std::vector<llama_kv_row> & rows, bool unrotate, float * data) {
    const auto & hparams = ctx.get_model().hparams;

    const auto * mixed = dynamic_cast<const llama_kv_cache_mixed *>(&kv);
    const auto & layer = kv_access::get_layers(kv)[kv_access::get_ids(kv).at(il)];

    const uint32_t strm  = kv.get_stream(seq_id);
    const int64_t  n_rot = llama_kv_rows_rotation(kv, is_k);

    const ggml_tensor * cold = is_k ? layer.k_stream[strm] : layer.v_stream[strm];
    if (!cold) {
        return false;
    }

    const int64_t n_embd = int64_t(is_k ? hparams.n_embd_head_k(il) : hparams.n_embd_head_v(il))*hparams.n_head_kv(il);

    const auto * scales = is_k ? llama_kv_rows_scales(kv, il) : nullptr;

    llama_kv_rope rope(ctx.get_model(), ctx.get_cparams(), il, scales ? scales->pairs : std::vector<int32_t>());

    std::vector<float>   row(cold->ne[0]);
    std::vector<uint8_t> buf;

    for (const auto & r : rows) {
        if (r.slot >= 0) {
            read_row(is_k ? mixed->get_hot().get_k_stream(il, strm) : mixed->get_hot().get_v_stream(il, strm), r.slot, row.data(), buf);
        } else if (!is_k && kv_access::get_v_trans(kv)) {
            read_row_trans(cold, r.cell, row.data());
        } else {
            read_row(cold, r.cell, row.data(), buf);
        }

        if (unrotate && n_rot) {
            llama_kv_rows_rotate(row.data(), n_embd, n_rot);
        }
        if (unrotate && scales) {
            llama_kv_rows_scale(row.data(), scales->q);
            if (r.slot < 0 && !scales->pairs.empty()) {
                llama_kv_subtract_bias(row.data(), hparams.n_embd_head_k(il), *scales, rope.at(r.pos), -1.0f);
            }
        }

        data = std::copy_n(row.begin(), n_embd, data);
    }

    return true;
}
