#pragma once

// A graph of one operation, while a context is made

#include "ggml-backend.h"

#include <cstdint>

// With so many multiplications. Few have ended before ggml's other threads have begun, which then wait for each other.
inline ggml_status llama_kv_compute(ggml_backend_t backend, ggml_cgraph * gf, int64_t n_products) {
    ggml_backend_dev_t dev = ggml_backend_get_device(backend);
    if (dev && n_products < 1 << 26) {
        if (void * set = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), "ggml_backend_set_n_threads")) {
            reinterpret_cast<ggml_backend_set_n_threads_t>(set)(backend, 1);
        }
    }
    return ggml_backend_graph_compute(backend, gf);
}
