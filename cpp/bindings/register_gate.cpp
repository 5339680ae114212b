// Which threads are inside a context. It is not freed under them, and one at a time uses it.

#include "bindings.h"

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <thread>

namespace py = pybind11;
using namespace py::literals;

namespace mixedkv_py {

[[noreturn]] static void raise(const char * type, const std::string & message) {
    py::set_error(py::module_::import("mixedkv.errors").attr(type), message.c_str());
    throw py::error_already_set();
}

// A wait ends now and then for Python to run the handlers of signals
static constexpr auto EVERY = std::chrono::milliseconds(20);

// Lives as long as Python needs it, which is longer than the context. `mutex` is never held while the GIL is waited
// for.
class gate {
  public:
    gate() = default;

    gate(const gate &) = delete;

    void open(uintptr_t address) { ctx = pointer<llama_context>(address); }

    // The context is not freed until this thread has left as often.
    void come() {
        if (!try_come()) {
            raise_closed();
        }
    }

    void go() {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto                        it = inside.find(std::this_thread::get_id());
        if (it != inside.end() && --it->second == 0) {
            inside.erase(it);
            changed.notify_all();
        }
    }

    // And no other thread uses it. `what` is not empty: MIXEDKV_BUSY where one does.
    void take(const std::string & what) {
        come();
        try {
            own(what);
        } catch (...) {
            go();
            throw;
        }
    }

    void give() {
        if (ctx) {
            mixedkv_leave(ctx);
        }
        disown();
        go();
    }

    // Lets nobody in any more. Who waits leaves.
    void refuse() {
        const std::lock_guard<std::mutex> lock(mutex);
        refuses = true;
        changed.notify_all();
    }

    // And waits until all have left. Can be called again.
    void shut() {
        if (is_inside()) {
            throw std::runtime_error("close: this thread is using the Llama: close it when the call has returned");
        }
        refuse();
        wait_until([&] { return inside.empty(); });
        ctx = nullptr;
    }

    bool is_inside() {
        const std::lock_guard<std::mutex> lock(mutex);
        return inside.count(std::this_thread::get_id()) > 0;
    }

    bool is_empty() {
        const std::lock_guard<std::mutex> lock(mutex);
        return inside.empty();
    }

    bool is_refusing() {
        const std::lock_guard<std::mutex> lock(mutex);
        return refuses;
    }

  private:
    [[noreturn]] static void raise_closed() {
        raise("ClosedError",
              "this Llama is closed: its model and its KV cache are gone. Keep the Llama itself (llm = Llama(...)), "
              "and open, for as long as llm.kv is used");
    }

    bool try_come() {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto                        me = std::this_thread::get_id();
        if (refuses && inside.count(me) == 0) {
            return false;
        }
        ++inside[me];
        return true;
    }

    // `ready` is called with the mutex held and without the GIL
    template <typename F>
    void wait_until(F && ready) {
        while (true) {
            {
                const py::gil_scoped_release released;
                std::unique_lock<std::mutex> lock(mutex);
                if (changed.wait_for(lock, EVERY, ready)) {
                    return;
                }
            }
            if (PyErr_CheckSignals() != 0) {
                throw py::error_already_set();
            }
        }
    }

    bool try_own() {
        const auto me = std::this_thread::get_id();
        if (depth > 0 && owner != me) {
            return false;
        }
        owner = me;
        ++depth;
        return true;
    }

    void disown() {
        const std::lock_guard<std::mutex> lock(mutex);
        if (--depth == 0) {
            changed.notify_all();
        }
    }

    void own(const std::string & what) {
        bool owned;
        {
            const std::lock_guard<std::mutex> lock(mutex);
            owned = try_own();
        }
        if (!owned && !what.empty()) {
            raise_busy(what);
        }
        if (!owned) {
            wait_until([&] { return refuses || (owned = try_own()); });
        }
        if (!owned) {
            raise_closed();
        }
        try {
            enter_context(what);
        } catch (...) {
            disown();
            throw;
        }
    }

    // Whoever calls llama.cpp or the C API itself is not seen by the gate: the context has a lock of its own.
    void enter_context(const std::string & what) {
        while (ctx) {
            const mixedkv_status status = mixedkv_enter(ctx, false);
            if (status == MIXEDKV_OK) {
                return;
            }
            if (status != MIXEDKV_BUSY) {
                check(status);
            }
            if (!what.empty()) {
                raise_busy(what);
            }
            {
                const py::gil_scoped_release released;
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
            if (PyErr_CheckSignals() != 0) {
                throw py::error_already_set();
            }
        }
    }

    [[noreturn]] static void raise_busy(const std::string & what) {
        raise("ContextBusyError", what +
                                      ": another thread is using this context, and llama.cpp takes one at a time: call "
                                      "this on the thread that evaluates, or again later; with an engine through "
                                      "Engine.call");
    }

    llama_context *                ctx = nullptr;
    std::mutex                     mutex;
    std::condition_variable        changed;
    std::map<std::thread::id, int> inside; // how often each thread has come
    std::thread::id                owner;
    int                            depth   = 0; // how often the owner has taken it
    bool                           refuses = false;
};

// For `with`, which no signal comes between: entered and left, or neither.
class turn {
  public:
    turn(gate & to, bool alone, std::string what) : to(to), alone(alone), what(std::move(what)) {}

    void enter() {
        if (alone) {
            to.take(what);
        } else {
            to.come();
        }
    }

    void leave() {
        if (alone) {
            to.give();
        } else {
            to.go();
        }
    }

  private:
    gate &            to;
    const bool        alone;
    const std::string what;
};

void register_gate(py::module_ & m) {
    py::class_<turn>(m, "Turn").def("__enter__", &turn::enter).def("__exit__", [](turn & self, const py::args &) {
        self.leave();
    });

    const auto keeps_gate = py::keep_alive<0, 1>();
    py::class_<gate>(m, "Gate")
        .def(py::init<>())
        .def("open", &gate::open, "ctx"_a)
        .def("shut", &gate::shut)
        .def("refuse", &gate::refuse)
        .def_property_readonly("refuses", &gate::is_refusing)
        .def_property_readonly("empty", &gate::is_empty)
        .def_property_readonly("inside", &gate::is_inside)
        .def(
            "present", [](gate & self) { return turn(self, false, ""); }, keeps_gate)
        .def(
            "waiting", [](gate & self) { return turn(self, true, ""); }, keeps_gate)
        .def(
            "at_once", [](gate & self, const std::string & what) { return turn(self, true, what); }, "what"_a,
            keeps_gate);
}

} // namespace mixedkv_py
