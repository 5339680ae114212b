// Statuses of the C API as Python exceptions.

#include "bindings.h"

namespace py = pybind11;

namespace mixedkv_py {

// INTERNAL and any status of a later version are bugs, not user errors: RuntimeError.
static py::object exception_type(mixedkv_status status) {
    switch (status) {
    case MIXEDKV_INVALID:
        return py::reinterpret_borrow<py::object>(PyExc_ValueError);
    case MIXEDKV_UNSUPPORTED:
        return py::module_::import("mixedkv.errors").attr("UnsupportedModelError");
    case MIXEDKV_NOT_AVAILABLE:
        return py::reinterpret_borrow<py::object>(PyExc_LookupError);
    case MIXEDKV_BUSY:
        return py::module_::import("mixedkv.errors").attr("ContextBusyError");
    case MIXEDKV_UNREADABLE:
        return py::module_::import("mixedkv.errors").attr("ModelReadError");
    case MIXEDKV_INTERRUPTED:
        return py::reinterpret_borrow<py::object>(PyExc_KeyboardInterrupt);
    default:
        return py::reinterpret_borrow<py::object>(PyExc_RuntimeError);
    }
}

void register_errors(py::module_ & m) {
    py::register_local_exception_translator([](std::exception_ptr p) {
        try {
            std::rethrow_exception(p);
        } catch (const status_error & e) {
            py::set_error(exception_type(e.status), e.what());
        }
    });
    m.def("last_error", [] { return std::string(mixedkv_last_error()); });
}

} // namespace mixedkv_py
