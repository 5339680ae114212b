// Context shift: keys of both stores are turned by RoPE to their new positions, see docs/decisions/003.

#include "cache/mixed.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>

// rows of one store that have moved: where they are, and by how many positions each
struct moved_rows {
    std::vector<int32_t> at;
    std::vector<int32_t> by;

    ggml_tensor * t_at = nullptr; // I32 [n]
    ggml_tensor * t_by = nullptr; // I32 [n]

    void add(int32_t row, llama_pos shift) {
        if (shift != 0) {
            at.push_back(row);
            by.push_back(shift);
        }
    }

    void make_tensors(ggml_context * ctx) {
        t_at = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, at.size());
        t_by = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, by.size());

        ggml_set_input(t_at);
        ggml_set_input(t_by);
    }

    void set_input() const {
        ggml_backend_tensor_set(t_at, at.data(), 0, ggml_nbytes(t_at));
        ggml_backend_tensor_set(t_by, by.data(), 0, ggml_nbytes(t_by));
    }
};

class llm_graph_input_mixed_shift : public llm_graph_input_i {
public:
    llm_graph_input_mixed_shift(const llama_kv_cache_mixed * kv) : kv(kv) {}

    void set_input(const llama_ubatch * ubatch) override {
        GGML_UNUSED(ubatch);

        for (const auto * rows : { &cold, &ring }) {
            if (rows->t_at && rows->t_at->buffer) {
                rows->set_input();
            }
        }
        if (k_rot && k_rot->buffer) {
            kv->set_input_k_rot(k_rot);
        }
    }

    moved_rows cold;
    moved_rows ring;

    ggml_tensor * k_rot = nullptr; // F32 [n_rot, n_rot]

    const llama_kv_cache_mixed * kv;
};

bool llama_kv_cache_mixed::has_moved() {
    for (const auto & cells : v_cells) {
        for (uint32_t i = 0; i < cells.size(); ++i) {
            if (!cells.is_empty(i) && cells.get_shift(i) != 0) {
                return true;
            }
        }
    }

    for (auto & cells : v_cells) {
        cells.reset_shift();
    }

    return false;
}

// upstream's shift multiplies K by the factor that YaRN and LongRoPE have besides the turn, although K has it already; with
// biases that are not stored hot and cold rows would differ by it
static llama_cparams without_factor(const llama_cparams & cparams, float freq_scale) {
    llama_cparams res = cparams;
    // what ggml multiplies by if there is an extrapolation
    res.yarn_attn_factor = cparams.yarn_ext_factor != 0.0f ? 1.0f/(1.0f + 0.1f*std::log(1.0f/freq_scale)) : 1.0f;
    return res;
}

// whole heads, unlike upstream: the Hadamard rotation of a quantised cache mixes all of a head, RoPE may turn a part of it
ggml_cgraph * llama_kv_cache_mixed::build_graph_shift(llm_graph_result * res, llama_context * lctx) const {
    if (!is_mixed() && !ggml_is_quantized(type_k())) {
        return llama_kv_cache::build_graph_shift(res, lctx);
    }

    auto * ctx = res->get_ctx();
    auto * gf  = res->get_gf();

    const auto & cparams = lctx->get_cparams();

    auto inp = std::make_unique<llm_graph_input_mixed_shift>(this);

    for (uint32_t strm = 0; strm < n_stream; ++strm) {
        const auto & cells = v_cells[strm];

        for (uint32_t i = 0; i < cells.size(); ++i) {
            inp->cold.add(strm*cells.size() + i, cells.is_empty(i) ? 0 : cells.get_shift(i));
        }
        const auto & slots = hot.get_slots().get_ring(strm);
        for (uint32_t slot = 0; hot.has_rows() && slot < slots.n_slots(); ++slot) {
            const int32_t cell = slots.cell_of(slot);
            inp->ring.add(strm*hot.get_n_rows() + slot, cell < 0 ? 0 : cells.get_shift(cell));
        }
    }

    for (auto * rows : { &inp->cold, &inp->ring }) {
        if (!rows->at.empty()) {
            rows->make_tensors(ctx);
        }
    }

    inp->k_rot = build_input_k_rot(ctx);

    ggml_tensor * rot = get_latent_rot() ? get_latent_rot() : inp->k_rot;

    const auto shift_rows = [&](ggml_tensor * rows, const moved_rows & moved, uint32_t il) {
        if (moved.at.empty()) {
            return;
        }

        const int64_t n_embd_head = hparams.n_embd_head_k(il);
        const int64_t n_head_kv   = hparams.n_head_kv(il);

        ggml_tensor * all = ggml_view_2d(ctx, rows, rows->ne[0], rows->ne[1]*rows->ne[2], rows->nb[1], 0);

        ggml_tensor * cur = ggml_get_rows(ctx, all, moved.t_at); // F32, whatever the type of the rows

        cur = ggml_reshape_3d(ctx, cur, n_embd_head, n_head_kv, cur->ne[1]);

        cur = rot ? llama_mul_mat_hadamard(ctx, cur, rot) : cur;

        // in place; some models have the elements that RoPE turns last in a head
        const int64_t n_rot  = hparams.n_rot(il);
        const int64_t n_nope = hparams.n_lora_kv > 0 ? n_embd_head - n_rot : 0;

        ggml_tensor * turned = ggml_view_3d(ctx, cur, n_rot, n_head_kv, cur->ne[2], cur->nb[1], cur->nb[2], n_nope*cur->nb[0]);

        const float freq_scale = model.get_rope_freq_scale(cparams, il);

        ggml_build_forward_expand(gf, build_rope_shift(without_factor(cparams, freq_scale), ctx, turned, moved.t_by, nullptr,
                model.get_rope_factors(cparams, il), model.get_rope_freq_base(cparams, il), freq_scale, il));

        cur = rot ? llama_mul_mat_hadamard(ctx, cur, rot) : cur;

        cur = ggml_reshape_2d(ctx, cur, all->ne[0], cur->ne[2]);

        ggml_build_forward_expand(gf, ggml_set_rows(ctx, all, cur, moved.t_at));
    };

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        const uint32_t il = layers[ikv].il;

        if (!hparams.has_rope(il)) {
            continue;
        }

        shift_rows(layers[ikv].k, inp->cold, il);
        if (hot.has_rows()) {
            shift_rows(hot.get_k_ring(il), inp->ring, il);
        }
    }

    res->add_input(std::move(inp));

    return gf;
}
