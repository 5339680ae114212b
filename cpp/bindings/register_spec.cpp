// Settings of caches in their written form, and the rule of the window.

#include "bindings.h"
#include "hot_set/hot_window.h"

#include <pybind11/operators.h>
#include <pybind11/stl.h>

namespace py = pybind11;
using namespace py::literals;

namespace mixedkv_py {

mixedkv::cache_spec to_spec(bool mixed, const py::dict & fields) {
    mixedkv::spec_fields given;
    for (const auto & [name, value] : fields) {
        given.emplace_back(py::str(name), py::str(value));
    }
    return mixedkv::make_spec(mixed, given);
}

static py::dict fields_of(const mixedkv::cache_spec & spec) {
    py::dict res;
    for (const auto & [name, value] : spec.fields) {
        const bool is_int  = mixedkv::is_number(name) && value.find_first_not_of("0123456789") == std::string::npos;
        res[py::str(name)] = is_int ? py::object(py::int_(std::stoull(value))) : py::object(py::str(value));
    }
    return res;
}

static py::tuple parse_kv(const std::string & text) {
    const auto spec = mixedkv::parse_spec(text);
    return py::make_tuple(spec.mixed, fields_of(spec));
}

static py::list layer_ranges(const std::string & layers) {
    py::list res;
    for (const auto & range : mixedkv::parse_layers(layers)) {
        res.append(py::make_tuple(range.first, range.last, range.type_k, range.type_v));
    }
    return res;
}

static py::dict row_types() {
    py::dict res;
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const auto type = ggml_type(i);
        for (const std::string & name : mixedkv::uniform_types()) {
            if (ggml_type_name(type) && name == ggml_type_name(type)) {
                res[py::str(name)] = py::make_tuple(i, ggml_blck_size(type), ggml_type_size(type));
            }
        }
    }
    return res;
}

using mixedkv::hot_window;

static auto numbers(const hot_window & w) {
    return py::make_tuple(w.threshold, w.group_size, w.sink_tokens, w.n_draft);
}

static void register_window(py::module_ & m) {
    py::class_<hot_window>(m, "HotWindow")
        .def(py::init([](uint32_t threshold, uint32_t group_size, uint32_t sink_tokens, uint32_t n_draft) {
                 return hot_window{ threshold, group_size, sink_tokens, n_draft };
             }),
             "threshold"_a = 0, "group_size"_a = 1, "sink_tokens"_a = 0, "n_draft"_a = 0)
        .def_readonly("threshold", &hot_window::threshold)
        .def_readonly("group_size", &hot_window::group_size)
        .def_readonly("sink_tokens", &hot_window::sink_tokens)
        .def_readonly("n_draft", &hot_window::n_draft)
        .def("begin", &hot_window::begin, "q"_a)
        .def(
            "contains", [](const hot_window & w, int32_t p, int32_t q) { return w.contains(p, w.begin(q)); }, "p"_a,
            "q"_a)
        .def("rows", &hot_window::rows)
        .def("held_begin", &hot_window::held_begin, "q"_a)
        .def("cut_is_exact", &hot_window::cut_is_exact, "n"_a, "at"_a)
        .def("__eq__",
             [](const hot_window & w, const py::object & other) {
                 return py::isinstance<hot_window>(other) && numbers(w).equal(numbers(other.cast<hot_window>()));
             })
        .def("__hash__", [](const hot_window & w) { return py::hash(numbers(w)); })
        .def("__repr__", [](const hot_window & w) { return py::str("HotWindow{}").format(numbers(w)); });
}

void register_spec(py::module_ & m) {
    m.attr("COLD_TYPES")       = py::tuple(py::cast(mixedkv::cold_types()));
    m.attr("UNIFORM_TYPES")    = py::tuple(py::cast(mixedkv::uniform_types()));
    m.attr("PRESETS")          = py::tuple(py::cast(mixedkv::presets()));
    m.attr("DEFAULTS")         = fields_of(mixedkv::make_spec(true, {}));
    m.attr("UNIFORM_DEFAULTS") = fields_of(mixedkv::make_spec(false, {}));

    m.attr("DRAFTS_KEPT") = mixedkv::drafts_kept;

    m.def("parse_kv", &parse_kv, "text"_a);
    m.def(
        "check_kv", [](bool mixed, const py::dict & fields) { return fields_of(to_spec(mixed, fields)); }, "mixed"_a,
        "fields"_a);
    m.def(
        "format_kv",
        [](bool mixed, const py::dict & fields, bool full) {
            return mixedkv::format_spec(to_spec(mixed, fields), full);
        },
        "mixed"_a, "fields"_a, "full"_a = false);
    m.def("layer_ranges", &layer_ranges, "layers"_a);
    m.def("row_types", &row_types);
    m.def("parse_size", &mixedkv::parse_size, "text"_a, "unit"_a = 1);
    register_window(m);
}

} // namespace mixedkv_py
