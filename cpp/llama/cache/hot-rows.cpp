#include "cache/hot-rows.h"

#include "rows/access.h"

#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-io.h"

#include "ggml-backend.h"

#include <stdexcept>
#include <string>
#include <tuple>

using mixedkv::hot_layout;

static mixedkv::hot_window make_rule(const mixedkv_config & config) {
    if (!config.mixed) {
        return {};
    }
    return { config.threshold, config.group_size, config.sink_tokens, config.n_draft };
}

// the slots that a stream gets of the budget
static hot_layout make_layout(const llama_kv_cache & cold, const mixedkv_config & config) {
    const auto     rule      = make_rule(config);
    const uint32_t n_cells   = cold.get_size();
    const uint32_t n_stream  = cold.get_n_stream();
    const uint32_t n_seq_max = cold.get_n_seq_max();
    const uint32_t n_seq     = n_stream == 1 ? n_seq_max : 1;

    hot_layout::token_bytes bytes = {};
    for (const auto & layer : kv_access::get_layers(cold)) {
        for (const ggml_tensor * t : llama_kv_tensors(layer.k, layer.v)) {
            bytes.cold += t->nb[1];
            bytes.f16  += t->ne[0]*sizeof(ggml_fp16_t);
        }
    }

    const uint64_t least  = hot_layout::least(rule, n_seq, n_cells);
    const uint64_t budget = config.hot_budget == MIXEDKV_HOT_BUDGET_AUTO ?
        hot_layout::automatic(rule, n_seq, n_cells, bytes) : config.hot_budget/n_stream;

    if (budget < least) {
        throw std::runtime_error("hot_budget " + std::to_string(config.hot_budget) + " is less than the " +
                std::to_string(least*n_stream) + " F16 rows of one window" + (n_stream > 1 ? " of each stream" : "") + " and the sinks of "
                + std::to_string(n_seq_max) + " sequences: raise it, or lower quantization_threshold or the number of sequences");
    }

    return hot_layout::make(rule, n_seq, n_cells, budget);
}

llama_kv_hot_rows::llama_kv_hot_rows(const llama_kv_cache & cold, const llama_hparams & hparams, const mixedkv_config & config) :
    cold(cold), hparams(hparams), n_stream(cold.get_n_stream()),
    slots(kv_access::get_cells(cold), kv_access::get_streams(cold), cold.get_n_seq_max(), make_rule(config), make_layout(cold, config)),
    n_slots_max(slots.get_layout().n_slots), n_rows(hot_layout::rows(n_slots_max)) {
    std::tie(layers, bufs) = alloc(n_rows);
}

