#include "rows/row-basis.h"

#include "rows/access.h"
#include "rows/convert.h"

#include "llama-context.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

// For tests: K as the model makes it
static bool is_equalized() {
    const char * equalize = std::getenv("MIXEDKV_EQUALIZE");
    return !equalize || strcmp(equalize, "0") != 0;
}

llama_kv_row_basis::llama_kv_row_basis(
        const llama_kv_cache & cold, const llama_model & model, const llama_hparams & hparams, bool is_mixed) :
    cold(cold), model(model), hparams(hparams) {
    if (!is_mixed) {
        return;
    }

    make_latent_rot();

    if (is_equalized()) {
        make_scales();
    }
}

size_t llama_kv_row_basis::index(int32_t il) const {
    return kv_access::get_ids(cold).at(il);
}

std::vector<uint32_t> llama_kv_row_basis::get_head_sizes() const {
    std::vector<uint32_t> res;
    for (const auto & layer : kv_access::get_layers(cold)) {
        res.push_back(hparams.n_embd_head_k(layer.il));
    }
    return res;
}

static ggml_backend_buffer_type_t get_buft(const ggml_tensor * rows) {
    return ggml_backend_buffer_get_type(rows->buffer);
}

//
// rotation
//

void llama_kv_row_basis::make_latent_rot() {
    constexpr int64_t edge = 64;

    const auto & layers = kv_access::get_layers(cold);

    const auto fits = [&](const auto & layer) {
        return !layer.v && hparams.n_embd_head_k(layer.il) % edge == 0 && hparams.n_embd_head_v(layer.il) % edge == 0;
    };
    if (!ggml_is_quantized(cold.type_k()) || layers.empty() || !std::all_of(layers.begin(), layers.end(), fits)) {
        return;
    }

    latent_ctx.reset(ggml_init({ ggml_tensor_overhead(), nullptr, true }));
    latent_rot = ggml_new_tensor_2d(latent_ctx.get(), GGML_TYPE_F32, edge, edge);
    latent_buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(latent_ctx.get(), get_buft(layers[0].k)));
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

//
// scales of K
//

void llama_kv_row_basis::make_scales() {
    const auto & layers = kv_access::get_layers(cold);

    for (const auto & layer : layers) {
        equalizer.add(llama_kv_make_scales(model, layer.il), get_buft(layer.k));
    }

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        angles.add(model, layers[ikv].il, equalizer.get(ikv));
    }
    angles.alloc(cold.get_size(), cold.get_n_stream());
}

void llama_kv_row_basis::alloc_scales() {
    equalizer.alloc(get_head_sizes());
}

void llama_kv_row_basis::alloc_for_graph() {
    std::vector<ggml_backend_buffer_type_t> bufts;
    for (const auto & layer : kv_access::get_layers(cold)) {
        bufts.push_back(get_buft(layer.k));
    }

    alloc_scales();
    angles.alloc_tensors(bufts, get_head_sizes(), kv_access::get_rot(cold, true));
}

void llama_kv_row_basis::scale_qk(ggml_context * ctx, ggml_tensor *& q, ggml_tensor *& k, int32_t il) const {
    if (get_scales(il)) {
        q = equalizer.scale_q(ctx, q, index(il));
        k = k ? equalizer.scale_k(ctx, k, index(il)) : nullptr;
    }
}

//
// the subtracted bias of cold rows of K
//

const std::vector<mixedkv::attention_pair> * llama_kv_row_basis::get_pairs(int32_t il) const {
    const auto * pairs = angles.empty() ? nullptr : &angles.get(index(il));
    return pairs && !pairs->empty() ? pairs : nullptr;
}

void llama_kv_row_basis::update_angles(const slot_info & sinfo) {
    angles_s0 = sinfo.s0;
    for (uint32_t s = 0; s < sinfo.n_stream() && !angles.empty(); ++s) {
        angles.update(model, lctx->get_cparams(), sinfo.strm[s], kv_access::get_cells(cold)[sinfo.strm[s]]);
    }
}

void llama_kv_row_basis::set_input_angles(ggml_tensor * cur, ggml_tensor * cells, const llama_ubatch & ubatch) {
    std::vector<float> data(ggml_nelements(cur));
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        angles.get_position(ubatch.pos[i], data.data() + i*cur->ne[0]);
    }
    ggml_backend_tensor_set(cur, data.data(), 0, ggml_nbytes(cur));

    angles.get_cells(angles_s0, cells);
}

ggml_tensor * llama_kv_row_basis::build_subtracted_bias(ggml_context * ctx, ggml_tensor * angles, int32_t il) const {
    ggml_tensor * res = get_pairs(il) ? this->angles.build_subtracted_bias(ctx, index(il), angles) : nullptr;

    return res ? ggml_reshape_4d(ctx, res, hparams.n_embd_head_k(il), hparams.n_head_kv(il), angles->ne[1], angles->ne[2]) : nullptr;
}
