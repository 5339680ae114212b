// What the register_*.cpp files share: handles from Python, and statuses as Python exceptions.

#pragma once

#include "mixedkv/mixedkv.h"
#include "spec/spec.h"

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace mixedkv_py {

// A status other than MIXEDKV_OK, with the message of the thread it was returned on.
class status_error : public std::runtime_error {
  public:
    status_error(mixedkv_status status, const std::string & message) : std::runtime_error(message), status(status) {}

    const mixedkv_status status;
};

inline void check(mixedkv_status status) {
    if (status != MIXEDKV_OK) {
        throw status_error(status, mixedkv_last_error());
    }
}

// Addresses come from llama_cpp, whose ctypes handles are plain integers; a closed object hands out none.
template <typename T>
T * pointer(uintptr_t address) {
    if (address == 0) {
        throw pybind11::value_error("the llama.cpp object is closed: its address is 0");
    }
    return reinterpret_cast<T *>(address);
}

// A list of the C API: first its length, then its entries.
template <typename T>
using list_fn = mixedkv_status (*)(llama_context * ctx, T * out, uint32_t n, uint32_t * n_out);

template <typename T>
std::vector<T> fetch(llama_context * ctx, list_fn<T> list) {
    uint32_t n = 0;
    check(list(ctx, nullptr, 0, &n));

    std::vector<T> out(n);
    check(list(ctx, out.data(), n, &n));
    out.resize(n < out.size() ? n : out.size());
    return out;
}

// Fields of a Python setting by name, numbers or text. Raises ValueError where one is out of range.
mixedkv::cache_spec to_spec(bool mixed, const pybind11::dict & fields);

void register_errors(pybind11::module_ & m);
void register_config(pybind11::module_ & m);
void register_spec(pybind11::module_ & m);
void register_stats(pybind11::module_ & m);
void register_rows(pybind11::module_ & m);
void register_blocks(pybind11::module_ & m);
void register_threads(pybind11::module_ & m);
void register_gate(pybind11::module_ & m);
void register_interrupt(pybind11::module_ & m);
void register_log(pybind11::module_ & m);
void register_matrix(pybind11::module_ & m);
void register_stream(pybind11::module_ & m);
void register_loading(pybind11::module_ & m);
void register_assertions(pybind11::module_ & m);
void register_hidden(pybind11::module_ & m);

} // namespace mixedkv_py
