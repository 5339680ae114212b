// A llama.cpp that does otherwise than cpp/llama assumes is refused.

#include "check.h"
#include "graph/guard.h"

#include "attention/lm4.h"

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "llama-hparams.h"

#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

static bool is_refused(const std::function<void()> & guard, const std::string & word) {
    try {
        guard();
        return false;
    } catch (const std::runtime_error & err) {
        return std::string(err.what()).find(word) != std::string::npos;
    }
}

static void another_rotation_is_refused() {
    // as ggml_gen_hadamard fills it
    const int64_t      n = 64;
    std::vector<float> matrix(n * n);
    for (int64_t i = 0; i < n * n; ++i) {
        matrix[i] = (__builtin_popcountll((i / n) & (i % n)) % 2 ? -1.0f : 1.0f) / 8.0f;
    }
    const auto guard = [&] { llama_kv_guard_matrix(matrix.data(), n); };

    guard();

    for (float & x : matrix) {
        x *= 2.0f;
    }
    CHECK(is_refused(guard, "Walsh-Hadamard")); // not orthonormal

    for (float & x : matrix) {
        x *= 0.5f;
    }
    for (int64_t i = 0; i < n; ++i) {
        std::swap(matrix[i * n + 1], matrix[i * n + 2]);
    }
    CHECK(is_refused(guard, "Walsh-Hadamard")); // in another order
}

static void another_mask_is_refused() {
    ggml_context_ptr ctx(ggml_init({ 8 * ggml_tensor_overhead(), nullptr, true }));

    const auto mask = [&](ggml_type type, int64_t n_mask, int64_t n_tokens, int64_t n_stream) {
        return ggml_new_tensor_4d(ctx.get(), type, n_mask, n_tokens / n_stream, 1, n_stream);
    };

    llama_kv_guard_mask(mask(GGML_TYPE_F16, 300, 12, 1), 300, 12);
    llama_kv_guard_mask(mask(GGML_TYPE_F16, 300, 12, 3), 300, 12);

    CHECK(is_refused([&] { llama_kv_guard_mask(mask(GGML_TYPE_F32, 300, 12, 1), 300, 12); }, "F16"));
    CHECK(is_refused([&] { llama_kv_guard_mask(mask(GGML_TYPE_F16, 256, 12, 1), 300, 12); }, "row for each token"));
    CHECK(is_refused([&] { llama_kv_guard_mask(mask(GGML_TYPE_F16, 300, 64, 1), 300, 12); }, "row for each token"));
}

// a device that has no flash attention for heads beyond 128, writes rows of Q4_0 alone, and takes tensors of a megabyte
// at most
static bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    switch (op->op) {
    case GGML_OP_NONE:
        return ggml_nbytes(op) <= 1 << 20;
    case GGML_OP_FLASH_ATTN_EXT:
        return op->src[1]->ne[0] <= 128;
    default:
        return op->op == GGML_OP_SET_ROWS && op->type == GGML_TYPE_Q4_0;
    }
}

static const char * device_name(ggml_backend_dev_t) {
    return "GPU0";
}

static ggml_backend_device make_device() {
    ggml_backend_device dev = {};
    dev.iface.supports_op   = supports_op;
    dev.iface.get_name      = device_name;
    return dev;
}

static void a_device_without_flash_attention_for_the_heads_is_refused() {
    ggml_backend_device dev = make_device();

    llama_hparams hparams;
    hparams.n_layer_all = 8;
    hparams.is_swa_impl.fill(0);
    hparams.n_head_arr.fill(8);
    hparams.n_head_kv_arr.fill(2);

    hparams.n_embd_head_k_full = hparams.n_embd_head_v_full = 128;
    llama_kv_guard_flash(&dev, hparams, 0);

    hparams.n_embd_head_k_full = hparams.n_embd_head_v_full = 256;
    CHECK(is_refused([&] { llama_kv_guard_flash(&dev, hparams, 3); },
                     "layer 3: GPU0 has no flash attention for heads of 256"));
    llama_kv_guard_flash(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), hparams, 3);
}

static void a_device_that_does_not_write_the_rows_is_refused() {
    ggml_backend_device dev = make_device();

    llama_kv_guard_rows(&dev, GGML_TYPE_Q4_0, 2);
    CHECK(is_refused([&] { llama_kv_guard_rows(&dev, ggml_type(LM4_TYPE), 2); },
                     "layer 2: GPU0 does not write rows of type 'lm4'"));
    llama_kv_guard_rows(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), ggml_type(LM4_TYPE), 2);
}

static void a_tensor_that_is_too_large_for_a_device_is_refused() {
    ggml_backend_device dev = make_device();

    ggml_context_ptr ctx(ggml_init({ 2 * ggml_tensor_overhead(), nullptr, true }));
    ggml_tensor *    fits = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, 512, 1024);
    ggml_tensor *    more = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, 512, 1025);

    llama_kv_guard_size(&dev, fits, 1);
    CHECK(is_refused([&] { llama_kv_guard_size(&dev, more, 1); }, "layer 1: GPU0 takes no tensor of 1049600 bytes"));
    llama_kv_guard_size(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), more, 1);
    llama_kv_guard_size(nullptr, more, 1);
}

int main() {
    another_rotation_is_refused();
    another_mask_is_refused();
    a_device_without_flash_attention_for_the_heads_is_refused();
    a_device_that_does_not_write_the_rows_is_refused();
    a_tensor_that_is_too_large_for_a_device_is_refused();
    return 0;
}
