// Version, and the configuration of the next context.

#include "bindings.h"
#include "hot_set/hot_window.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <tuple>

namespace py = pybind11;
using namespace py::literals;

namespace mixedkv_py {

static mixedkv_attention parse_attention(const std::string & name) {
    if (name == "auto") {
        return MIXEDKV_ATTENTION_AUTO;
    }
    if (name == "fused") {
        return MIXEDKV_ATTENTION_FUSED;
    }
    if (name == "merged") {
        return MIXEDKV_ATTENTION_MERGED;
    }
    throw py::value_error("attention='" + name + "' is unknown: use 'auto', 'fused' or 'merged'");
}

mixedkv_config make_config(bool mixed, uint32_t threshold, uint32_t group_size, uint32_t sink_tokens,
                           const std::string & attention, uint32_t n_draft, bool equalize, uint32_t hot_budget,
                           float v_skip, float sparse_top_p) {
    mixedkv_config config = {};

    config.mixed        = mixed;
    config.threshold    = threshold;
    config.group_size   = group_size;
    config.sink_tokens  = sink_tokens;
    config.attention    = parse_attention(attention);
    config.n_draft      = n_draft;
    config.equalize     = equalize;
    config.hot_budget   = hot_budget;
    config.v_skip       = v_skip;
    config.sparse_top_p = sparse_top_p;
    return config;
}

// first and last layer, types of K and V
using layer_types = std::tuple<int32_t, int32_t, int, int>;

static std::vector<mixedkv_layer_types> make_layers(const std::vector<layer_types> & layers) {
    std::vector<mixedkv_layer_types> res;
    for (const auto & [first, last, type_k, type_v] : layers) {
        res.push_back({ first, last, static_cast<ggml_type>(type_k), static_cast<ggml_type>(type_v) });
    }
    return res;
}

static py::dict version() {
    return py::dict("version"_a = mixedkv_version(), "llama_commit"_a = mixedkv_llama_commit(),
                    "isa"_a = mixedkv_isa());
}

// The configuration and the message of a failure belong to the calling thread, which keeps the GIL here.
static void configure_next(bool mixed, uint32_t threshold, uint32_t group_size, uint32_t sink_tokens,
                           const std::string & attention, uint32_t n_draft, bool equalize, uint32_t hot_budget,
                           float v_skip, float sparse_top_p, const std::vector<layer_types> & layers) {
    mixedkv_config config = make_config(mixed, threshold, group_size, sink_tokens, attention, n_draft, equalize,
                                        hot_budget, v_skip, sparse_top_p);
    const auto     types  = make_layers(layers);
    config.layers         = types.data();
    config.n_layers       = types.size();
    check(mixedkv_configure_next(&config));
}

static void withdraw() {
    check(mixedkv_configure_next(nullptr));
}

static void check_model(uintptr_t model, bool mixed, uint32_t threshold, uint32_t group_size, uint32_t sink_tokens,
                        const std::string & attention, int type_k, int type_v, uint32_t n_ctx, uint32_t n_draft,
                        bool equalize, uint32_t hot_budget, float v_skip, float sparse_top_p,
                        const std::vector<layer_types> & layers) {
    mixedkv_config config = make_config(mixed, threshold, group_size, sink_tokens, attention, n_draft, equalize,
                                        hot_budget, v_skip, sparse_top_p);
    const auto     types  = make_layers(layers);
    config.layers         = types.data();
    config.n_layers       = types.size();
    check(mixedkv_check(pointer<const llama_model>(model), &config, static_cast<ggml_type>(type_k),
                        static_cast<ggml_type>(type_v), n_ctx));
}

static py::tuple count_ring_rows(uint32_t threshold, uint32_t group_size, uint32_t sink_tokens, uint32_t n_draft,
                                 uint32_t hot_budget, uint32_t n_seq, uint32_t n_cells, uint64_t bytes_cold,
                                 uint64_t bytes_f16) {
    const mixedkv_config config =
        make_config(true, threshold, group_size, sink_tokens, "auto", n_draft, false, hot_budget, 0.0f, 0.0f);
    uint32_t n     = 0;
    uint32_t least = 0;
    check(mixedkv_count_ring_rows(&config, n_seq, n_cells, bytes_cold, bytes_f16, &n, &least));
    return py::make_tuple(n, least);
}

// The rule as C++ has it, for the test that holds Python's against it.
static int32_t hot_begin(uint32_t threshold, uint32_t group_size, uint32_t sink_tokens, int32_t q) {
    return mixedkv::hot_window{ threshold, group_size, sink_tokens }.begin(q);
}

static bool is_hot(uint32_t threshold, uint32_t group_size, uint32_t sink_tokens, int32_t p, int32_t q) {
    const mixedkv::hot_window window = { threshold, group_size, sink_tokens };
    return window.contains(p, window.begin(q));
}

void register_config(py::module_ & m) {
    const std::vector<layer_types> no_layers;

    m.def("version", &version);
    m.def("configure_next", &configure_next, "mixed"_a, "threshold"_a, "group_size"_a, "sink_tokens"_a, "attention"_a,
          "n_draft"_a = 0, "equalize"_a = false, "hot_budget"_a = MIXEDKV_HOT_BUDGET_AUTO, "v_skip"_a = 0.0f,
          "sparse_top_p"_a = 0.0f, "layers"_a = no_layers);
    m.def("withdraw", &withdraw);
    m.def("check", &check_model, "model"_a, "mixed"_a, "threshold"_a, "group_size"_a, "sink_tokens"_a, "attention"_a,
          "type_k"_a, "type_v"_a, "n_ctx"_a, "n_draft"_a = 0, "equalize"_a = false,
          "hot_budget"_a = MIXEDKV_HOT_BUDGET_AUTO, "v_skip"_a = 0.0f, "sparse_top_p"_a = 0.0f, "layers"_a = no_layers);
    m.def("count_ring_rows", &count_ring_rows, "threshold"_a, "group_size"_a, "sink_tokens"_a, "n_draft"_a,
          "hot_budget"_a, "n_seq"_a, "n_cells"_a, "bytes_cold"_a, "bytes_f16"_a);
    m.def("hot_begin", &hot_begin, "threshold"_a, "group_size"_a, "sink_tokens"_a, "q"_a);
    m.def("is_hot", &is_hot, "threshold"_a, "group_size"_a, "sink_tokens"_a, "p"_a, "q"_a);
}

} // namespace mixedkv_py
