// Ends the evaluation that runs: for a signal, or because another thread asks.

#include "bindings.h"

#include "llama.h"

#include <atomic>
#include <chrono>
#include <memory>

namespace py = pybind11;
using namespace py::literals;

namespace mixedkv_py {

using steady = std::chrono::steady_clock;

static constexpr auto LOOK_EVERY = std::chrono::milliseconds(20);

// ggml asks between two nodes of a graph, on the thread that evaluates. Lives longer than the context.
class interrupt {
  public:
    explicit interrupt(uintptr_t ctx) :
        ctx(pointer<llama_context>(ctx)),
        main_thread(py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>()) {}

    interrupt(const interrupt &) = delete;

    // Whether graphs can be ended half-way. While they can, recurrent states are copied before each: hooks/step.h
    void watch(bool on) {
        if (on != watching) {
            llama_set_abort_callback(ctx, on ? &interrupt::on_node : nullptr, on ? this : nullptr);
            watching = on;
        }
    }

    // Any thread, and the handler of a signal
    void ask() { asked = true; }

    void clear() {
        asked = false;
        raised.reset();
    }

    // Raises what the handler of a signal raised, KeyboardInterrupt as a rule; else true where the end was asked for.
    bool take() {
        if (raised) {
            const py::error_already_set error = *raised;
            raised.reset();
            throw error;
        }
        return asked.exchange(false);
    }

  private:
    static bool on_node(void * data) {
        auto * self = static_cast<interrupt *>(data);
        return self->asked.load(std::memory_order_relaxed) || self->has_signal();
    }

    // Python runs the handlers of signals on its main thread, between its own instructions: there are none meanwhile
    bool has_signal() {
        if (PyThread_get_thread_ident() != main_thread) {
            return false;
        }
        const auto now = steady::now();
        if (now - looked < LOOK_EVERY) {
            return false;
        }
        looked = now;
        const py::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) {
            raised = std::make_unique<py::error_already_set>();
            return true;
        }
        return asked;
    }

    llama_context * const                  ctx;
    const unsigned long                    main_thread;
    bool                                   watching = false;
    std::atomic<bool>                      asked{ false };
    steady::time_point                     looked;
    std::unique_ptr<py::error_already_set> raised;
};

void register_interrupt(py::module_ & m) {
    py::class_<interrupt>(m, "Interrupt")
        .def(py::init<uintptr_t>(), "ctx"_a)
        .def("watch", &interrupt::watch, "on"_a)
        .def("ask", &interrupt::ask)
        .def("clear", &interrupt::clear)
        .def("take", &interrupt::take);
}

} // namespace mixedkv_py
