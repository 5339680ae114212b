// What a context's cache holds, and the live settings of its window.

#include "bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

namespace py = pybind11;
using namespace py::literals;

namespace mixedkv_py {

static py::dict stats(uintptr_t ctx) {
    mixedkv_stats s = {};
    check(mixedkv_get_stats(pointer<llama_context>(ctx), &s));
    return py::dict(
        "mixed"_a = s.mixed, "n_ctx_seq"_a = s.n_ctx_seq, "n_seq_max"_a = s.n_seq_max, "n_stream"_a = s.n_stream,
        "n_layer"_a = s.n_layer, "threshold"_a = s.threshold, "threshold_capacity"_a = s.threshold_capacity,
        "group_size"_a = s.group_size, "sink_tokens"_a = s.sink_tokens, "n_draft"_a = s.n_draft,
        "ring_rows"_a = s.ring_rows, "n_cells_used"_a = s.n_cells_used, "n_cells_hot"_a = s.n_cells_hot,
        "n_elements"_a = s.n_elements, "hot_slots"_a = s.hot_slots, "hot_shared"_a = s.hot_shared,
        "n_evicted"_a = s.n_evicted, "n_pages"_a = s.n_pages, "n_pages_read"_a = s.n_pages_read,
        "bytes_total"_a = s.bytes_total, "bytes_cold"_a = s.bytes_cold, "bytes_hot"_a = s.bytes_hot,
        "bytes_given_back"_a = s.bytes_given_back, "bytes_view"_a = s.bytes_view, "bytes_compute"_a = s.bytes_compute);
}

static py::dict layer_dict(const mixedkv_layer_info & l) {
    return py::dict(
        "il"_a = l.il, "mixed"_a = l.mixed, "fused"_a = l.fused, "on_device"_a = l.on_device, "in_place"_a = l.in_place,
        "n_head_kv"_a = l.n_head_kv, "n_embd_head_k"_a = l.n_embd_head_k, "n_embd_head_v"_a = l.n_embd_head_v,
        "n_cells"_a = l.n_cells, "type_k"_a = static_cast<int>(l.type_k), "type_v"_a = static_cast<int>(l.type_v),
        "rotation_k"_a = l.rotation_k, "rotation_v"_a = l.rotation_v, "equalization"_a = l.equalization,
        "group"_a = l.group, "bytes_cold"_a = l.bytes_cold, "bytes_hot"_a = l.bytes_hot, "n_swa"_a = l.n_swa);
}

static py::dict sequence_dict(const mixedkv_seq_info & s) {
    return py::dict("seq_id"_a = s.seq_id, "pos_min"_a = s.pos_min, "pos_max"_a = s.pos_max,
                    "hot_begin"_a = s.hot_begin, "n_hot"_a = s.n_hot, "n_cold"_a = s.n_cold,
                    "short_from"_a = s.short_from);
}

template <typename T>
static py::list to_list(const std::vector<T> & items, py::dict (*convert)(const T &)) {
    py::list out;
    for (const T & item : items) {
        out.append(convert(item));
    }
    return out;
}

static void set_window(uintptr_t ctx, uint32_t threshold, uint32_t group_size, uint32_t sink_tokens) {
    check(mixedkv_set_window(pointer<llama_context>(ctx), threshold, group_size, sink_tokens));
}

static void release_hot_rows(uintptr_t ctx, int32_t seq) {
    check(mixedkv_release_hot_rows(pointer<llama_context>(ctx), seq));
}

static void hold_hot_rows(uintptr_t ctx, int32_t seq) {
    check(mixedkv_hold_hot_rows(pointer<llama_context>(ctx), seq));
}

static void drop_sliding(uintptr_t ctx, int32_t seq) {
    check(mixedkv_drop_sliding(pointer<llama_context>(ctx), seq));
}

static py::tuple check_pages(uintptr_t ctx) {
    uint32_t n_pages = 0;
    uint32_t n_wrong = 0;
    check(mixedkv_check_pages(pointer<llama_context>(ctx), &n_pages, &n_wrong));
    return py::make_tuple(n_pages, n_wrong);
}

static std::string bits_problem(uintptr_t ctx) {
    return mixedkv_bits_problem(pointer<llama_context>(ctx));
}

static py::list layers(uintptr_t ctx) {
    return to_list(fetch(pointer<llama_context>(ctx), &mixedkv_get_layers), &layer_dict);
}

static py::list sequences(uintptr_t ctx) {
    return to_list(fetch(pointer<llama_context>(ctx), &mixedkv_get_sequences), &sequence_dict);
}

static std::vector<int32_t> short_from(uintptr_t ctx) {
    return fetch(pointer<llama_context>(ctx), &mixedkv_get_short);
}

static bool window_is_whole(uintptr_t ctx, int32_t seq, int32_t pos) {
    bool res = false;
    check(mixedkv_window_is_whole(pointer<llama_context>(ctx), seq, pos, &res));
    return res;
}

static py::tuple find_cut(uintptr_t ctx, int32_t seq, int32_t n) {
    mixedkv_cut cut = {};
    check(mixedkv_find_cut(pointer<llama_context>(ctx), seq, n, &cut));
    return py::make_tuple(cut.n, cut.n_full, cut.n_window, cut.n_state, cut.has_hot);
}

static py::object scales(uintptr_t ctx, int32_t il) {
    for (const mixedkv_layer_info & l : fetch(pointer<llama_context>(ctx), &mixedkv_get_layers)) {
        if (l.il == il && l.equalization != 0) {
            py::array_t<float> res({ py::ssize_t(l.n_head_kv), py::ssize_t(l.n_embd_head_k) });
            uint32_t           n = 0;
            check(mixedkv_get_scales(pointer<llama_context>(ctx), il, res.mutable_data(), uint32_t(res.size()), &n));
            return res;
        }
    }
    return py::none();
}

void register_stats(py::module_ & m) {
    m.def("stats", &stats, "ctx"_a);
    m.def("check_pages", &check_pages, "ctx"_a);
    m.def("bits_problem", &bits_problem, "ctx"_a);
    m.def("layers", &layers, "ctx"_a);
    m.def("scales", &scales, "ctx"_a, "il"_a);
    m.def("sequences", &sequences, "ctx"_a);
    m.def("short_from", &short_from, "ctx"_a);
    m.def("window_is_whole", &window_is_whole, "ctx"_a, "seq"_a, "pos"_a);
    m.def("find_cut", &find_cut, "ctx"_a, "seq"_a, "n"_a);
    m.def("release_hot_rows", &release_hot_rows, "ctx"_a, "seq"_a);
    m.def("hold_hot_rows", &hold_hot_rows, "ctx"_a, "seq"_a);
    m.def("limit_sliding", &mixedkv_limit_sliding, "n_windows"_a);
    m.def("drop_sliding", &drop_sliding, "ctx"_a, "seq"_a);
    m.def("set_window", &set_window, "ctx"_a, "threshold"_a, "group_size"_a, "sink_tokens"_a);
}

} // namespace mixedkv_py