std::pair<std::vector<llama_kv_hot_rows::layer>, llama_kv_hot_rows::buffers> llama_kv_hot_rows::alloc(uint32_t n_rows) const {
    std::pair<std::vector<layer>, buffers> res;

    if (n_rows == 0) {
        return res;
    }

    const auto & cold_layers = kv_access::get_layers(cold);

    // the ring lies where the cold rows of its layer lie
    std::map<ggml_backend_buffer_type_t, ggml_context_ptr> ctxs;

    for (const auto & cold_layer : cold_layers) {
        ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(cold_layer.k->buffer);

        auto & ctx = ctxs[buft];
        if (!ctx) {
            ggml_init_params params = {
                /*.mem_size   =*/ 2u*(1 + n_stream)*cold_layers.size()*ggml_tensor_overhead(),
                /*.mem_buffer =*/ nullptr,
                /*.no_alloc   =*/ true,
            };
            ctx.reset(ggml_init(params));
            if (!ctx) {
                throw std::runtime_error("failed to create the ggml context of the F16 ring");
            }
        }

        layer ring;

        ring.k = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, cold_layer.k->ne[0], n_rows, n_stream);
        ring.v = cold_layer.v ? ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, cold_layer.v->ne[0], n_rows, n_stream) : nullptr;

        for (ggml_tensor * t : llama_kv_tensors(ring.k, ring.v)) {
            ggml_format_name(t, "ring_%s_l%d", t == ring.k ? "k" : "v", cold_layer.il);

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

const llama_kv_hot_rows::layer & llama_kv_hot_rows::get_layer(int32_t il) const {
    return layers[kv_access::get_ids(cold).at(il)];
}

size_t llama_kv_hot_rows::get_bytes(int32_t il) const {
    if (!has_rows()) {
        return 0;
    }

    const auto & ring = get_layer(il);

    return ggml_nbytes(ring.k) + (ring.v ? ggml_nbytes(ring.v) : 0);
}

void llama_kv_hot_rows::add_memory(std::map<ggml_backend_buffer_type_t, size_t> & memory) const {
    for (const auto & [ctx, buf] : bufs) {
        ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(buf.get());

        memory[buft] += hparams.no_alloc ?
            ggml_backend_alloc_ctx_tensors_from_buft_size(ctx.get(), buft) :
            ggml_backend_buffer_get_size(buf.get());
    }
}

//
// sequence operations
//

void llama_kv_hot_rows::clear(bool data) {
    slots.clear();

    if (data) {
        for (auto & [_, buf] : bufs) {
            ggml_backend_buffer_clear(buf.get(), 0);
        }
    }
}

void llama_kv_hot_rows::clear_unused() {
    const uint32_t n_slots = has_rows() ? slots.get_layout().n_slots : 0; // pages behind them may have gone back to the system

    for (uint32_t s = 0; s < n_stream && n_slots > 0; ++s) {
        for (const auto & ring : layers) {
            for (ggml_tensor * t : ring.stream(s)) {
                for (uint32_t slot = 0; slot < n_slots; ++slot) {
                    if (slots.get_ring(s).cell_of(slot) < 0) {
                        ggml_backend_tensor_memset(t, 0, slot*t->nb[1], t->nb[1]);
                    }
                }
                ggml_backend_tensor_memset(t, 0, get_trash_row()*t->nb[1], t->nb[1]);
            }
        }
    }
}

void llama_kv_hot_rows::copy_stream(uint32_t src, uint32_t dst) {
    for (const auto & ring : layers) {
        const auto to = ring.stream(dst);
        auto       it = to.begin();
        for (ggml_tensor * t : ring.stream(src)) {
            ggml_backend_tensor_copy(t, *it++);
        }
    }
}

//
// graph
//

static ggml_tensor * ring_view(ggml_context * ctx, ggml_tensor * t, int64_t n_embd_head, int64_t n_head_kv, uint32_t s0, uint32_t s1) {
    return ggml_view_4d(ctx, t,
            n_embd_head, n_head_kv, t->ne[1], s1 - s0 + 1,
            ggml_row_size(t->type, n_embd_head), t->nb[1], t->nb[2], s0*t->nb[2]);
}

ggml_tensor * llama_kv_hot_rows::get_k(ggml_context * ctx, int32_t il, const slot_info & sinfo) const {
    return ring_view(ctx, get_layer(il).k, hparams.n_embd_head_k(il), hparams.n_head_kv(il), sinfo.s0, sinfo.s1);
}

ggml_tensor * llama_kv_hot_rows::get_v(ggml_context * ctx, int32_t il, const slot_info & sinfo) const {
    const auto & ring = get_layer(il);
    return ring_view(ctx, ring.v ? ring.v : ring.k, hparams.n_embd_head_v(il), hparams.n_head_kv(il), sinfo.s0, sinfo.s1);
}

static ggml_tensor * ring_store(ggml_context * ctx, ggml_tensor * ring, ggml_tensor * cur, ggml_tensor * idxs) {
    cur  = ggml_reshape_2d(ctx, cur,  ring->ne[0], cur->ne[2]);
    ring = ggml_reshape_2d(ctx, ring, ring->ne[0], ring->ne[1]*ring->ne[2]);
    return ggml_set_rows(ctx, ring, cur, idxs);
}

ggml_tensor * llama_kv_hot_rows::cpy_k(ggml_context * ctx, ggml_tensor * cur, ggml_tensor * idxs, int32_t il) const {
    return ring_store(ctx, get_layer(il).k, cur, idxs);
}

ggml_tensor * llama_kv_hot_rows::cpy_v(ggml_context * ctx, ggml_tensor * cur, ggml_tensor * idxs, int32_t il) const {
    return ring_store(ctx, get_layer(il).v, cur, idxs);
}

//
// state
//

void llama_kv_hot_rows::state_write(
        llama_io_write_i & io, uint32_t strm, llama_seq_id seq_id, const std::vector<uint32_t> & cells) const {
    const auto write_u32 = [&](uint32_t value) { io.write(&value, sizeof(value)); };

    std::vector<uint32_t> ordinals;
    std::vector<uint32_t> saved;

    for (uint32_t i = 0; i < cells.size(); ++i) {
        const int32_t slot = slots.get_ring(strm).slot_of(cells[i]);
        if (slot >= 0) {
            ordinals.push_back(i);
            saved.push_back(slot);
        }
    }

    write_u32(ordinals.size());
    for (size_t i = 0; i < ordinals.size(); ++i) {
        write_u32(ordinals[i]);
        write_u32(slots.get_own_slot(seq_id == -1 ? slots.get_seq(strm, cells[ordinals[i]]) : seq_id, saved[i]));
    }

    for (const auto & layer : layers) {
        for (const uint32_t slot : saved) {
            for (ggml_tensor * t : layer.stream(strm)) {
                io.write_tensor(t, slot*t->nb[1], t->nb[1]);
            }
        }
    }
}

void llama_kv_hot_rows::state_read(llama_io_read_i & io, uint32_t strm, llama_seq_id seq_id, const std::vector<uint32_t> & cells) {
    const auto read_u32 = [&]() {
        uint32_t value;
        io.read(&value, sizeof(value));
        return value;
    };

    const uint32_t n_hot = read_u32();

    if (n_hot > cells.size()) {
        throw std::runtime_error("failed to restore the KV cache: more F16 rows than tokens");
    }

    if (n_hot > 0 && !has_rows()) {
        throw std::runtime_error("failed to restore the KV cache: it was saved with F16 rows, and this cache has room for none "
                "(quantization_threshold and sink_tokens are 0)");
    }

    const auto & ring = slots.get_ring(strm);

    std::vector<uint32_t> hot(n_hot);
    std::vector<uint32_t> wanted(n_hot);

    for (uint32_t i = 0, next = 0; i < n_hot; ++i) {
        const uint32_t ordinal = read_u32();
        if (ordinal < next || ordinal >= cells.size()) {
            throw std::runtime_error("failed to restore the KV cache: F16 rows are out of order");
        }
        next = ordinal + 1;

        if (kv_access::get_cells(cold)[strm].is_empty(cells[ordinal]) || ring.slot_of(cells[ordinal]) >= 0) {
            throw std::runtime_error("failed to restore the KV cache: an F16 row without a token of its own");
        }

        hot[i]    = cells[ordinal];
        wanted[i] = read_u32();
    }

    slots.restore(strm, seq_id, hot, wanted);

    for (const auto & layer : layers) {
        for (const uint32_t cell : hot) {
            const uint32_t row = ring.slot_of(cell) >= 0 ? ring.slot_of(cell) : get_trash_row();
            for (ggml_tensor * t : layer.stream(strm)) {
                io.read_tensor(t, row*t->nb[1], t->nb[1]);
            }
        }
    }
}
