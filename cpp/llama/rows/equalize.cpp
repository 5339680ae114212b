#include "rows/equalize.h"

#include "llama-model.h"
#include "model/stream.h"
#include "rows/compute.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

// 64 random inputs tell the RMS of two rows to 6%, a step of the scales is 41%
static constexpr int64_t N_PROBES = 64;

// scales are powers of 2^(1/2), at most 2^12: F16 rows have a range of 2^30
static constexpr int MAX_EXPONENT = 24;

//
// how large the elements of a projection are
//

// a small tensor (norm or bias) in F32, times what is there; n values or none
static bool read_vector(const ggml_tensor * t, int64_t n, std::vector<float> & res) {
    if (!t || ggml_nelements(t) != n || (t->type != GGML_TYPE_F32 && !ggml_get_type_traits(t->type)->to_float)) {
        return false;
    }

    std::vector<uint8_t> data(ggml_nbytes(t));
    ggml_backend_tensor_get(t, data.data(), 0, data.size());

    res.resize(n);
    if (t->type == GGML_TYPE_F32) {
        memcpy(res.data(), data.data(), data.size());
    } else {
        ggml_get_type_traits(t->type)->to_float(data.data(), res.data(), n);
    }

    return true;
}

[[noreturn]] static void fail() {
    throw std::runtime_error("failed to compute the scales of K from the weights: use the 'f16' cache");
}

