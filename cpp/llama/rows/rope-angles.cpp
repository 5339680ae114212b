#include "rows/rope-angles.h"

#include "llama-cparams.h"
#include "llama-model.h"
#include "rows/compute.h"

#include <algorithm>
#include <stdexcept>

//
// llama_kv_rope
//

static constexpr int64_t N_CHUNK = 1024;

llama_kv_rope::llama_kv_rope(
        const llama_model & model, const llama_cparams & cparams, uint32_t il, const std::vector<int32_t> & pairs) :
    model(model), cparams(cparams), il(il), pairs(pairs) {
}

const float * llama_kv_rope::at(llama_pos pos) {
    const llama_pos first = pos/N_CHUNK*N_CHUNK;

    auto it = chunks.find(first);
    if (it == chunks.end()) {
        it = chunks.emplace(first, compute(first)).first;
    }

    return it->second.data() + (pos - first)*pairs.size();
}

// what RoPE makes of (1, 0) in each pair
std::vector<float> llama_kv_rope::compute(llama_pos first) const {
    const auto & hparams = model.hparams;

    const int64_t n_rot = hparams.has_rope(il) ? hparams.n_rot(il) : 0;
    const auto    is_rotated = [&](size_t i) { return pairs[i] != pairs[i + 1]; };

    std::vector<float> res(N_CHUNK*pairs.size());
    for (size_t i = 0; i < res.size(); i += 2) {
        res[i] = 1.0f;
    }
    if (n_rot == 0 || pairs.empty()) {
        return res;
    }

    ggml_backend_ptr backend(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    ggml_context_ptr ctx(ggml_init({ 8*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));

    const ggml_tensor * from    = model.get_rope_factors(cparams, il);
    ggml_tensor *       factors = from ? ggml_dup_tensor(ctx.get(), from) : nullptr;
    ggml_tensor *       in      = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, n_rot, 1, N_CHUNK);
    ggml_tensor *       pos     = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, N_CHUNK);

    ggml_tensor * out = ggml_rope_ext(ctx.get(), in, pos, factors, n_rot, hparams.rope_type, cparams.n_ctx_orig_yarn,
            model.get_rope_freq_base(cparams, il), model.get_rope_freq_scale(cparams, il),
            cparams.yarn_ext_factor, cparams.yarn_attn_factor, cparams.yarn_beta_fast, cparams.yarn_beta_slow);

    ggml_cgraph * gf = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(gf, out);

    ggml_backend_buffer_ptr buf(backend ? ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()) : nullptr);
    if (!buf) {
        throw std::runtime_error("failed to allocate what RoPE of the biases of K is computed in");
    }

    std::vector<float>   x(ggml_nelements(in), 0.0f);
    std::vector<int32_t> p(N_CHUNK);
    for (int64_t i = 0; i < N_CHUNK; ++i) {
        p[i] = first + i;
        for (size_t j = 0; j < pairs.size(); j += 2) {
            if (is_rotated(j)) {
                x[i*n_rot + pairs[j]] = 1.0f;
            }
        }
    }
    ggml_backend_tensor_set(in,  x.data(), 0, ggml_nbytes(in));
    ggml_backend_tensor_set(pos, p.data(), 0, ggml_nbytes(pos));
    if (factors) {
        std::vector<uint8_t> bytes(ggml_nbytes(from));
        ggml_backend_tensor_get(from, bytes.data(), 0, bytes.size());
        ggml_backend_tensor_set(factors, bytes.data(), 0, bytes.size());
    }

    if (llama_kv_compute(backend.get(), gf, ggml_nelements(in)) != GGML_STATUS_SUCCESS) {
        throw std::runtime_error("failed to compute RoPE of the biases of K");
    }
    ggml_backend_tensor_get(out, x.data(), 0, ggml_nbytes(out));

    for (int64_t i = 0; i < N_CHUNK; ++i) {
        for (size_t j = 0; j < pairs.size(); j += 2) {
            if (is_rotated(j)) {
                res[i*pairs.size() + j]     = x[i*n_rot + pairs[j]];
                res[i*pairs.size() + j + 1] = x[i*n_rot + pairs[j + 1]];
            }
        }
    }

    return res;
}

void llama_kv_subtract_bias(float * row, int64_t n_embd_head, const llama_kv_scales & scales, const float * angles, float sign) {
    const size_t n_pairs = scales.pairs.size()/2;
    const size_t n_head  = scales.k.size()/n_embd_head;

    for (size_t i = 0; i < n_pairs; ++i) {
        const float c = sign*angles[2*i];
        const float s = sign*angles[2*i + 1];
        for (size_t h = 0; h < n_head; ++h) {
            const float * b    = scales.bias.data() + 2*(i*n_head + h);
            float *       head = row + h*n_embd_head;

            head[scales.pairs[2*i]]     -= c*b[0] - s*b[1];
            head[scales.pairs[2*i + 1]] -= s*b[0] + c*b[1];
        }
    }
}

//
// llama_kv_rope_angles
//

void llama_kv_rope_angles::add(const llama_model & model, uint32_t il, const llama_kv_scales * scales) {
    layers.push_back({ scales, 0, {} });
    if (!scales || scales->pairs.empty()) {
        return;
    }

    const auto & hparams = model.hparams;

    const auto same = [&](const group & g) {
        const auto & a = model.layers[il];
        const auto & b = model.layers[g.il];
        return hparams.n_rot(il) == hparams.n_rot(g.il) && hparams.has_rope(il) == hparams.has_rope(g.il) &&
            hparams.is_swa(il) == hparams.is_swa(g.il) &&
            a.rope_freqs == b.rope_freqs && a.rope_long == b.rope_long && a.rope_short == b.rope_short;
    };

    auto it = std::find_if(groups.begin(), groups.end(), same);
    if (it == groups.end()) {
        it = groups.insert(it, { il, {}, 0, nullptr });
    }
    layers.back().group = it - groups.begin();

    for (size_t i = 0; i < scales->pairs.size(); i += 2) {
        bool known = false;
        for (size_t j = 0; j < it->pairs.size(); j += 2) {
            known = known || it->pairs[j] == scales->pairs[i];
        }
        if (!known) {
            it->pairs.insert(it->pairs.end(), { scales->pairs[i], scales->pairs[i + 1] });
        }
    }
}

