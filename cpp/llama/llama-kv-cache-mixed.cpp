#include "llama-kv-cache-mixed.h"
#include "llama-kv-rows-access.h"
#include "llama-kv-rows-convert.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-mixed-guard.h"
#include "llama-kv-mixed-trial.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <utility>

//
// llama_kv_cache_mixed
//

llama_kv_cache_mixed::llama_kv_cache_mixed(
        const mixedkv_config & config,
        const llama_model & model,
      const llama_hparams & hparams,
                ggml_type   type_k,
                ggml_type   type_v,
                     bool   v_trans,
                     bool   offload,
                     bool   unified,
                 uint32_t   kv_size,
                 uint32_t   n_seq_max,
                 uint32_t   n_pad,
                 uint32_t   n_swa,
           llama_swa_type   swa_type,
           llama_memory_t   mem_other,
    const layer_filter_cb & filter,
    const  layer_reuse_cb & reuse,
    const  layer_share_cb & share,
             const char *   name_tag) :
    llama_kv_cache(model, hparams, type_k, type_v, v_trans, offload, unified, kv_size, n_seq_max, n_pad, n_swa, swa_type,
            mem_other, filter, reuse, share, name_tag), config(config), placement(n_seq_max) {
    // llama_kv_mixed_admit has refused these with a better message; they would break the assumptions below
    if (v_trans || mem_other) {
        throw std::runtime_error("the mixed KV cache needs flash attention and rows of its own");
    }

    llama_kv_guard_rotation(*this);

    if (config.mixed) {
        rule = { config.threshold, config.group_size, config.sink_tokens, config.n_draft };
    }
    window = rule;

    last_reader.assign(layers.size(), -1);
    for (const auto & [il, ikv] : map_layer_ids) {
        last_reader[ikv] = std::max(last_reader[ikv], il);
    }

    make_rings(kv_size);
    std::tie(ring_layers, ring_bufs) = alloc_rings(n_ring);
    make_latent_rot();

    for (const auto & layer : layers) {
        const bool host = ggml_backend_buft_is_host(ggml_backend_buffer_get_type(layer.k->buffer));
        if (config.attention == MIXEDKV_ATTENTION_FUSED && !host) {
            throw std::runtime_error("attention 'fused' needs the KV cache in CPU memory, but layer " +
                    std::to_string(layer.il) + " has it elsewhere: use attention 'merged', or offload_kqv = false");
        }

        fused.push_back(host && config.attention != MIXEDKV_ATTENTION_MERGED);

        if (!fused.back() && has_ring()) {
            llama_kv_guard_flash(ggml_backend_buft_get_device(ggml_backend_buffer_get_type(layer.k->buffer)), hparams, layer.il);
        }
    }

    scratch.v_skip = config.mixed ? config.v_skip : 0.0f;

    if (config.mixed && config.equalize) {
        make_scales();
    }
    make_pages();

    begins.assign(n_seq_max, 0);
    dirty.assign(n_stream, false);

    use.step.assign(n_seq_max, 0);
    use.lost.assign(n_seq_max, -1);
    use.short_from.assign(n_seq_max, -1);
}

void llama_kv_cache_mixed::make_latent_rot() {
    constexpr int64_t edge = 64;

    const auto fits = [&](const auto & layer) {
        return !layer.v && hparams.n_embd_head_k(layer.il) % edge == 0 && hparams.n_embd_head_v(layer.il) % edge == 0;
    };
    if (!config.mixed || !ggml_is_quantized(type_k()) || layers.empty() || !std::all_of(layers.begin(), layers.end(), fits)) {
        return;
    }

    latent_ctx.reset(ggml_init({ ggml_tensor_overhead(), nullptr, true }));
    latent_rot = ggml_new_tensor_2d(latent_ctx.get(), GGML_TYPE_F32, edge, edge);
    latent_buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(latent_ctx.get(), ggml_backend_buffer_get_type(layers[0].k->buffer)));
    if (!latent_buf) {
        throw std::runtime_error("failed to allocate the rotation of the KV cache");
    }

    std::vector<float> matrix(edge*edge);
    for (int64_t i = 0; i < edge; ++i) {
        matrix[i*edge + i] = 1.0f;
        llama_kv_rows_rotate(matrix.data() + i*edge, edge, edge);
    }
    ggml_backend_tensor_set(latent_rot, matrix.data(), 0, ggml_nbytes(latent_rot));
}

