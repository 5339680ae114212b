#include "graph/guard.h"

#include "attention/lm4.h"
#include "attention/tc3.h"
#include "rows/access.h"
#include "rows/convert.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

void llama_kv_guard(bool holds, const char * what) {
    if (!holds) {
        throw std::runtime_error(std::string("this llama.cpp is not the one that the mixed KV cache was written for (assumed: ") +
                what + "): build the version that vendor/pin.toml names");
    }
}

void llama_kv_guard_matrix(const float * matrix, int64_t n) {
    std::vector<float> column(n);

    bool same = true;
    for (int64_t i = 0; i < n; ++i) {
        std::fill(column.begin(), column.end(), 0.0f);
        column[i] = 1.0f;
        llama_kv_rows_rotate(column.data(), n, n);

        for (int64_t j = 0; j < n; ++j) {
            same = same && std::fabs(column[j] - matrix[j*n + i]) < 1e-6f;
        }
    }

    llama_kv_guard(same, "a cache is rotated by the Walsh-Hadamard matrix in natural order");
}

void llama_kv_guard_rotation(const llama_kv_cache & kv) {
    for (const bool is_k : { true, false }) {
        ggml_context_ptr ctx(ggml_init({ ggml_tensor_overhead(), nullptr, true }));

        ggml_tensor * rot = kv_access::build_rot(kv, is_k, ctx.get());
        if (!rot) {
            continue;
        }

        llama_kv_guard(rot->type == GGML_TYPE_F32 && rot->ne[0] == rot->ne[1], "a cache is rotated by a square matrix");

        ggml_backend_buffer_ptr buf(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_cpu_buffer_type()));
        if (!buf) {
            throw std::runtime_error("failed to allocate the rotation of the KV cache");
        }

        is_k ? kv.set_input_k_rot(rot) : kv.set_input_v_rot(rot);

        llama_kv_guard_matrix((const float *) rot->data, rot->ne[0]);
    }
}

void llama_kv_guard_mask(const ggml_tensor * mask, int64_t n_mask, int64_t n_tokens) {
    llama_kv_guard(mask->type == GGML_TYPE_F16, "with flash attention the mask is F16");
    llama_kv_guard(mask->ne[0] == n_mask && mask->ne[2] == 1 && mask->ne[1]*mask->ne[3] == n_tokens && ggml_is_contiguous(mask),
            "a mask has one row for each token");
}

void llama_kv_guard_rows(ggml_backend_dev_t dev, ggml_type type, uint32_t il) {
    ggml_context_ptr ctx(ggml_init({ 4*ggml_tensor_overhead(), nullptr, true }));

    ggml_tensor * rows = ggml_new_tensor_2d(ctx.get(), type, 256, 16);
    ggml_tensor * cur  = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, 256, 1);
    ggml_tensor * idxs = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I64, 1);

    if (dev && !ggml_backend_dev_supports_op(dev, ggml_set_rows(ctx.get(), rows, cur, idxs))) {
        throw std::runtime_error("layer " + std::to_string(il) + ": " + ggml_backend_dev_name(dev) + " does not write rows of type '" +
                ggml_type_name(type) + "': set offload_kqv to false, and the CPU keeps and reads the cache, or use the cold type 'q4_0'");
    }
}

void llama_kv_guard_reader(ggml_backend_dev_t dev, ggml_type type, uint32_t il) {
    const bool is_own = type == LM4_TYPE || type == TC3_TYPE;

    if (is_own && dev && ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU) {
        const std::string name = ggml_type_name(type);
        throw std::runtime_error("layer " + std::to_string(il) + ": llama.cpp's attention on " + ggml_backend_dev_name(dev) +
                " does not read rows of type '" + name + "': use '" + name + ":attention=fused', or set offload_kqv to false");
    }
}

static std::string backend_name(ggml_backend_dev_t dev) {
    ggml_backend_reg_t reg = dev ? ggml_backend_dev_backend_reg(dev) : nullptr;

    return reg ? ggml_backend_reg_name(reg) : "";
}

// its code is that of three backends
static bool is_cuda(ggml_backend_dev_t dev) {
    const std::string name = backend_name(dev);

    return name == "CUDA" || name == "ROCm" || name == "MUSA";
}

bool llama_kv_gathers_f16(ggml_backend_dev_t dev, ggml_tensor * rows) {
    if (!is_cuda(dev) && backend_name(dev) != "Vulkan") {
        return false;
    }

    ggml_context_ptr ctx(ggml_init({ 4*ggml_tensor_overhead(), nullptr, true }));

    ggml_tensor * from = ggml_view_3d(ctx.get(), rows, rows->ne[0], rows->ne[1], 1, rows->nb[1], rows->nb[2], 0);
    ggml_tensor * op   = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, rows->ne[0], 256);
    op->op     = GGML_OP_GET_ROWS;
    op->src[0] = from;
    op->src[1] = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 256);

    return ggml_backend_dev_supports_op(dev, op);
}

void llama_kv_guard_size(ggml_backend_dev_t dev, const ggml_tensor * rows, uint32_t il) {
    if (dev && !ggml_backend_dev_supports_op(dev, rows)) {
        throw std::runtime_error("layer " + std::to_string(il) + ": " + ggml_backend_dev_name(dev) + " takes no tensor of " +
                std::to_string(ggml_nbytes(rows)) + " bytes, which the rows of this layer need: lower n_ctx, use a cold type of fewer "
                "bits, or set offload_kqv to false, and the CPU keeps and reads the cache");
    }
}

void llama_kv_guard_flash(ggml_backend_dev_t dev, const llama_hparams & hparams, uint32_t il) {
    ggml_context_ptr ctx(ggml_init({ 8*ggml_tensor_overhead(), nullptr, true }));

    const int64_t d_k = hparams.n_embd_head_k(il);
    const int64_t d_v = hparams.n_embd_head_v(il);

    ggml_tensor * q    = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, d_k, 1,   hparams.n_head(il));
    ggml_tensor * k    = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, d_k, 256, hparams.n_head_kv(il));
    ggml_tensor * v    = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, d_v, 256, hparams.n_head_kv(il));
    ggml_tensor * mask = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, 256, 1);
    ggml_tensor * op   = ggml_flash_attn_ext(ctx.get(), q, k, v, mask, 1.0f, hparams.f_max_alibi_bias,
            hparams.attn_soft_cap ? hparams.f_attn_logit_softcapping : 0.0f);

    // CUDA supports them by its own word, and its kernels then end the process
    const bool lacks_cap = hparams.attn_soft_cap && is_cuda(dev) && d_v != 128 && d_v != 256 && d_v != 512;

    if (dev && (lacks_cap || !ggml_backend_dev_supports_op(dev, op))) {
        throw std::runtime_error("layer " + std::to_string(il) + ": " + ggml_backend_dev_name(dev) +
                " has no flash attention for heads of " + std::to_string(d_k) + " (K) and " + std::to_string(d_v) +
                " (V): set offload_kqv to false, and the CPU keeps and reads the cache, or use the 'f16' cache with llama.cpp's own attention");
    }
}
