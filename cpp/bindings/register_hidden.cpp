// What llama.cpp has in private headers, which Python cannot call: hidden states of tokens behind the last layer, which
// heads that predict several tokens (MTP) read, where weights lie, which logits are wanted, and
// which are no numbers.

#include "bindings.h"

#include "llama-ext.h"
#include "llama-model.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstring>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace py = pybind11;
using namespace py::literals;

namespace mixedkv_py {

static void keep_hidden(uintptr_t context, bool value, bool outputs_only) {
    llama_set_embeddings_nextn(pointer<llama_context>(context), value, outputs_only);
}

static py::array_t<float> hidden(uintptr_t context, int32_t first, int32_t n) {
    auto *        ctx    = pointer<llama_context>(context);
    const int32_t n_embd = llama_model_n_embd_out(llama_get_model(ctx));

    py::array_t<float> out({ n, n_embd });
    for (int32_t i = 0; i < n; i++) {
        const float * row = llama_get_embeddings_nextn_ith(ctx, first + i);
        if (row == nullptr) {
            throw py::value_error("there is no hidden state of token " + std::to_string(first + i) +
                                  " of the latest batch");
        }
        std::memcpy(out.mutable_data(i), row, n_embd * sizeof(float));
    }
    return out;
}

// (address, bytes) of each weight that is read where the model's file is mapped, not from a buffer
static std::vector<std::pair<uintptr_t, size_t>> mapped_weights(uintptr_t model) {
    std::vector<std::pair<uintptr_t, size_t>> out;
    for (const auto & [name, tensor] : llama_internal_get_tensor_map(pointer<llama_model>(model))) {
        if (tensor->buffer != nullptr && std::strcmp(ggml_backend_buffer_name(tensor->buffer), "CPU_Mapped") == 0) {
            out.emplace_back(reinterpret_cast<uintptr_t>(tensor->data), ggml_nbytes(tensor));
        }
    }
    return out;
}

using words = py::array_t<uint32_t, py::array::c_style>;

static void want_logits(uintptr_t context, const std::optional<words> & tokens) {
    auto * ctx = pointer<llama_context>(context);
    check(mixedkv_want_logits(ctx, tokens ? tokens->data() : nullptr, tokens ? uint32_t(tokens->size()) : 0));
}

// {sequence: first position}
static std::map<int32_t, int32_t> take_not_finite(uintptr_t context) {
    std::map<int32_t, int32_t> out;
    for (const auto & found : fetch<mixedkv_not_finite>(pointer<llama_context>(context), mixedkv_take_not_finite)) {
        out[found.seq_id] = found.pos;
    }
    return out;
}

void register_hidden(py::module_ & m) {
    m.def("take_not_finite", &take_not_finite, "context"_a);
    m.def(
        "clear_unused", [](uintptr_t context) { check(mixedkv_clear_unused(pointer<llama_context>(context))); },
        "context"_a);
    m.def("mapped_weights", &mapped_weights, "model"_a);
    m.def("want_logits", &want_logits, "context"_a, "tokens"_a.none(true));
    m.def("keep_hidden", &keep_hidden, "context"_a, "value"_a, "outputs_only"_a);
    m.def("hidden", &hidden, "context"_a, "first"_a, "n"_a);
}

} // namespace mixedkv_py