void llama_kv_cache_mixed::make_scales() {
    std::vector<ggml_backend_buffer_type_t> bufts;
    std::vector<uint32_t>                   n_embd_head;

    for (const auto & layer : layers) {
        bufts.push_back(ggml_backend_buffer_get_type(layer.k->buffer));
        n_embd_head.push_back(hparams.n_embd_head_k(layer.il));
        equalizer.add(llama_kv_make_scales(model, layer.il), bufts.back());
    }

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        turns.add(model, layers[ikv].il, equalizer.get(ikv));
    }
    turns.alloc(get_size(), n_stream);

    if (is_fused()) {
        return;
    }

    // the graph scales and rotates for all layers, also for those whose node would look for biases in Q as it was
    for (const auto & [il, ikv] : map_layer_ids) {
        fused[ikv] = fused[ikv] && !get_pairs(il);
    }
    equalizer.alloc(n_embd_head);
    turns.alloc_tensors(bufts, n_embd_head, kv_access::get_rot(*this, true));
}

const std::vector<mixedkv::attention_pair> * llama_kv_cache_mixed::get_pairs(int32_t il) const {
    const auto * pairs = turns.empty() ? nullptr : &turns.get(map_layer_ids.at(il));
    return pairs && !pairs->empty() ? pairs : nullptr;
}

void llama_kv_cache_mixed::update_turns(const slot_info & sinfo) {
    turns_s0 = sinfo.s0;
    for (uint32_t s = 0; s < sinfo.n_stream() && !turns.empty(); ++s) {
        turns.update(model, lctx->get_cparams(), sinfo.strm[s], v_cells[sinfo.strm[s]]);
    }
}

void llama_kv_cache_mixed::set_input_turns(ggml_tensor * cur, ggml_tensor * cells, const llama_ubatch & ubatch) {
    std::vector<float> data(ggml_nelements(cur));
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        turns.get_position(ubatch.pos[i], data.data() + i*cur->ne[0]);
    }
    ggml_backend_tensor_set(cur, data.data(), 0, ggml_nbytes(cur));

    turns.get_cells(turns_s0, cells);
}

ggml_tensor * llama_kv_cache_mixed::build_lacking(ggml_context * ctx, ggml_tensor * turns, int32_t il) const {
    ggml_tensor * res = get_pairs(il) ? this->turns.build_lacking(ctx, map_layer_ids.at(il), turns) : nullptr;

    return res ? ggml_reshape_4d(ctx, res, hparams.n_embd_head_k(il), hparams.n_head_kv(il), turns->ne[1], turns->ne[2]) : nullptr;
}

void llama_kv_cache_mixed::make_rings(uint32_t n_cells) {
    const uint32_t n_seq = get_n_seq();

    uint64_t cold = 0;
    uint64_t f16  = 0;
    for (const auto & layer : layers) {
        for (const ggml_tensor * t : llama_kv_tensors(layer.k, layer.v)) {
            cold += t->nb[1];
            f16  += t->ne[0]*sizeof(ggml_fp16_t);
        }
    }

    const uint64_t least  = mixedkv::hot_layout::least(window, n_seq, n_cells);
    const uint64_t budget = config.hot_budget == MIXEDKV_HOT_BUDGET_AUTO ?
        mixedkv::hot_layout::automatic(window, n_seq, n_cells, cold, f16) : config.hot_budget/n_stream;

    if (budget < least) {
        throw std::runtime_error("hot_budget " + std::to_string(config.hot_budget) + " is less than the " +
                std::to_string(least*n_stream) + " F16 rows of one window" + (n_stream > 1 ? " of each stream" : "") + " and the sinks of "
                + std::to_string(n_seq_max) + " sequences: raise it, or lower quantization_threshold or the number of sequences");
    }

    layout      = mixedkv::hot_layout::make(window, n_seq, n_cells, budget);
    n_slots_max = layout.n_slots;
    n_ring      = mixedkv::hot_layout::rows(n_slots_max);

    for (uint32_t s = 0; s < n_stream; ++s) {
        rings.emplace_back(layout.n_slots, n_cells);
    }
}

