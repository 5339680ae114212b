// A matrix of a GGUF file on ggml's CPU backend, outside any llama.cpp model: token embeddings and an output head.

#include "bindings.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <pybind11/numpy.h>

#include <functional>
#include <memory>

namespace py = pybind11;
using namespace py::literals;

namespace mixedkv_py {

struct ggml_deleter {
    void operator()(ggml_context * ctx) const { ggml_free(ctx); }

    void operator()(ggml_backend * backend) const { ggml_backend_free(backend); }

    void operator()(ggml_backend_buffer * buffer) const { ggml_backend_buffer_free(buffer); }

    void operator()(ggml_gallocr * allocator) const { ggml_gallocr_free(allocator); }
};

template <typename T>
using ggml_ptr = std::unique_ptr<T, ggml_deleter>;

static ggml_ptr<ggml_context> make_context(size_t n_tensors) {
    const size_t bytes = n_tensors * ggml_tensor_overhead() + ggml_graph_overhead();
    return ggml_ptr<ggml_context>(ggml_init({ bytes, nullptr, /*no_alloc=*/true }));
}

constexpr size_t alignment = 32; // of ggml's CPU buffers, and of tensors in a GGUF file

using floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using ids    = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;

// The data stay where they are, as they are: this object holds on to them. Not thread-safe.
class matrix {
  public:
    matrix(const py::buffer & data, int type, int64_t n_in, int64_t n_rows, int n_threads) :
        n_in(n_in), n_rows(n_rows), data(data), view(data.request()),
        device(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)) {
        check_shape(type);
        backend.reset(ggml_backend_dev_init(device, nullptr));
        auto * set_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
            ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads"));
        if (!backend || !set_threads) {
            throw std::runtime_error("this ggml has no CPU backend");
        }
        set_threads(backend.get(), n_threads);

        const size_t size = ggml_row_size(static_cast<ggml_type>(type), n_in) * n_rows;
        if (reinterpret_cast<uintptr_t>(view.ptr) % alignment != 0) { // ggml would end the process
            throw py::value_error("the data of a matrix must be aligned to 32 bytes");
        }
        buffer.reset(ggml_backend_dev_buffer_from_host_ptr(device, view.ptr, size, size));
        own    = make_context(1);
        weight = ggml_new_tensor_2d(own.get(), static_cast<ggml_type>(type), n_in, n_rows);
        if (!buffer || ggml_backend_tensor_alloc(buffer.get(), weight, view.ptr) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error("ggml could not take the data of a matrix");
        }
        allocator.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend.get())));
    }

    // Rows as numbers, [len(rows), n_in].
    floats rows(const ids & wanted) {
        const int64_t n = wanted.size();
        for (int64_t i = 0; i < n; i++) {
            if (wanted.data()[i] < 0 || wanted.data()[i] >= n_rows) {
                throw py::index_error("there is no row " + std::to_string(wanted.data()[i]));
            }
        }
        return compute(n, n_in, GGML_TYPE_I32, n, 1, wanted.data(),
                       [this](ggml_context * ctx, ggml_tensor * input) { return ggml_get_rows(ctx, weight, input); });
    }

    // Each vector times each row, [n, n_rows], as llama.cpp multiplies with a weight.
    floats multiply(const floats & vectors) {
        if (vectors.ndim() != 2 || vectors.shape(1) != n_in) {
            throw py::value_error("vectors must be [n, " + std::to_string(n_in) + "]");
        }
        const int64_t n = vectors.shape(0);
        return compute(n, n_rows, GGML_TYPE_F32, n_in, n, vectors.data(),
                       [this](ggml_context * ctx, ggml_tensor * input) { return ggml_mul_mat(ctx, weight, input); });
    }

  private:
    void check_shape(int type) const {
        if (type < 0 || type >= GGML_TYPE_COUNT || ggml_blck_size(static_cast<ggml_type>(type)) == 0) {
            throw py::value_error("there is no ggml type " + std::to_string(type));
        }
        const auto kind = static_cast<ggml_type>(type);
        if (n_in < 1 || n_rows < 1 || n_in > INT32_MAX || n_rows > INT32_MAX || n_in % ggml_blck_size(kind) != 0) {
            throw py::value_error("a matrix of this type cannot have this shape");
        }
        const size_t size = ggml_row_size(kind, n_in) * n_rows;
        if (static_cast<size_t>(view.size * view.itemsize) != size) {
            throw py::value_error("the data of a matrix must have " + std::to_string(size) + " bytes");
        }
    }

    using operation = std::function<ggml_tensor *(ggml_context *, ggml_tensor *)>;

    floats compute(int64_t n, int64_t width, ggml_type type, int64_t ne0, int64_t ne1, const void * input,
                   const operation & apply) {
        floats out({ n, width });
        if (n == 0) {
            return out;
        }
        const auto    ctx   = make_context(8);
        ggml_tensor * given = ggml_new_tensor_2d(ctx.get(), type, ne0, ne1);
        ggml_set_input(given);
        ggml_tensor * result = apply(ctx.get(), given);
        ggml_set_output(result);
        ggml_cgraph * graph = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(graph, result);
        if (!ggml_gallocr_alloc_graph(allocator.get(), graph)) {
            throw std::bad_alloc();
        }
        ggml_backend_tensor_set(given, input, 0, ggml_nbytes(given));
        float *     target = out.mutable_data();
        ggml_status status;
        {
            py::gil_scoped_release release;
            status = ggml_backend_graph_compute(backend.get(), graph);
        }
        if (status != GGML_STATUS_SUCCESS) {
            throw std::runtime_error("ggml could not compute");
        }
        ggml_backend_tensor_get(result, target, 0, ggml_nbytes(result));
        return out;
    }

    const int64_t n_in, n_rows;

    py::buffer         data;
    py::buffer_info    view;
    ggml_backend_dev_t device;

    ggml_ptr<ggml_backend>        backend;
    ggml_ptr<ggml_backend_buffer> buffer;
    ggml_ptr<ggml_context>        own;
    ggml_tensor *                 weight = nullptr;
    ggml_ptr<ggml_gallocr>        allocator;
};

void register_matrix(py::module_ & m) {
    py::class_<matrix>(m, "Matrix")
        .def(py::init<const py::buffer &, int, int64_t, int64_t, int>(), "data"_a, "type"_a, "n_in"_a, "n_rows"_a,
             "n_threads"_a)
        .def("rows", &matrix::rows, "ids"_a)
        .def("multiply", &matrix::multiply, "vectors"_a);
}

} // namespace mixedkv_py
