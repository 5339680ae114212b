#pragma once

#include "llama-kv-cache.h"

// What this folder assumes of llama.cpp and can be seen when a context is made: one that does otherwise is refused, before
// it computes anything. What can only be read is listed in vendor/copied.toml.

// throws unless it holds; `what` is what was assumed
void llama_kv_guard(bool holds, const char * what);

// the matrix [n, n] is the one that the nodes and the rows of blocks are rotated by
void llama_kv_guard_matrix(const float * matrix, int64_t n);

// so are those of a cache
void llama_kv_guard_rotation(const llama_kv_cache & kv);

// rows of the mask: [n_mask, n_tokens/n_stream, 1, n_stream], F16, one after the other
void llama_kv_guard_mask(const ggml_tensor * mask, int64_t n_mask, int64_t n_tokens);

// the device has flash attention for the F16 heads of this layer: llama.cpp would have the CPU compute it otherwise, with
// all rows sent over the bus in every step
void llama_kv_guard_flash(ggml_backend_dev_t dev, const llama_hparams & hparams, uint32_t il);

// the device writes rows of this type: ggml ends the process where it has to and cannot
void llama_kv_guard_rows(ggml_backend_dev_t dev, ggml_type type, uint32_t il);

// where llama.cpp attends, the device is not one that writes rows of this package's types and cannot read them: llama.cpp
// would have the CPU attend, with all rows sent over the bus in every step
void llama_kv_guard_reader(ggml_backend_dev_t dev, ggml_type type, uint32_t il);

// the device gathers rows of this tensor in F16. A backend that makes F32 of them says so nowhere: it is known by its name.
bool llama_kv_gathers_f16(ggml_backend_dev_t dev, ggml_tensor * rows);

// the device takes a tensor as large as these rows: the scheduler ends the process where it does not
void llama_kv_guard_size(ggml_backend_dev_t dev, const ggml_tensor * rows, uint32_t il);