std::pair<std::vector<llama_kv_cache_mixed::ring_layer>, llama_kv_cache_mixed::buffers> llama_kv_cache_mixed::alloc_rings(
        uint32_t n_rows) const {
    std::pair<std::vector<ring_layer>, buffers> res;

    if (n_rows == 0) {
        return res;
    }

    // the ring lies where the cold rows of its layer lie
    std::map<ggml_backend_buffer_type_t, ggml_context_ptr> ctxs;

    for (const auto & layer : layers) {
        ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(layer.k->buffer);

        auto & ctx = ctxs[buft];
        if (!ctx) {
            ggml_init_params params = {
                /*.mem_size   =*/ 2u*(1 + n_stream)*layers.size()*ggml_tensor_overhead(),
                /*.mem_buffer =*/ nullptr,
                /*.no_alloc   =*/ true,
            };
            ctx.reset(ggml_init(params));
            if (!ctx) {
                throw std::runtime_error("failed to create the ggml context of the F16 ring");
            }
        }

        ring_layer ring;

        ring.k = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, layer.k->ne[0], n_rows, n_stream);
        ring.v = layer.v ? ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, layer.v->ne[0], n_rows, n_stream) : nullptr;

        for (ggml_tensor * t : llama_kv_tensors(ring.k, ring.v)) {
            ggml_format_name(t, "ring_%s_l%d", t == ring.k ? "k" : "v", layer.il);

            for (uint32_t s = 0; s < n_stream; ++s) {
                (t == ring.k ? ring.k_stream : ring.v_stream).push_back(ggml_view_2d(ctx.get(), t, t->ne[0], n_rows, t->nb[1], s*t->nb[2]));
            }
        }

        res.first.push_back(std::move(ring));
    }

    for (auto & [buft, ctx] : ctxs) {
        ggml_backend_buffer_t buf;
        if (hparams.no_alloc) {
            buf = ggml_backend_buft_alloc_buffer(buft, 0);
            for (ggml_tensor * t = ggml_get_first_tensor(ctx.get()); t; t = ggml_get_next_tensor(ctx.get(), t)) {
                t->buffer = buf;
            }
        } else {
            buf = ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft);
        }
        if (!buf) {
            throw std::runtime_error("failed to allocate the F16 ring of the KV cache");
        }

        ggml_backend_buffer_clear(buf, 0); // no NaN in rows that are masked but multiplied

        LLAMA_LOG_INFO("%s: %10s F16 ring buffer size = %8.2f MiB (%u rows, %u streams)\n", __func__,
                ggml_backend_buffer_name(buf), ggml_backend_buffer_get_size(buf)/1024.0/1024.0, n_rows, n_stream);

        res.second.emplace_back(std::move(ctx), buf);
    }

    return res;
}

llama_memory_context_ptr llama_kv_cache_mixed::init_update(llama_context * lctx, bool optimize) {
    this->lctx = lctx;

    return llama_kv_cache::init_update(lctx, optimize);
}

void llama_kv_cache_mixed::place(slot_info_vec_t & sinfos, const std::vector<llama_ubatch> & ubatches) {
    if (n_stream == 1 && n_seq_max > 1 && n_swa == 0) {
        placement.place(v_cells[0], sinfos, ubatches);
    }
}

std::map<ggml_backend_buffer_type_t, size_t> llama_kv_cache_mixed::memory_breakdown() const {
    auto res = llama_kv_cache::memory_breakdown();

    for (const auto & [ctx, buf] : ring_bufs) {
        ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(buf.get());

        res[buft] += hparams.no_alloc ?
            ggml_backend_alloc_ctx_tensors_from_buft_size(ctx.get(), buft) :
            ggml_backend_buffer_get_size(buf.get());
    }
    if (!pages.empty()) {
        res[ggml_backend_cpu_buffer_type()] += pages.n_bytes();
    }

    return res;
}