void llama_kv_rope_angles::alloc(uint32_t n_cells, uint32_t n_stream) {
    if (groups.empty()) {
        return;
    }

    this->n_cells = n_cells;
    this->stride  = GGML_PAD(size_t(n_cells)*n_stream, 16) + 64; // whole vectors are read

    for (auto & g : groups) {
        g.first = n_rows;
        n_rows += g.pairs.size();
    }

    data.assign(size_t(n_rows)*stride, 0.0f);
    pos.assign(size_t(n_cells)*n_stream, -1);

    for (auto & layer : layers) {
        const auto * scales = layer.scales;
        for (size_t i = 0; scales && i < scales->pairs.size(); i += 2) {
            const auto & g = groups[layer.group];

            size_t j = 0;
            while (g.pairs[j] != scales->pairs[i]) {
                j += 2;
            }

            mixedkv::attention_pair pair;
            pair.first   = scales->pairs[i];
            pair.second  = scales->pairs[i + 1];
            pair.subtracted_bias = scales->bias.data() + i*(scales->bias.size()/scales->pairs.size());
            pair.cosines = row(g, j);
            pair.sines   = row(g, j + 1);
            layer.pairs.push_back(pair);
        }
    }
}

void llama_kv_rope_angles::update(const llama_model & model, const llama_cparams & cparams, uint32_t strm, const llama_kv_cells & cells) {
    for (uint32_t i = 0; !groups.empty() && i < cells.used_max_p1(); ++i) {
        const size_t cell = size_t(strm)*n_cells + i;
        if (cells.is_empty(i) || cells.pos_get(i) == pos[cell]) {
            continue;
        }

        pos[cell] = cells.pos_get(i);
        for (auto & g : groups) {
            if (!g.rope) {
                g.rope = std::make_unique<llama_kv_rope>(model, cparams, g.il, g.pairs);
            }
            const float * angles = g.rope->at(pos[cell]);
            for (size_t j = 0; j < g.pairs.size(); ++j) {
                row(g, j)[cell] = angles[j];
            }
        }
    }
}

void llama_kv_rope_angles::alloc_tensors(
        const std::vector<ggml_backend_buffer_type_t> & bufts, const std::vector<uint32_t> & n_embd_head, int rotation) {
    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        auto & layer = layers[ikv];
        if (layer.pairs.empty()) {
            continue;
        }

        const int64_t n_embd = layer.scales->k.size();

        ggml_context_ptr ctx(ggml_init({ ggml_tensor_overhead(), nullptr, true }));
        layer.tensor = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n_rows, n_embd);

        ggml_backend_buffer_ptr buf(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), bufts[ikv]));
        if (!buf) {
            throw std::runtime_error("failed to allocate the biases of the KV cache");
        }

        std::vector<float> data(n_rows*n_embd, 0.0f);
        std::vector<float> angles(2*layer.pairs.size());
        for (size_t i = 0; i < angles.size(); ++i) {
            const size_t j = (layer.pairs[i/2].cosines - this->data.data())/stride + i % 2;

            std::vector<float> x(n_embd, 0.0f);
            std::fill(angles.begin(), angles.end(), 0.0f);
            angles[i] = 1.0f;
            llama_kv_subtract_bias(x.data(), n_embd_head[ikv], *layer.scales, angles.data(), -1.0f);
            for (int64_t c = 0; c < n_embd; ++c) {
                x[c] *= layer.scales->k[c];
            }
            if (rotation) {
                mixedkv::rotate_row(x.data(), n_embd, rotation);
            }
            for (int64_t c = 0; c < n_embd; ++c) {
                data[c*n_rows + j] = x[c];
            }
        }
        ggml_backend_tensor_set(layer.tensor, data.data(), 0, ggml_nbytes(layer.tensor));

        bufs.emplace_back(std::move(ctx), std::move(buf));
    }
}

void llama_kv_rope_angles::get_position(llama_pos pos, float * out) {
    for (auto & g : groups) {
        out = std::copy_n(g.rope->at(pos), g.pairs.size(), out);
    }
}

void llama_kv_rope_angles::get_cells(uint32_t s0, ggml_tensor * dst) const {
    std::vector<float> out(ggml_nelements(dst));

    for (int64_t s = 0; s < dst->ne[2]; ++s) {
        for (uint32_t j = 0; j < n_rows; ++j) {
            const float * from = data.data() + j*stride + (s0 + s)*n_cells;
            for (int64_t i = 0; i < dst->ne[1]; ++i) {
                out[(s*dst->ne[1] + i)*n_rows + j] = from[i];
            }
        }
    }

    ggml_backend_tensor_set(dst, out.data(), 0, ggml_nbytes(dst));
}

ggml_tensor * llama_kv_rope_angles::build_subtracted_bias(ggml_context * ctx, size_t ikv, ggml_tensor * angles) const {
    if (!layers[ikv].tensor) {
        return nullptr;
    }

    ggml_tensor * res = ggml_mul_mat(ctx, layers[ikv].tensor, ggml_reshape_2d(ctx, angles, angles->ne[0], angles->ne[1]*angles->ne[2]));
    ggml_prec_set_acc(res, GGML_PREC_F32);

    return res;
}
