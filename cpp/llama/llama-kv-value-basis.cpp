#include "llama-kv-value-basis.h"

#include "attention/attention.h"

#include <algorithm>
#include <stdexcept>

static uint32_t hash(const std::vector<float> & data) {
    uint32_t res = 2166136261u; // FNV-1a
    for (size_t i = 0; i < data.size()*sizeof(float); ++i) {
        res = (res ^ ((const uint8_t *) data.data())[i])*16777619u;
    }

    return res;
}

llama_kv_value_basis::llama_kv_value_basis(const mixedkv_value_basis & given) :
    n_embd_head(given.n_embd_head), n_head_kv(given.n_head_kv), to(n_head_kv*n_embd_head*n_embd_head), from(to.size()) {
    const int64_t n = n_embd_head;

    for (int64_t h = 0; h < n_head_kv; ++h) {
        for (int64_t i = 0; i < n; ++i) {
            const float scale = given.scales[h*n + i];
            for (int64_t j = 0; j < n; ++j) {
                const float x = given.directions[(h*n + i)*n + j];
                to  [(h*n + i)*n + j] = x/scale;
                from[(h*n + j)*n + i] = x*scale;
            }
        }
    }

    id = std::max(hash(to), 1u);
}

void llama_kv_value_basis::multiply(const std::vector<float> & matrix, float * x) const {
    const int64_t n = n_embd_head;

    std::vector<float> res(n_head_kv*n, 0.0f);
    for (int64_t i = 0; i < n_head_kv*n; ++i) {
        for (int64_t j = 0; j < n; ++j) {
            res[i] += matrix[i*n + j]*x[i/n*n + j];
        }
    }
    std::copy(res.begin(), res.end(), x);
}

void llama_kv_value_bases::add(const mixedkv_value_basis & given, ggml_backend_buffer_type_t buft, int64_t rotation) {
    layer res = { llama_kv_value_basis(given), nullptr, nullptr };

    const int64_t n = res.basis.n_embd_head;

    res.ctx.reset(ggml_init({ 2*ggml_tensor_overhead(), nullptr, true }));
    res.to   = ggml_new_tensor_3d(res.ctx.get(), GGML_TYPE_F32, n, n, res.basis.n_head_kv);
    res.from = ggml_new_tensor_3d(res.ctx.get(), GGML_TYPE_F32, n, n, res.basis.n_head_kv);
    res.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(res.ctx.get(), buft));
    if (!res.buf) {
        throw std::runtime_error("failed to allocate the basis of the values of a layer");
    }

    // the rotation is its own inverse: rows of `to` take it back, and columns of `from` bring it
    std::vector<float> to   = res.basis.to;
    std::vector<float> from = res.basis.from;
    if (rotation > 0) {
        mixedkv::rotate_row(to.data(), int64_t(to.size()), int(rotation));

        std::vector<float> column(n);
        for (int64_t i = 0; i < res.basis.n_head_kv*n; ++i) {
            float * first = from.data() + i/n*n*n + i%n;
            for (int64_t j = 0; j < n; ++j) {
                column[j] = first[j*n];
            }
            mixedkv::rotate_row(column.data(), n, int(rotation));
            for (int64_t j = 0; j < n; ++j) {
                first[j*n] = column[j];
            }
        }
    }
    ggml_backend_tensor_set(res.to,   to.data(),   0, ggml_nbytes(res.to));
    ggml_backend_tensor_set(res.from, from.data(), 0, ggml_nbytes(res.from));

    layers.push_back(std::move(res));
}

// x: [n_embd_head, n_head, n_tokens], each head times the matrix of its KV head
static ggml_tensor * multiply(ggml_context * ctx, ggml_tensor * matrix, ggml_tensor * x) {
    return ggml_permute(ctx, ggml_mul_mat(ctx, matrix, ggml_permute(ctx, x, 0, 2, 1, 3)), 0, 2, 1, 3);
}

ggml_tensor * llama_kv_value_bases::build_to(ggml_context * ctx, ggml_tensor * v, size_t ikv) const {
    return multiply(ctx, layers[ikv].to, v);
}

ggml_tensor * llama_kv_value_bases::build_from(ggml_context * ctx, ggml_tensor * out, size_t ikv) const {
    const int64_t n = layers[ikv].basis.n_embd_head;

    ggml_tensor * res = multiply(ctx, layers[ikv].from, ggml_reshape_3d(ctx, out, n, out->ne[0]/n, out->ne[1]));

    return ggml_cont_2d(ctx, res, out->ne[0], out->ne[1]);
}
