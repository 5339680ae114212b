// Rows of the cache as NumPy arrays.

#include "bindings.h"

#include <pybind11/numpy.h>

namespace py = pybind11;
using namespace py::literals;

namespace mixedkv_py {

static mixedkv_layer_info find_layer(llama_context * ctx, int32_t il) {
    for (const mixedkv_layer_info & layer : fetch(ctx, &mixedkv_get_layers)) {
        if (layer.il == il) {
            return layer;
        }
    }
    throw status_error(MIXEDKV_NOT_AVAILABLE, "layer " + std::to_string(il) + " has no KV cache");
}

struct row_request {
    llama_context * ctx;
    int32_t         il;
    int32_t         seq;
    char            which;
    int32_t         p0;
    int32_t         p1;
    bool            unrotate;
};

// Dequantising a long sequence takes a while: other Python threads go on meanwhile. The C API keeps its message per
// thread, so the status is turned into an exception after the GIL is back, on the same thread.
static uint32_t read(const row_request & r, float * data, int32_t * positions, uint8_t * hot, uint32_t n_rows) {
    uint32_t       n = 0;
    mixedkv_status status;
    {
        py::gil_scoped_release release;
        status =
            mixedkv_read_rows(r.ctx, r.il, r.seq, r.which, r.p0, r.p1, r.unrotate, data, positions, hot, n_rows, &n);
    }
    check(status);
    return n;
}

// The rows are counted in one call and read in the next, which nothing may come between.
static void read_exactly(const row_request & r, float * data, py::array_t<int32_t> & positions,
                         py::array_t<bool> & hot) {
    static_assert(sizeof(bool) == sizeof(uint8_t), "NumPy's bool is one byte");
    const auto n     = static_cast<uint32_t>(positions.size());
    auto *     flags = reinterpret_cast<uint8_t *>(hot.mutable_data());
    if (n > 0 && read(r, data, positions.mutable_data(), flags, n) != n) {
        throw std::runtime_error("the cache changed while its rows were read: read them from the thread that decodes");
    }
}

static py::tuple read_rows(uintptr_t ctx_address, int32_t il, int32_t seq, char which, int32_t p0, int32_t p1,
                           bool unrotate) {
    if (which != 'k' && which != 'v') {
        throw py::value_error(std::string("which='") + which + "' is unknown: use 'k' or 'v'");
    }
    llama_context *          ctx     = pointer<llama_context>(ctx_address);
    const mixedkv_layer_info layer   = find_layer(ctx, il);
    const row_request        request = { ctx, il, seq, which, p0, p1, unrotate };

    const uint32_t n    = read(request, nullptr, nullptr, nullptr, 0);
    const uint32_t head = which == 'k' ? layer.n_embd_head_k : layer.n_embd_head_v;

    py::array_t<float>   data({ n, layer.n_head_kv, head });
    py::array_t<int32_t> positions(n);
    py::array_t<bool>    hot(n);
    read_exactly(request, data.mutable_data(), positions, hot);
    return py::make_tuple(data, positions, hot);
}

static py::tuple read_tiers(uintptr_t ctx, int32_t il, int32_t seq, int32_t p0, int32_t p1) {
    const row_request request = { pointer<llama_context>(ctx), il, seq, 'k', p0, p1, false };
    const uint32_t    n       = read(request, nullptr, nullptr, nullptr, 0);

    py::array_t<int32_t> positions(n);
    py::array_t<bool>    hot(n);
    read_exactly(request, nullptr, positions, hot);
    return py::make_tuple(positions, hot);
}

using token_array = py::array_t<llama_token, py::array::c_style | py::array::forcecast>;

static int32_t count_computed(uintptr_t ctx, int32_t seq, int32_t p0, const token_array & tokens) {
    int32_t res = 0;
    check(mixedkv_count_computed(pointer<llama_context>(ctx), seq, p0, tokens.data(), uint32_t(tokens.size()), &res));
    return res;
}

static py::array_t<uint8_t> get_validity(uintptr_t ctx, int32_t seq, int32_t p0, const token_array & tokens) {
    std::vector<mixedkv_validity> validity(tokens.size());
    check(mixedkv_get_validity(pointer<llama_context>(ctx), seq, p0, tokens.data(), uint32_t(validity.size()),
                               validity.data()));

    py::array_t<uint8_t> res(tokens.size());
    std::copy(validity.begin(), validity.end(), res.mutable_data());
    return res;
}

static py::array_t<uint64_t> get_past(uintptr_t ctx, int32_t seq, int32_t p0, uint32_t n) {
    py::array_t<uint64_t> res(n);
    check(mixedkv_get_past(pointer<llama_context>(ctx), seq, p0, n, res.mutable_data()));
    return res;
}

static std::string get_setting(uintptr_t ctx, int32_t seq, int32_t p) {
    const char *   res = "";
    mixedkv_status status;
    {
        py::gil_scoped_release release; // it may wait for a thread that wants it
        status = mixedkv_get_setting(pointer<llama_context>(ctx), seq, p, &res);
    }
    check(status);
    return res;
}

static void name_model(uintptr_t ctx, const std::string & name) {
    check(mixedkv_name_model(pointer<llama_context>(ctx), name.c_str()));
}

static uint64_t extend_past(uint64_t past, const token_array & tokens) {
    return mixedkv_extend_past(past, tokens.data(), uint32_t(tokens.size()));
}

static void set_validity(uintptr_t ctx, int32_t seq, int32_t p0, uint64_t past, const token_array & tokens,
                         int validity, const std::string & setting) {
    check(mixedkv_set_validity(pointer<llama_context>(ctx), seq, p0, past, tokens.data(), uint32_t(tokens.size()),
                               static_cast<mixedkv_validity>(validity), setting.c_str()));
}

static void limit_validity(uintptr_t ctx, int32_t seq, int32_t p0, int32_t p1, int validity) {
    check(mixedkv_limit_validity(pointer<llama_context>(ctx), seq, p0, p1, static_cast<mixedkv_validity>(validity)));
}

void register_rows(py::module_ & m) {
    m.def("read_rows", &read_rows, "ctx"_a, "il"_a, "seq"_a, "which"_a, "p0"_a, "p1"_a, "unrotate"_a);
    m.def("check_rows", [](uintptr_t ctx) { check(mixedkv_check_rows(pointer<llama_context>(ctx))); }, "ctx"_a);
    m.def("count_computed", &count_computed, "ctx"_a, "seq"_a, "p0"_a, "tokens"_a);
    m.def("get_validity", &get_validity, "ctx"_a, "seq"_a, "p0"_a, "tokens"_a);
    m.def("get_past", &get_past, "ctx"_a, "seq"_a, "p0"_a, "n"_a);
    m.def("get_setting", &get_setting, "ctx"_a, "seq"_a, "p"_a);
    m.def("name_model", &name_model, "ctx"_a, "name"_a);
    m.def("extend_past", &extend_past, "past"_a, "tokens"_a);
    m.def("set_validity", &set_validity, "ctx"_a, "seq"_a, "p0"_a, "past"_a, "tokens"_a, "validity"_a, "setting"_a);
    m.def("limit_validity", &limit_validity, "ctx"_a, "seq"_a, "p0"_a, "p1"_a, "validity"_a);
    m.def("refused", [](uintptr_t ctx) { return mixedkv_refused(pointer<llama_context>(ctx)); }, "ctx"_a);
    m.def("read_tiers", &read_tiers, "ctx"_a, "il"_a, "seq"_a, "p0"_a, "p1"_a);
}

} // namespace mixedkv_py
