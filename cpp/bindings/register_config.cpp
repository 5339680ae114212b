// Version, and the configuration of the next context.

#include "bindings.h"
#include "spec/spec.h"

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

// first and last layer, types of K and V
using layer_types = std::tuple<int32_t, int32_t, int, int>;

// mixedkv_config with the layers it points to.
class cache_config {
  public:
    cache_config(bool mixed, uint32_t threshold, uint32_t group_size, uint32_t sink_tokens,
                 const std::string & attention, uint32_t n_draft, uint32_t hot_budget, float sparse_error,
                 const std::vector<layer_types> & layers) {
        values.mixed        = mixed;
        values.threshold    = threshold;
        values.group_size   = group_size;
        values.sink_tokens  = sink_tokens;
        values.attention    = parse_attention(attention);
        values.n_draft      = n_draft;
        values.hot_budget   = hot_budget;
        values.sparse_error = sparse_error;
        for (const auto & [first, last, type_k, type_v] : layers) {
            types.push_back({ first, last, static_cast<ggml_type>(type_k), static_cast<ggml_type>(type_v) });
        }
    }

    explicit cache_config(const mixedkv::cache_spec & spec) { values = mixedkv::to_native(spec, types).config; }

    bool chooses_rows() const { return values.hot_budget == MIXEDKV_HOT_BUDGET_AUTO; }

    // Lives as long as this object.
    mixedkv_config native() const {
        mixedkv_config res = values;
        res.layers         = types.data();
        res.n_layers       = static_cast<uint32_t>(types.size());
        return res;
    }

  private:
    mixedkv_config                   values = {};
    std::vector<mixedkv_layer_types> types;
};

static py::dict version() {
    return py::dict("version"_a = mixedkv_version(), "llama_commit"_a = mixedkv_llama_commit(),
                    "isa"_a = mixedkv_isa());
}

// The configuration and the message of a failure belong to the calling thread, which keeps the GIL here.
static void configure_next(const cache_config & config) {
    const mixedkv_config native = config.native();
    check(mixedkv_configure_next(&native));
}

static void withdraw() {
    check(mixedkv_configure_next(nullptr));
}

static void check_model(uintptr_t model, const cache_config & config, int type_k, int type_v, uint32_t n_ctx) {
    const mixedkv_config native = config.native();
    check(mixedkv_check(pointer<const llama_model>(model), &native, static_cast<ggml_type>(type_k),
                        static_cast<ggml_type>(type_v), n_ctx));
}

static py::tuple count_ring_rows(const cache_config & config, uint32_t n_seq, uint32_t n_cells, uint64_t bytes_cold,
                                 uint64_t bytes_f16) {
    const mixedkv_config native = config.native();
    uint32_t             n      = 0;
    uint32_t             least  = 0;
    check(mixedkv_count_ring_rows(&native, n_seq, n_cells, bytes_cold, bytes_f16, &n, &least));
    return py::make_tuple(n, least);
}

static bool gpus_read(int type_k, int type_v, uint32_t n_embd_head_k, uint32_t n_embd_head_v, uint32_t n_head,
                      uint32_t n_head_kv) {
    bool res = false;
    check(mixedkv_gpus_read(static_cast<ggml_type>(type_k), static_cast<ggml_type>(type_v), n_embd_head_k,
                            n_embd_head_v, n_head, n_head_kv, &res));
    return res;
}

void register_config(py::module_ & m) {
    py::class_<cache_config> config(m, "CacheConfig");
    config.def(py::init<bool, uint32_t, uint32_t, uint32_t, const std::string &, uint32_t, uint32_t, float,
                        const std::vector<layer_types> &>(),
               py::kw_only(), "mixed"_a = true, "threshold"_a = 0, "group_size"_a = 1, "sink_tokens"_a = 0,
               "attention"_a = "auto", "n_draft"_a = 0, "hot_budget"_a = MIXEDKV_HOT_BUDGET_AUTO,
               "sparse_error"_a = 0.0f, "layers"_a = std::vector<layer_types>());
    config.def_property_readonly("chooses_rows", &cache_config::chooses_rows);
    config.def_static(
        "of", [](bool mixed, const py::dict & fields) { return cache_config(to_spec(mixed, fields)); }, "mixed"_a,
        "fields"_a);
    config.attr("HOT_BUDGET_AUTO") = MIXEDKV_HOT_BUDGET_AUTO;
    config.attr("HOT_BUDGET_ALL")  = MIXEDKV_HOT_BUDGET_ALL;

    m.def("version", &version);
    m.def("configure_next", &configure_next, "config"_a);
    m.def("withdraw", &withdraw);
    m.def("check", &check_model, "model"_a, "config"_a, "type_k"_a, "type_v"_a, "n_ctx"_a);
    m.def("gpus_read", &gpus_read, "type_k"_a, "type_v"_a, "n_embd_head_k"_a, "n_embd_head_v"_a, "n_head"_a,
          "n_head_kv"_a);
    m.def("count_ring_rows", &count_ring_rows, "config"_a, "n_seq"_a, "n_cells"_a, "bytes_cold"_a, "bytes_f16"_a);
}

} // namespace mixedkv_py
