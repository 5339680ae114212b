// Context shift: keys of both stores are rotated by RoPE to their new positions, see docs/decisions/003.

#include "cache/mixed.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>

// rows of one store that have moved: where they are, and by how many positions each
struct llama_kv_cache_mixed::moved_rows {
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

class llama_kv_cache_mixed::shift_input : public llm_graph_input_i {
public:
    explicit shift_input(const llama_kv_cache_mixed * kv) : kv(kv) {}

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

// upstream's shift multiplies K by the factor that YaRN and LongRoPE have besides the rotation, although K has it already; with
// biases that are not stored hot and cold rows would differ by it
static llama_cparams without_factor(const llama_cparams & cparams, float freq_scale) {
    llama_cparams res = cparams;
    // what ggml multiplies by if there is an extrapolation
    res.yarn_attn_factor = cparams.yarn_ext_factor != 0.0f ? 1.0f/(1.0f + 0.1f*std::log(1.0f/freq_scale)) : 1.0f;
    return res;
}

struct llama_kv_cache_mixed::shift_graph {
    ggml_context *        ctx;
    ggml_cgraph *         gf;
    const llama_cparams & cparams;
    ggml_tensor *         rot; // that rows are rotated by, nullptr: they are not
};

std::unique_ptr<llama_kv_cache_mixed::shift_input> llama_kv_cache_mixed::find_moved(ggml_context * ctx) const {
    auto res = std::make_unique<shift_input>(this);

    for (uint32_t strm = 0; strm < n_stream; ++strm) {
        const auto & cells = v_cells[strm];

        for (uint32_t i = 0; i < cells.size(); ++i) {
            res->cold.add(strm*cells.size() + i, cells.is_empty(i) ? 0 : cells.get_shift(i));
        }
        const auto & slots = hot.get_slots().get_ring(strm);
        for (uint32_t slot = 0; hot.has_rows() && slot < slots.n_slots(); ++slot) {
            const int32_t cell = slots.cell_of(slot);
            res->ring.add(strm*hot.get_n_rows() + slot, cell < 0 ? 0 : cells.get_shift(cell));
        }
    }

    for (auto * rows : { &res->cold, &res->ring }) {
        if (!rows->at.empty()) {
            rows->make_tensors(ctx);
        }
    }
    res->k_rot = build_input_k_rot(ctx);

    return res;
}

// whole heads, unlike upstream: the Hadamard rotation of a quantised cache mixes all of a head, RoPE may rotate a part of it
void llama_kv_cache_mixed::build_shift(const shift_graph & graph, ggml_tensor * rows, const moved_rows & moved, uint32_t il) const {
    if (moved.at.empty()) {
        return;
    }

    auto * ctx = graph.ctx;

    const int64_t n_embd_head = hparams.n_embd_head_k(il);
    const int64_t n_head_kv   = hparams.n_head_kv(il);
    const int64_t n_rot       = hparams.n_rot(il);
    const int64_t n_nope      = hparams.n_lora_kv > 0 ? n_embd_head - n_rot : 0; // such heads end with what RoPE rotates
    const float   freq_scale  = model.get_rope_freq_scale(graph.cparams, il);

    ggml_tensor * all = ggml_view_2d(ctx, rows, rows->ne[0], rows->ne[1]*rows->ne[2], rows->nb[1], 0);

    ggml_tensor * cur = ggml_get_rows(ctx, all, moved.t_at); // F32, whatever the type of the rows

    cur = llama_mul_mat_hadamard(ctx, ggml_reshape_3d(ctx, cur, n_embd_head, n_head_kv, cur->ne[1]), graph.rot);

    // in place
    ggml_tensor * rotated = ggml_view_3d(ctx, cur, n_rot, n_head_kv, cur->ne[2], cur->nb[1], cur->nb[2], n_nope*cur->nb[0]);

    ggml_build_forward_expand(graph.gf, build_rope_shift(without_factor(graph.cparams, freq_scale), ctx, rotated, moved.t_by, nullptr,
            model.get_rope_factors(graph.cparams, il), model.get_rope_freq_base(graph.cparams, il), freq_scale, il));

    cur = llama_mul_mat_hadamard(ctx, cur, graph.rot);
    cur = ggml_reshape_2d(ctx, cur, all->ne[0], cur->ne[2]);

    ggml_build_forward_expand(graph.gf, ggml_set_rows(ctx, all, cur, moved.t_at));
}

ggml_cgraph * llama_kv_cache_mixed::build_graph_shift(llm_graph_result * res, llama_context * lctx) const {
    if (!is_mixed() && !ggml_is_quantized(type_k())) {
        return llama_kv_cache::build_graph_shift(res, lctx);
    }

    auto inp = find_moved(res->get_ctx());

    const shift_graph graph = { res->get_ctx(), res->get_gf(), lctx->get_cparams(), basis.get_latent_rot() ? basis.get_latent_rot() : inp->k_rot };

    for (const auto & layer : layers) {
        if (!hparams.has_rope(layer.il)) {
            continue;
        }

        build_shift(graph, layer.k, inp->cold, layer.il);
        if (hot.has_rows()) {
            build_shift(graph, hot.get_k_ring(layer.il), inp->ring, layer.il);
        }
    }

    res->add_input(std::move(inp));

    return graph.gf;
}
