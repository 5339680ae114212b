// Weights that are read for each pass, and Ctrl-C meanwhile.

#include "bindings.h"

#include <memory>

namespace py = pybind11;
using namespace py::literals;

namespace mixedkv_py {

class stream {
  public:
    stream(bool prefetch, uint32_t n_slots, uint32_t n_threads, uint64_t chunk) :
        main_thread(py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>()) {
        const mixedkv_stream_config config = { prefetch, n_slots, n_threads, chunk, &stream::stop, this };
        mixedkv_py::check(mixedkv_stream_new(&config, &handle));
    }

    ~stream() { mixedkv_stream_free(handle); }

    stream(const stream &) = delete;

    uintptr_t buffer_type() const { return reinterpret_cast<uintptr_t>(mixedkv_stream_buffer_type(handle)); }

    py::dict stats() const {
        mixedkv_stream_stats s = {};
        mixedkv_py::check(mixedkv_stream_get_stats(handle, &s));
        return py::dict("bytes_read"_a = s.bytes_read, "n_layers"_a = s.n_layers, "n_holds"_a = s.n_holds,
                        "n_stalls"_a = s.n_stalls, "seconds_waiting"_a = s.seconds_waiting,
                        "seconds_reading"_a = s.seconds_reading, "bytes_ring"_a = s.bytes_ring,
                        "bytes_streamed"_a = s.bytes_streamed, "o_direct"_a = s.o_direct, "n_passes"_a = s.n_passes,
                        "seconds"_a = s.seconds);
    }

    // Raises what the signal's handler raised, KeyboardInterrupt as a rule
    void check() {
        mixedkv_status status;
        {
            const py::gil_scoped_release released; // another context's graph may ask stop()
            status = mixedkv_stream_check(handle);
        }
        if (raised) {
            const py::error_already_set error = *raised;
            raised.reset();
            throw error;
        }
        mixedkv_py::check(status);
    }

    py::tuple lock(uintptr_t model) const {
        uint64_t             n_locked = 0, n_bytes = 0;
        const mixedkv_status status =
            mixedkv_stream_lock(handle, pointer<const llama_model>(model), &n_locked, &n_bytes);
        if (status != MIXEDKV_OK && status != MIXEDKV_NOT_AVAILABLE) {
            mixedkv_py::check(status);
        }
        return py::make_tuple(n_locked, n_bytes, status == MIXEDKV_OK ? "" : mixedkv_last_error());
    }

  private:
    // Python handles signals on its main thread, and between its own instructions
    static bool stop(void * data) {
        auto * self = static_cast<stream *>(data);
        if (PyThread_get_thread_ident() != self->main_thread) {
            return false;
        }
        const py::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() == 0) {
            return false;
        }
        self->raised = std::make_unique<py::error_already_set>();
        return true;
    }

    mixedkv_stream *                       handle = nullptr;
    const unsigned long                    main_thread;
    std::unique_ptr<py::error_already_set> raised;
};

void register_stream(py::module_ & m) {
    py::class_<stream>(m, "Stream")
        .def(py::init<bool, uint32_t, uint32_t, uint64_t>(), "prefetch"_a, "n_slots"_a, "n_threads"_a, "chunk"_a)
        .def("buffer_type", &stream::buffer_type)
        .def("stats", &stream::stats)
        .def("check", &stream::check)
        .def("lock", &stream::lock, "model"_a);
}

} // namespace mixedkv_py