//
// sequence operations
//

void llama_kv_cache_mixed::clear(bool data) {
    llama_kv_cache::clear(data);

    for (auto & ring : rings) {
        ring.clear();
    }

    std::fill(begins.begin(), begins.end(), 0);
    trim_use();

    if (data) {
        for (auto & [_, buf] : ring_bufs) {
            ggml_backend_buffer_clear(buf.get(), 0);
        }
        for (uint32_t s = 0; s < n_stream; ++s) {
            touch_stream(s);
        }
    }
}

bool llama_kv_cache_mixed::seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    const bool res = llama_kv_cache::seq_rm(seq_id, p0, p1);
    if (!llama_kv_mixed_trial::is_on()) {
        release_dead();
    }
    return res;
}

void llama_kv_cache_mixed::seq_cp(llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1) {
    llama_kv_cache::seq_cp(seq_id_src, seq_id_dst, p0, p1);

    // across streams upstream copies whole streams, cell by cell, at the next update: so do we
    const uint32_t s0 = seq_to_stream[seq_id_src];
    const uint32_t s1 = seq_to_stream[seq_id_dst];

    if (s0 != s1) {
        rings[s1] = rings[s0];
    }

    // what is known of both holds, since the target may have had rows of its own
    const llama_pos a = use.short_from[seq_id_src];
    const llama_pos b = use.short_from[seq_id_dst];

    use.short_from[seq_id_dst] = a < 0 ? b : b < 0 ? a : std::min(a, b);
    use.lost[seq_id_dst]       = std::max(use.lost[seq_id_src], use.lost[seq_id_dst]);
    use.step[seq_id_dst]       = std::max(use.step[seq_id_src], use.step[seq_id_dst]);

    release_dead();
}

void llama_kv_cache_mixed::seq_keep(llama_seq_id seq_id) {
    llama_kv_cache::seq_keep(seq_id);
    release_dead();
}

void llama_kv_cache_mixed::seq_add(llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos shift) {
    llama_kv_cache::seq_add(seq_id, p0, p1, shift);

    // cells have one position: those of other sequences may have moved as well
    for (uint32_t s = 0; s < n_seq_max; ++s) {
        if (use.lost[s] >= 0) {
            use.lost[s] += std::max(shift, 0);
        }
        if (use.short_from[s] >= 0) {
            use.short_from[s] = std::max(use.short_from[s] + std::min(shift, 0), 0);
        }
    }

    release_dead(); // cells moved below position 0 are gone
}

void llama_kv_cache_mixed::seq_div(llama_seq_id seq_id, llama_pos p0, llama_pos p1, int d) {
    llama_kv_cache::seq_div(seq_id, p0, p1, d);
    for (auto & p : use.short_from) {
        p = p < 0 ? p : p/d;
    }
    dirty.assign(n_stream, true);
}

bool llama_kv_cache_mixed::update(llama_context * lctx, bool do_shift, const stream_copy_info & sc_info) {
    if (!sc_info.empty()) {
        llama_synchronize(lctx);

        for (size_t i = 0; i < sc_info.ssrc.size(); ++i) {
            for (const auto & ring : ring_layers) {
                const auto dst = ring.stream(sc_info.sdst[i]);
                auto       to  = dst.begin();
                for (ggml_tensor * t : ring.stream(sc_info.ssrc[i])) {
                    ggml_backend_tensor_copy(t, *to++);
                }
            }
            touch_stream(sc_info.sdst[i]);
        }
    }

    touch_moved();

    return llama_kv_cache::update(lctx, do_shift && has_moved(), sc_info);
}

//
// graph
//

bool llama_kv_cache_mixed::is_fused(int32_t il) const {
    return fused[map_layer_ids.at(il)];
}

