// llama.cpp's log, without a Python function: the handler of a signal would run in it, and what that raises be lost.

#include "bindings.h"

#include "ggml.h"

namespace py = pybind11;

namespace mixedkv_py {

// Levels of `logging` that llama_cpp compares with that of its logger
static int python_level(ggml_log_level level) {
    switch (level) {
    case GGML_LOG_LEVEL_INFO:
        return 20;
    case GGML_LOG_LEVEL_WARN:
        return 30;
    case GGML_LOG_LEVEL_ERROR:
        return 40;
    case GGML_LOG_LEVEL_NONE:
        return 50;
    default:
        return 10;
    }
}

// As llama_cpp's own. `data` is its logger.
static void write(ggml_log_level level, const char * text, void * data) {
    if (!Py_IsInitialized()) {
        return;
    }
    const py::gil_scoped_acquire gil;
    try {
        const py::handle logger(static_cast<PyObject *>(data));
        if (logger.attr("level").cast<int>() > python_level(level)) {
            return;
        }
        const py::object err  = py::module_::import("sys").attr("stderr");
        PyObject * const line = PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(strlen(text)), "replace");
        err.attr("write")(py::reinterpret_steal<py::object>(line));
        err.attr("flush")();
    } catch (py::error_already_set & error) {
        if (error.matches(PyExc_KeyboardInterrupt)) {
            PyErr_SetInterrupt(); // not lost: raised again where it can end what runs
        } else {
            error.discard_as_unraisable("llama.cpp's log");
        }
    }
}

static void write_nothing(ggml_log_level, const char *, void *) {}

void register_log(py::module_ & m) {
    m.def("log_functions", [] {
        return py::make_tuple(reinterpret_cast<uintptr_t>(&write), reinterpret_cast<uintptr_t>(&write_nothing));
    });
}

} // namespace mixedkv_py
