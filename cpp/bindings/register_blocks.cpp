// Rows of a token range out of a cache and into one, as NumPy arrays. python/mixedkv/block.py names and checks them.

#include "bindings.h"

#include <pybind11/numpy.h>

#include <algorithm>

namespace py = pybind11;
using namespace py::literals;

namespace mixedkv_py {

// Copying rows takes a while: other Python threads go on meanwhile. The C API keeps its message per thread, so the
// status is turned into an exception after the GIL is back, on the same thread.
template <typename F>
static void unlocked(F && call) {
    mixedkv_status status;
    {
        py::gil_scoped_release release;
        status = call();
    }
    check(status);
}

// Types and sizes may come from a file: ggml only asserts that a row has whole blocks.
static py::ssize_t row_size(ggml_type type, uint32_t n_head_kv, uint32_t n_embd_head) {
    const uint64_t n = uint64_t(n_head_kv) * n_embd_head;
    if (uint32_t(type) >= GGML_TYPE_COUNT || ggml_blck_size(type) <= 0 || n > INT32_MAX ||
        n % uint64_t(ggml_blck_size(type)) != 0) {
        throw py::value_error("no rows of " + std::to_string(n) + " elements can have type " +
                              std::to_string(static_cast<int>(type)));
    }
    return static_cast<py::ssize_t>(ggml_row_size(type, int64_t(n)));
}

struct range {
    llama_context * ctx;
    int32_t         seq;
    int32_t         p0;
    int32_t         p1;
};

// F16 has no C++ type: the arrays are made of 16-bit integers and seen as float16.
static py::object as_float16(const py::array_t<uint16_t> & bits) {
    return bits.attr("view")("float16");
}

static py::dict export_layer(const range & r, const mixedkv_layer_info & l, py::ssize_t n_rows, py::ssize_t n_hot) {
    py::array_t<uint8_t>  k({ n_rows, row_size(l.type_k, l.n_head_kv, l.n_embd_head_k) });
    py::array_t<uint8_t>  v({ n_rows, row_size(l.type_v, l.n_head_kv, l.n_embd_head_v) });
    py::array_t<uint16_t> k_hot({ n_hot, py::ssize_t(l.n_head_kv) * l.n_embd_head_k });
    py::array_t<uint16_t> v_hot({ n_hot, py::ssize_t(l.n_head_kv) * l.n_embd_head_v });

    void *const k_data = k.mutable_data(), *const v_data = v.mutable_data();
    void *const k_hot_data = k_hot.mutable_data(), *const v_hot_data = v_hot.mutable_data();
    unlocked([&] {
        return mixedkv_export_layer(r.ctx, r.seq, l.il, r.p0, r.p1, uint32_t(n_rows), uint32_t(n_hot), k_data, v_data,
                                    k_hot_data, v_hot_data);
    });

    return py::dict("il"_a = l.il, "n_head_kv"_a = l.n_head_kv, "head_size_k"_a = l.n_embd_head_k,
                    "head_size_v"_a = l.n_embd_head_v, "type_k"_a = static_cast<int>(l.type_k),
                    "type_v"_a = static_cast<int>(l.type_v), "rotation_k"_a = l.rotation_k,
                    "rotation_v"_a = l.rotation_v, "equalization"_a = l.equalization, "k"_a = k, "v"_a = v,
                    "k_hot"_a = as_float16(k_hot), "v_hot"_a = as_float16(v_hot));
}

// positions have several parts: M-RoPE
static bool has_mrope(const llama_context * ctx) {
    const llama_rope_type type = llama_model_rope_type(llama_get_model(ctx));
    return type == LLAMA_ROPE_TYPE_MROPE || type == LLAMA_ROPE_TYPE_IMROPE;
}

static py::list export_rows(uintptr_t ctx_address, int32_t seq, int32_t p0, int32_t p1) {
    const range                           r      = { pointer<llama_context>(ctx_address), seq, p0, p1 };
    const std::vector<mixedkv_layer_info> layers = fetch(r.ctx, &mixedkv_get_layers);

    const bool mrope    = has_mrope(r.ctx);
    uint32_t   n_groups = 0;
    for (const mixedkv_layer_info & layer : layers) {
        n_groups = std::max(n_groups, layer.group + 1);
    }

    py::list out;
    for (uint32_t group = 0; group < n_groups; ++group) {
        uint32_t n_rows = 0, n_hot = 0;
        unlocked([&] { return mixedkv_count_rows(r.ctx, seq, group, p0, p1, &n_rows, &n_hot); });

        py::array_t<int32_t> positions(n_rows), hot(n_hot), slots(n_hot);
        py::array_t<int32_t> xy({ py::ssize_t(mrope ? n_rows : 0), py::ssize_t(2) });
        check(mixedkv_export_group(r.ctx, seq, group, p0, p1, n_rows, n_hot, positions.mutable_data(),
                                   hot.mutable_data(), slots.mutable_data(), mrope ? xy.mutable_data() : nullptr));

        py::list rows;
        for (const mixedkv_layer_info & layer : layers) {
            if (layer.group == group) {
                rows.append(export_layer(r, layer, n_rows, n_hot));
            }
        }
        py::dict one("positions"_a = positions, "hot"_a = hot, "slots"_a = slots, "layers"_a = rows);
        if (mrope) {
            one["xy"] = xy;
        }
        out.append(one);
    }
    return out;
}

// Arrays are read after this call: the dict keeps them.
static void check_dict(const py::handle & item) {
    if (!py::isinstance<py::dict>(item)) {
        throw py::type_error("groups and layers must be dicts");
    }
}

// Sizes are promised to the C API, so they are made sure of here.
template <typename T>
static const T * data(const py::handle & item, const char * name, py::ssize_t n_rows, py::ssize_t n_columns) {
    const py::object value = item[name];
    if (!py::isinstance<py::array>(value)) { // a list would be converted to an array that is gone after this call
        throw py::type_error(std::string("'") + name + "' must be a NumPy array");
    }
    const auto array  = value.cast<py::array>();
    const bool fits   = n_columns < 0 ? array.ndim() == 1 : array.ndim() == 2 && array.shape(1) == n_columns;
    const bool packed = (array.flags() & py::array::c_style) != 0;
    if (!fits || array.shape(0) != n_rows || array.itemsize() != sizeof(T) || !packed) {
        throw py::value_error(std::string("array '") + name + "' does not have the size that its block says");
    }
    return static_cast<const T *>(array.data());
}

static mixedkv_layer_rows layer_rows(const py::handle & item, py::ssize_t n_rows, py::ssize_t n_hot) {
    mixedkv_layer_rows l = {};
    l.il                 = item["il"].cast<int32_t>();
    l.n_head_kv          = item["n_head_kv"].cast<uint32_t>();
    l.n_embd_head_k      = item["head_size_k"].cast<uint32_t>();
    l.n_embd_head_v      = item["head_size_v"].cast<uint32_t>();
    l.type_k             = static_cast<ggml_type>(item["type_k"].cast<int>());
    l.type_v             = static_cast<ggml_type>(item["type_v"].cast<int>());
    l.rotation_k         = item["rotation_k"].cast<uint32_t>();
    l.rotation_v         = item["rotation_v"].cast<uint32_t>();
    l.equalization       = item["equalization"].cast<uint32_t>();

    const py::ssize_t n_k = py::ssize_t(l.n_head_kv) * l.n_embd_head_k;
    const py::ssize_t n_v = py::ssize_t(l.n_head_kv) * l.n_embd_head_v;

    l.k     = data<uint8_t>(item, "k", n_rows, row_size(l.type_k, l.n_head_kv, l.n_embd_head_k));
    l.v     = data<uint8_t>(item, "v", n_rows, row_size(l.type_v, l.n_head_kv, l.n_embd_head_v));
    l.k_hot = data<uint16_t>(item, "k_hot", n_hot, n_k);
    l.v_hot = data<uint16_t>(item, "v_hot", n_hot, n_v);
    return l;
}

// call(groups, their number) with the arrays as the C API takes them
template <typename F>
static void with_groups(const py::list & items, F && call) {
    std::vector<mixedkv_row_group>               groups;
    std::vector<std::vector<mixedkv_layer_rows>> layers;
    for (const py::handle & item : items) {
        check_dict(item);
        mixedkv_row_group g = {};
        g.n_rows            = static_cast<uint32_t>(py::len(item["positions"]));
        g.n_hot             = static_cast<uint32_t>(py::len(item["hot"]));
        g.positions         = data<int32_t>(item, "positions", g.n_rows, -1);
        g.hot               = data<int32_t>(item, "hot", g.n_hot, -1);
        g.slots             = data<int32_t>(item, "slots", g.n_hot, -1);
        g.xy                = item.contains("xy") ? data<int32_t>(item, "xy", g.n_rows, 2) : nullptr;

        std::vector<mixedkv_layer_rows> rows;
        for (const py::handle & layer : item["layers"]) {
            check_dict(layer);
            rows.push_back(layer_rows(layer, g.n_rows, g.n_hot));
        }
        g.n_layers = static_cast<uint32_t>(rows.size());
        layers.push_back(std::move(rows));
        groups.push_back(g);
    }
    for (size_t i = 0; i < groups.size(); ++i) {
        groups[i].layers = layers[i].data();
    }

    unlocked([&] { return call(groups.data(), static_cast<uint32_t>(groups.size())); });
}

static void import_rows(uintptr_t ctx, int32_t seq, const py::list & items, int32_t shift, int32_t drop_from) {
    with_groups(items, [&](const mixedkv_row_group * groups, uint32_t n) {
        return mixedkv_import_rows(pointer<llama_context>(ctx), seq, groups, n, shift, drop_from);
    });
}

static void import_part(uintptr_t ctx, int32_t seq, const py::list & items) {
    with_groups(items, [&](const mixedkv_row_group * groups, uint32_t n) {
        return mixedkv_import_part(pointer<llama_context>(ctx), seq, groups, n);
    });
}

static void restore_window(uintptr_t ctx, int32_t seq, const py::list & items) {
    with_groups(items, [&](const mixedkv_row_group * groups, uint32_t n) {
        return mixedkv_restore_window(pointer<llama_context>(ctx), seq, groups, n);
    });
}

static py::object fill(uintptr_t ctx_address, int32_t seq, const py::array_t<int32_t> & tokens,
                       const py::array_t<int32_t> & positions, bool logits, int32_t last_layer, uint32_t n_mass) {
    llama_context * ctx = pointer<llama_context>(ctx_address);
    if (tokens.ndim() != 1 || positions.ndim() != 1 || tokens.size() != positions.size()) {
        throw py::value_error("tokens and positions must be of one length");
    }

    py::array_t<float> mass(n_mass);
    std::fill_n(mass.mutable_data(), n_mass, 0.0f);

    float * const   out = n_mass > 0 ? mass.mutable_data() : nullptr;
    const int32_t * ids = tokens.data();
    const int32_t * at  = positions.data();
    const auto      n   = static_cast<uint32_t>(tokens.size());
    unlocked([&] { return mixedkv_fill(ctx, seq, ids, at, n, logits, last_layer, out, n_mass); });
    return mass;
}

void register_blocks(py::module_ & m) {
    m.def("fill", &fill, "ctx"_a, "seq"_a, "tokens"_a, "positions"_a, "logits"_a, "last_layer"_a, "n_mass"_a);
    m.def("export_rows", &export_rows, "ctx"_a, "seq"_a, "p0"_a, "p1"_a);
    m.def("import_rows", &import_rows, "ctx"_a, "seq"_a, "groups"_a, "shift"_a, "drop_from"_a);
    m.def("import_part", &import_part, "ctx"_a, "seq"_a, "groups"_a);
    m.def("restore_window", &restore_window, "ctx"_a, "seq"_a, "groups"_a);
}

} // namespace mixedkv_py
