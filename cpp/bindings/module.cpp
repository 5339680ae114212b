// mixedkv._core: a thin mirror of mixedkv.h for the package's own use. Its types are in python/mixedkv/_core.pyi.

#include "bindings.h"

PYBIND11_MODULE(_core, m) {
    m.doc() = "C API of the mixed-precision KV cache (private)";

    mixedkv_py::register_errors(m);
    mixedkv_py::register_config(m);
    mixedkv_py::register_spec(m);
    mixedkv_py::register_stats(m);
    mixedkv_py::register_rows(m);
    mixedkv_py::register_blocks(m);
    mixedkv_py::register_threads(m);
    mixedkv_py::register_gate(m);
    mixedkv_py::register_interrupt(m);
    mixedkv_py::register_log(m);
    mixedkv_py::register_matrix(m);
    mixedkv_py::register_stream(m);
    mixedkv_py::register_loading(m);
    mixedkv_py::register_assertions(m);
    mixedkv_py::register_hidden(m);
}
