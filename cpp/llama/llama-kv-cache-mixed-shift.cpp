// Context shift: keys of both stores are turned by RoPE to their new positions, see docs/decisions/003.

#include "llama-kv-cache-mixed.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>

class llm_graph_input_mixed_shift : public llm_graph_input_i {
public:
    llm_graph_input_mixed_shift(const llama_kv_cache_mixed * kv) : kv(kv) {}

    void set_input(const llama_ubatch * ubatch) override {
        GGML_UNUSED(ubatch);

        kv->set_input_k_shift(k_shift);

        if (ring_shift) {
            kv->set_input_ring_shift(ring_shift);
        }
        if (k_rot && k_rot->buffer) {
            kv->set_input_k_rot(k_rot);
        }
    }

    ggml_tensor * k_shift    = nullptr; // I32 [kv_size*n_stream]
    ggml_tensor * ring_shift = nullptr; // I32 [n_ring*n_stream]
    ggml_tensor * k_rot      = nullptr; // F32 [n_rot, n_rot]

    const llama_kv_cache_mixed * kv;
};

void llama_kv_cache_mixed::set_input_ring_shift(ggml_tensor * dst) const {
    GGML_ASSERT(ggml_backend_buffer_is_host(dst->buffer));

    int32_t * data = (int32_t *) dst->data;

    std::fill(data, data + ggml_nelements(dst), 0);

    for (uint32_t strm = 0; strm < n_stream; ++strm) {
        for (uint32_t slot = 0; slot < rings[strm].n_slots(); ++slot) {
            const int32_t cell = rings[strm].cell_of(slot);
            if (cell >= 0) {
                data[strm*n_ring + slot] = v_cells[strm].get_shift(cell);
            }
        }
    }
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

    inp->k_shift = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, int64_t(get_size())*n_stream);
    ggml_set_input(inp->k_shift);

    if (has_ring()) {
        inp->ring_shift = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, int64_t(n_ring)*n_stream);
        ggml_set_input(inp->ring_shift);
    }

    inp->k_rot = build_input_k_rot(ctx);

    const auto shift_rows = [&](ggml_tensor * rows, ggml_tensor * shift, uint32_t il) {
        const int64_t n_embd_head = hparams.n_embd_head_k(il);
        const int64_t n_head_kv   = hparams.n_head_kv(il);

        ggml_tensor * view = ggml_view_3d(ctx, rows, n_embd_head, n_head_kv, rows->ne[1]*rows->ne[2],
                ggml_row_size(rows->type, n_embd_head), rows->nb[1], 0);

        ggml_tensor * cur = ggml_cast(ctx, view, GGML_TYPE_F32);

        cur = inp->k_rot ? llama_mul_mat_hadamard(ctx, cur, inp->k_rot) : cur;

        // in place; some models have the elements that RoPE turns last in a head
        const int64_t n_rot  = hparams.n_rot(il);
        const int64_t n_nope = hparams.n_lora_kv > 0 ? n_embd_head - n_rot : 0;

        ggml_tensor * turned = ggml_view_3d(ctx, cur, n_rot, n_head_kv, cur->ne[2], cur->nb[1], cur->nb[2], n_nope*cur->nb[0]);

        const float freq_scale = model.get_rope_freq_scale(cparams, il);

        ggml_build_forward_expand(gf, build_rope_shift(without_factor(cparams, freq_scale), ctx, turned, shift, nullptr,
                model.get_rope_factors(cparams, il), model.get_rope_freq_base(cparams, il), freq_scale, il));

        cur = inp->k_rot ? llama_mul_mat_hadamard(ctx, cur, inp->k_rot) : cur;

        ggml_build_forward_expand(gf, ggml_cpy(ctx, cur, view));
    };

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        const uint32_t il = layers[ikv].il;

        if (!hparams.has_rope(il)) {
            continue;
        }

        shift_rows(layers[ikv].k, inp->k_shift, il);
        if (has_ring()) {
            shift_rows(ring_layers[ikv].k, inp->ring_shift, il);
        }
    }

    res->add_input(std::move(inp));

    return gf;
}