// w x for each column of x [w->ne[0], n], by the device that holds w: weights that a backend has repacked cannot be read
static std::vector<float> project(ggml_tensor * w, const std::vector<float> & x, int64_t n) {
    const llama_stream_loan at_hand(w);

    ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(w->buffer);

    // host memory that belongs to a GPU is the CPU's to compute from
    ggml_backend_dev_t dev = ggml_backend_buft_is_host(buft) ? nullptr : ggml_backend_buft_get_device(buft);
    dev = dev ? dev : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);

    ggml_backend_ptr backend(dev ? ggml_backend_dev_init(dev, nullptr) : nullptr);
    ggml_context_ptr ctx(ggml_init({ 8*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
    if (!backend || !ctx) {
        fail();
    }

    ggml_tensor * in  = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, w->ne[0], n);
    ggml_tensor * out = ggml_mul_mat(ctx.get(), w, in);
    ggml_cgraph * gf  = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(gf, out);

    ggml_backend_buffer_ptr buf(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
    if (!buf || !ggml_backend_dev_supports_op(dev, out)) {
        fail();
    }

    ggml_backend_tensor_set(in, x.data(), 0, ggml_nbytes(in));
    if (llama_kv_compute(backend.get(), gf, ggml_nelements(w)*n) != GGML_STATUS_SUCCESS) {
        fail();
    }

    std::vector<float> res(ggml_nelements(out));
    ggml_backend_tensor_get(out, res.data(), 0, ggml_nbytes(out));

    return res;
}

// what the projection sees: random signs times the norm's weight, and at last the norm's bias
static std::vector<float> make_probes(const llama_layer & layer, int64_t n_embd) {
    std::vector<float> weight(n_embd, 1.0f);
    std::vector<float> bias(n_embd, 0.0f);

    read_vector(layer.attn_norm,   n_embd, weight);
    read_vector(layer.attn_norm_b, n_embd, bias);

    std::vector<float> res;

    uint32_t state = 1; // xorshift
    for (int64_t i = 0; i < N_PROBES*n_embd; ++i) {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        res.push_back(state & 1 ? weight[i % n_embd] : -weight[i % n_embd]);
    }
    res.insert(res.end(), bias.begin(), bias.end());

    return res;
}

// elements [first, first + n) of a bias, zeros without one
static std::vector<float> read_bias(const ggml_tensor * b, int64_t first, int64_t n) {
    std::vector<float> res;
    if (!b || ggml_nelements(b) < first + n || !read_vector(b, ggml_nelements(b), res)) {
        return std::vector<float>(n, 0.0f);
    }

    return { res.begin() + first, res.begin() + first + n };
}

// mean squares of the elements [first, first + bias.size()) of a projection [n_out, N_PROBES + 1]
static std::vector<double> mean_squares(const std::vector<float> & y, int64_t n_out, int64_t first, const std::vector<float> & bias) {
    std::vector<double> res(bias.size(), 0.0);

    for (size_t i = 0; i < bias.size(); ++i) {
        for (int64_t c = 0; c < N_PROBES; ++c) {
            res[i] += std::pow(y[c*n_out + first + i], 2)/N_PROBES;
        }
        const double constant = y[N_PROBES*n_out + first + i] + bias[i];
        res[i] += constant*constant;
    }

    return res;
}

// heads, or all of them together, are brought to a mean square of 1 and multiplied by the norm's weight
static void apply_norm(std::vector<double> & ms, const ggml_tensor * norm) {
    const int64_t n = norm ? norm->ne[0] : 0;

    std::vector<float> weight;
    if (n == 0 || ms.size() % ggml_nelements(norm) != 0 || !read_vector(norm, ggml_nelements(norm), weight)) {
        return;
    }

    for (size_t first = 0; first < ms.size(); first += n) {
        double mean = 1e-12;
        for (int64_t i = 0; i < n; ++i) {
            mean += ms[first + i]/n;
        }
        for (int64_t i = 0; i < n; ++i) {
            ms[first + i] *= std::pow(weight[(first + i) % weight.size()], 2)/mean;
        }
    }
}

//
// scales
//

// the element that RoPE rotates together with element i of a head, or i
static int64_t get_partner(const llama_hparams & hparams, uint32_t il, int64_t i) {
    const int64_t n_rot = hparams.rope_type != LLAMA_ROPE_TYPE_NONE && hparams.has_rope(il) ? hparams.n_rot(il) : 0;

    if (i >= n_rot) {
        return i;
    }

    return hparams.rope_type == LLAMA_ROPE_TYPE_NORM ? i ^ 1 : (i + n_rot/2) % n_rot;
}

// mean squares of the channels of K, and of the same channels of the query heads that share each head of K; or none
struct channels {
    std::vector<double> k;
    std::vector<double> q;

    // K's bias and mean squares without it; none where a norm comes between it and RoPE
    std::vector<float>  bias;
    std::vector<double> unbiased;
};

static channels measure(const llama_model & model, uint32_t il) {
    const auto & hparams = model.hparams;
    const auto & layer   = model.layers[il];

    const int64_t d         = hparams.n_embd_head_k(il);
    const int64_t n_k       = d*hparams.n_head_kv(il);
    const int64_t n_q       = d*hparams.n_head(il);
    const int64_t n_head_kq = hparams.n_head(il)/std::max(hparams.n_head_kv(il), 1u);

    // rows of Q and K in one tensor, or in two
    ggml_tensor * wq = layer.wqkv ? layer.wqkv : layer.wq;
    ggml_tensor * wk = layer.wqkv ? layer.wqkv : layer.wk;

    const ggml_tensor * bq = layer.wqkv && layer.wqkv_b ? layer.wqkv_b : layer.wq_b;
    const ggml_tensor * bk = layer.wqkv && layer.wqkv_b ? layer.wqkv_b : layer.wk_b;

    const bool usual = layer.wqkv ? wk->ne[1] >= n_q + n_k : wq && wk && wq->ne[1] == n_q && wk->ne[1] == n_k;
    if (!usual || wq->ne[0] != wk->ne[0] || n_k == 0 || hparams.no_alloc || !wq->buffer || !wk->buffer) {
        return {};
    }

    const auto probes = make_probes(layer, wk->ne[0]);
    const auto y_k    = project(wk, probes, N_PROBES + 1);
    const auto y_q    = wq == wk ? y_k : project(wq, probes, N_PROBES + 1);

    channels res;

    const int64_t first = wq == wk ? n_q : 0;
    const auto    bias  = read_bias(bk, bk == layer.wk_b ? 0 : n_q, n_k);

    res.k = mean_squares(y_k, wk->ne[1], first, bias);
    apply_norm(res.k, layer.attn_k_norm);

    // positions of several dimensions have no one angle
    if (bk && !layer.attn_k_norm && hparams.n_pos_per_embd() == 1) {
        res.bias     = bias;
        res.unbiased = mean_squares(y_k, wk->ne[1], first, std::vector<float>(n_k, 0.0f));
    }

    auto q = mean_squares(y_q, wq->ne[1], 0, read_bias(bq, 0, n_q));
    apply_norm(q, layer.attn_q_norm);

    res.q.assign(n_k, 0.0);
    for (int64_t i = 0; i < n_q; ++i) {
        res.q[i/(d*n_head_kq)*d + i % d] += q[i]/n_head_kq;
    }

    return res;
}

// What four bits lose of a score goes with the norm of K times that of Q, and with the best scales a pair's share of this is
// RMS of K times RMS of Q. A bias is taken from a pair while that makes the whole of a head less by at least a part:
static constexpr double LEAST_GAIN = 1.0/16;
static constexpr size_t MOST_PAIRS = 8;

// takes the biases of a head that weigh most; returns the pairs by their first elements
static std::vector<int32_t> take_biases(channels & ms, const std::vector<int64_t> & partner, size_t first) {
    const size_t d = partner.size();

    const auto norm = [&](const std::vector<double> & x, size_t i) {
        return std::sqrt(x[first + i] + (partner[i] == int64_t(i) ? 0.0 : x[first + partner[i]]));
    };

    std::vector<int32_t> res;

    while (res.size() < MOST_PAIRS) {
        double whole = 0.0;
        double most  = 0.0;
        size_t best  = 0;
        for (size_t i = 0; i < d; ++i) {
            if (partner[i] < int64_t(i)) {
                continue;
            }
            const double gain = (norm(ms.k, i) - norm(ms.unbiased, i))*norm(ms.q, i);
            whole += norm(ms.k, i)*norm(ms.q, i);
            best = gain > most ? i : best;
            most = std::max(gain, most);
        }
        if (!(most > LEAST_GAIN*whole)) {
            break;
        }
        for (const size_t i : { best, size_t(partner[best]) }) {
            ms.k[first + i] = ms.unbiased[first + i];
        }
        res.push_back(best);
    }

    return res;
}

// of all heads, those that take the same pair together
static void take_biases(channels & ms, const std::vector<int64_t> & partner, llama_kv_scales & res) {
    const size_t d      = partner.size();
    const size_t n_head = ms.bias.size()/d;

    for (size_t h = 0; h < n_head; ++h) {
        for (const int32_t i : take_biases(ms, partner, h*d)) {
            size_t j = 0;
            while (j < res.pairs.size() && res.pairs[j] != i) {
                j += 2;
            }
            if (j == res.pairs.size()) {
                res.pairs.insert(res.pairs.end(), { i, int32_t(partner[i]) });
                res.bias.resize(res.pairs.size()*n_head, 0.0f);
            }
            float * b = res.bias.data() + j*n_head + 2*h;
            b[0] = ms.bias[h*d + i];
            b[1] = partner[i] == i ? 0.0f : ms.bias[h*d + partner[i]];
        }
    }
}

static uint32_t hash(uint32_t id, const void * data, size_t size) { // FNV-1a
    for (size_t i = 0; i < size; ++i) {
        id = (id ^ ((const uint8_t *) data)[i])*16777619u;
    }
    return id;
}

llama_kv_scales llama_kv_make_scales(const llama_model & model, uint32_t il) {
    auto          ms = measure(model, il);
    const int64_t d  = model.hparams.n_embd_head_k(il);

    llama_kv_scales res;

    if (!ms.k.empty()) {
        res.id = 2166136261u;
    }

    std::vector<int64_t> partner;
    for (int64_t i = 0; i < d; ++i) {
        partner.push_back(get_partner(model.hparams, il, i));
    }

    take_biases(ms, partner, res);

    for (size_t i = 0; i < ms.k.size(); ++i) {
        const size_t p = i/d*d + partner[i % d];

        // sqrt(RMS of Q / RMS of K), in steps
        const double step     = std::round(0.5*std::log2((ms.q[i] + ms.q[p])/(ms.k[i] + ms.k[p])));
        const int    exponent = std::isfinite(step) ? (int) std::clamp<double>(step, -MAX_EXPONENT, MAX_EXPONENT) : 0;

        res.k.push_back(std::exp2( 0.5f*exponent));
        res.q.push_back(std::exp2(-0.5f*exponent));
        res.id = (res.id ^ uint32_t(exponent + MAX_EXPONENT))*16777619u;
    }

    res.id = hash(res.id, res.pairs.data(), res.pairs.size()*sizeof(res.pairs[0]));
    res.id = hash(res.id, res.bias.data(),  res.bias.size()*sizeof(res.bias[0]));

    return res;
}

//
// llama_kv_equalizer
//

void llama_kv_equalizer::add(llama_kv_scales scales, ggml_backend_buffer_type_t buft) {
    layers.push_back({ std::move(scales), buft });
}

const llama_kv_scales * llama_kv_equalizer::get(size_t ikv) const {
    return ikv < layers.size() && !layers[ikv].scales.k.empty() ? &layers[ikv].scales : nullptr;
}

void llama_kv_equalizer::alloc(const std::vector<uint32_t> & n_embd_head) {
    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        auto & layer = layers[ikv];
        if (layer.scales.k.empty()) {
            continue;
        }

        ggml_context_ptr ctx(ggml_init({ 2*ggml_tensor_overhead(), nullptr, true }));

        const int64_t d         = n_embd_head[ikv];
        const int64_t n_head_kv = layer.scales.k.size()/d;

        layer.k = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, d, n_head_kv);
        layer.q = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, d, 1, n_head_kv);

        ggml_backend_buffer_ptr buf(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), layer.buft));
        if (!buf) {
            throw std::runtime_error("failed to allocate the scales of the KV cache");
        }

        ggml_backend_tensor_set(layer.k, layer.scales.k.data(), 0, ggml_nbytes(layer.k));
        ggml_backend_tensor_set(layer.q, layer.scales.q.data(), 0, ggml_nbytes(layer.q));

        bufs.emplace_back(std::move(ctx), std::move(buf));
    }
}

ggml_tensor * llama_kv_equalizer::scale_k(ggml_context * ctx, ggml_tensor * k, size_t ikv) const {
    return ggml_mul(ctx, k, layers[ikv].k);
}

ggml_tensor * llama_kv_equalizer::scale_q(ggml_context * ctx, ggml_tensor * q, size_t ikv) const {
    ggml_tensor * scale = layers[ikv].q;

    // heads that share keys share the scale
    ggml_tensor * cur = ggml_is_contiguous(q) ? q : ggml_cont(ctx, q);

    cur = ggml_reshape_4d(ctx, cur, q->ne[0], q->ne[1]/scale->ne[2], scale->ne[2], q->ne[2]);

    return ggml_reshape_3d(ctx, ggml_mul(ctx, cur, scale), q->ne[0], q->ne[1], q->ne[2]);
}
