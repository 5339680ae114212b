// How far a model has been loaded, and Ctrl-C meanwhile.

#include "bindings.h"

#include <memory>
#include <utility>

namespace py = pybind11;
using namespace py::literals;

namespace mixedkv_py {

class loading {
  public:
    explicit loading(py::object progress) : progress(std::move(progress)) {}

    loading(const loading &) = delete;

    // for llama_model_params::progress_callback, which goes with this object's address
    uintptr_t callback() const { return reinterpret_cast<uintptr_t>(&loading::on_progress); }

    uintptr_t address() const { return reinterpret_cast<uintptr_t>(this); }

    // Raises what ended the loading, if it was the handler of a signal or `progress`
    void check() {
        if (raised) {
            const py::error_already_set error = *raised;
            raised.reset();
            throw error;
        }
    }

  private:
    // Python handles signals between its own instructions, and of those there are none meanwhile
    static bool on_progress(float share, void * data) {
        auto * self = static_cast<loading *>(data);

        const py::gil_scoped_acquire gil;
        try {
            if (PyErr_CheckSignals() != 0) {
                throw py::error_already_set();
            }
            if (!self->progress.is_none()) {
                self->progress(share);
            }
            return true;
        } catch (const py::error_already_set & error) {
            self->raised = std::make_unique<py::error_already_set>(error);
            return false;
        }
    }

    const py::object                       progress;
    std::unique_ptr<py::error_already_set> raised;
};

void register_loading(py::module_ & m) {
    py::class_<loading>(m, "Loading")
        .def(py::init<py::object>(), "progress"_a)
        .def("callback", &loading::callback)
        .def("address", &loading::address)
        .def("check", &loading::check);
}

} // namespace mixedkv_py
