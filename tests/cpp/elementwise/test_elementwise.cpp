// GEGLU and RMS norm with weights have the bits of ggml's own, but for those of NaN. A backend computes ggml's own
// where it is told to use its reference.

#include "check.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

namespace {

using build_fn = std::function<ggml_tensor *(ggml_context *, std::vector<ggml_tensor *> & inputs)>;

// Fills the inputs from the seed, and computes what is built from them.
std::vector<float> compute(const build_fn & build, const std::vector<float> & odd, int seed, bool reference,
                           int threads) {
    const std::unique_ptr<ggml_context, decltype(&ggml_free)> context(ggml_init({ 1 << 20, nullptr, true }), ggml_free);
    const std::unique_ptr<ggml_backend, decltype(&ggml_backend_free)> backend(ggml_backend_cpu_init(),
                                                                              ggml_backend_free);
    ggml_backend_cpu_set_n_threads(backend.get(), threads);
    ggml_backend_cpu_set_use_ref(backend.get(), reference);

    std::vector<ggml_tensor *> inputs;
    ggml_tensor *              out   = build(context.get(), inputs);
    ggml_cgraph *              graph = ggml_new_graph(context.get());
    ggml_build_forward_expand(graph, out);
    const std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)> buffer(
        ggml_backend_alloc_ctx_tensors(context.get(), backend.get()), ggml_backend_buffer_free);

    std::mt19937                    random(seed);
    std::normal_distribution<float> gauss(0.0f, 4.0f);
    for (ggml_tensor * input : inputs) {
        std::vector<float> x(ggml_nelements(input));
        for (float & e : x) {
            e = random() % 8 == 0 ? odd[random() % odd.size()] : gauss(random);
        }
        ggml_backend_tensor_set(input, x.data(), 0, x.size() * sizeof(float));
    }
    CHECK(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS);
    std::vector<float> res(ggml_nelements(out));
    ggml_backend_tensor_get(out, res.data(), 0, res.size() * sizeof(float));
    return res;
}

void same_bits(const build_fn & build, const std::vector<float> & odd) {
    for (int threads = 1; threads <= 3; threads++) {
        const std::vector<float> got = compute(build, odd, threads, false, threads);
        const std::vector<float> own = compute(build, odd, threads, true, threads);
        CHECK(got.size() == own.size());
        for (size_t i = 0; i < got.size(); i++) {
            CHECK(std::memcmp(&got[i], &own[i], sizeof(float)) == 0 || (std::isnan(got[i]) && std::isnan(own[i])));
        }
    }
}

ggml_tensor * input(ggml_context * context, std::vector<ggml_tensor *> & inputs, int64_t n0, int64_t n1, int64_t n2 = 1,
                    int64_t n3 = 1) {
    return inputs.emplace_back(ggml_new_tensor_4d(context, GGML_TYPE_F32, n0, n1, n2, n3));
}

void geglu_is_ggmls() {
    const std::vector<float> odd = { 10.0f,     std::nextafter(10.0f, 0.0f),
                                     -10.0f,    std::nextafter(-10.0f, 0.0f),
                                     1e4f,      -1e4f,
                                     0.0f,      -0.0f,
                                     1e-8f,     3e38f,
                                     -3e38f,    INFINITY,
                                     -INFINITY, NAN,
                                     -NAN };
    for (const int64_t n : { 1, 7, 8, 16, 31, 64, 2048 }) {
        for (const int64_t n_rows : { 1, 5, 40 }) {
            same_bits(
                [=](ggml_context * c, auto & in) {
                    return ggml_geglu_split(c, input(c, in, n, n_rows, 2), input(c, in, n, n_rows, 2));
                },
                odd);
            same_bits([=](ggml_context * c, auto & in) { return ggml_geglu(c, input(c, in, 2 * n, n_rows)); }, odd);
            same_bits([=](ggml_context * c, auto & in) { return ggml_geglu_swapped(c, input(c, in, 2 * n, n_rows)); },
                      odd);
            same_bits(
                [=](ggml_context * c, auto & in) { // rows that lie further apart than they are long
                    ggml_tensor * whole = input(c, in, 2 * n + 6, n_rows);
                    return ggml_geglu_split(c, ggml_view_2d(c, whole, n, n_rows, whole->nb[1], 0),
                                            ggml_view_2d(c, whole, n, n_rows, whole->nb[1], (n + 3) * sizeof(float)));
                },
                odd);
        }
    }
}

void rms_norm_is_ggmls() {
    const std::vector<float> odd = { 1e-20f, 1e15f, -3e4f, 0.0f };
    for (const int64_t n : { 1, 3, 64, 255, 576 }) {
        for (const int64_t n_rows : { 1, 7, 8, 9, 33 }) {
            same_bits(
                [=](ggml_context * c, auto & in) {
                    return ggml_mul(c, ggml_rms_norm(c, input(c, in, n, n_rows), 1e-5f), input(c, in, n, 1));
                },
                odd);
            same_bits(
                [=](ggml_context * c, auto & in) { // heads of tokens, with weights of their own or in common
                    return ggml_mul(c, ggml_rms_norm(c, input(c, in, n, 3, n_rows, 2), 1e-6f), input(c, in, n, 3));
                },
                odd);
            same_bits(
                [=](ggml_context * c, auto & in) { // a part of each row
                    ggml_tensor * whole = input(c, in, n + 5, n_rows);
                    return ggml_mul(c, ggml_rms_norm(c, ggml_view_2d(c, whole, n, n_rows, whole->nb[1], 20), 0.0f),
                                    input(c, in, n, 1));
                },
                odd);
        }
    }
}

} // namespace

int main() {
    geglu_is_ggmls();
    rms_norm_is_ggmls();
    return 0;
}