int32_t llama_kv_cache_mixed::get_layer_id(int32_t il) const {
    return layers[map_layer_ids.at(il)].il;
}

bool llama_kv_cache_mixed::is_last_reader(int32_t il) const {
    return last_reader[map_layer_ids.at(il)] == il;
}

llama_kv_node & llama_kv_cache_mixed::get_node(int32_t il) {
    return nodes.try_emplace(il, llama_kv_node{ scratch }).first->second;
}

void llama_kv_cache_mixed::set_runs(const llama_ubatch & ubatch, uint32_t n_stream) {
    auto & runs = scratch.runs;

    scratch.next_mask();
    runs.clear();
    for (uint32_t i = 0; n_stream == 1 && i < ubatch.n_tokens; ++i) {
        if (i == 0 || ubatch.seq_id[i][0] != ubatch.seq_id[i - 1][0]) {
            runs.push_back(0);
        }
        runs.back()++;
    }

    // calls of few rows choose pages, and runs of many are no such calls
    int64_t n_few = n_stream > 1 && ubatch.n_tokens/n_stream <= mixedkv::attention_few_rows ? ubatch.n_tokens : 0;
    for (const int64_t run : runs) {
        n_few += run <= mixedkv::attention_few_rows ? run : 0;
    }
    if (!pages.empty()) {
        scratch.reserve_taken(size_t(n_few)*(pages.get_n_pages() + 1));
    }
}

static ggml_tensor * ring_view(ggml_context * ctx, ggml_tensor * t, int64_t n_embd_head, int64_t n_head_kv, uint32_t s0, uint32_t s1) {
    return ggml_view_4d(ctx, t,
            n_embd_head, n_head_kv, t->ne[1], s1 - s0 + 1,
            ggml_row_size(t->type, n_embd_head), t->nb[1], t->nb[2], s0*t->nb[2]);
}

ggml_tensor * llama_kv_cache_mixed::get_k_ring(ggml_context * ctx, int32_t il, const slot_info & sinfo) const {
    ggml_tensor * k = ring_layers[map_layer_ids.at(il)].k;
    return ring_view(ctx, k, hparams.n_embd_head_k(il), hparams.n_head_kv(il), sinfo.s0, sinfo.s1);
}

ggml_tensor * llama_kv_cache_mixed::get_v_ring(ggml_context * ctx, int32_t il, const slot_info & sinfo) const {
    const auto & ring = ring_layers[map_layer_ids.at(il)];
    return ring_view(ctx, ring.v ? ring.v : ring.k, hparams.n_embd_head_v(il), hparams.n_head_kv(il), sinfo.s0, sinfo.s1);
}

static ggml_tensor * ring_store(ggml_context * ctx, ggml_tensor * ring, ggml_tensor * cur, ggml_tensor * idxs) {
    cur  = ggml_reshape_2d(ctx, cur,  ring->ne[0], cur->ne[2]);
    ring = ggml_reshape_2d(ctx, ring, ring->ne[0], ring->ne[1]*ring->ne[2]);
    return ggml_set_rows(ctx, ring, cur, idxs);
}

ggml_tensor * llama_kv_cache_mixed::cpy_k_ring(ggml_context * ctx, ggml_tensor * cur, ggml_tensor * idxs, int32_t il) const {
    return ring_store(ctx, ring_layers[map_layer_ids.at(il)].k, cur, idxs);
}

ggml_tensor * llama_kv_cache_mixed::cpy_v_ring(ggml_context * ctx, ggml_tensor * cur, ggml_tensor * idxs, int32_t il) const {
    return ring_store(ctx, ring_layers[map_layer_ids.at(il)].v, cur, idxs);
}

void llama_kv_cache_mixed::scale_qk(ggml_context * ctx, ggml_tensor *& q, ggml_tensor *& k, int32_t il) const {
    if (get_scales(il)) {
        q = equalizer.scale_q(ctx, q, map_layer_ids.at(il));
        k = k ? equalizer.scale_k(ctx, k, map_layer_ids.at(il)) : nullptr;
    }
}
