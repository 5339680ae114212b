// An assertion of ggml that fails while a model is loaded or a context made says that the file is bad: an exception,
// not the end of the process.

#include "bindings.h"

#include "ggml.h"

#include <cstdio>
#include <mutex>
#include <stdexcept>
#include <string>

namespace py = pybind11;

namespace mixedkv_py {

class assertions {
  public:
    assertions() = default;

    assertions(const assertions &) = delete;

    // on the thread whose assertions shall be exceptions, until leave
    void enter() {
        outer   = current;
        current = this;

        const std::lock_guard<std::mutex> lock(mutex);
        if (n_inside++ == 0) {
            previous = ggml_set_abort_callback(&assertions::on_abort);
        }
    }

    void leave() {
        current = outer;

        const std::lock_guard<std::mutex> lock(mutex);
        if (--n_inside == 0) {
            ggml_set_abort_callback(previous);
        }
    }

    std::string failed; // what ggml says of it, "" if none

  private:
    // ggml ends the process where this returns. llama.cpp's functions that load and make contexts catch what is thrown.
    static void on_abort(const char * message) {
        if (current == nullptr) {
            fprintf(stderr, "%s\n", message);
            return;
        }
        current->failed = message;
        throw std::runtime_error(message);
    }

    assertions * outer = nullptr;

    static inline thread_local assertions * current = nullptr;
    static inline std::mutex                mutex;
    static inline int                       n_inside = 0;
    static inline ggml_abort_callback_t     previous = nullptr;
};

void register_assertions(py::module_ & m) {
    py::class_<assertions>(m, "Assertions")
        .def(py::init<>())
        .def(
            "__enter__",
            [](assertions & self) -> assertions & {
                self.enter();
                return self;
            },
            py::return_value_policy::reference_internal)
        .def("__exit__", [](assertions & self, const py::args &) { self.leave(); })
        .def_readonly("failed", &assertions::failed);
}

} // namespace mixedkv_py
