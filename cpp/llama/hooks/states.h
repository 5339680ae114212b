#pragma once

#include "llama-memory-recurrent.h"

#include <cstddef>
#include <cstdint>

// body(tensor, offset in it, bytes) for all states of cells [first, first + n), their snapshots among them
template <typename F>
void llama_kv_for_each_state(const llama_memory_recurrent & mem, uint32_t first, uint32_t n, F && body) {
    for (const auto * layers : { &mem.r_l, &mem.s_l, &mem.p_l }) {
        for (ggml_tensor * t : *layers) {
            for (uint32_t i = 0; t && i < 1 + mem.n_rs_seq; ++i) {
                body(t, (size_t(i)*mem.size + first)*t->nb[1], n*t->nb[1]);
            }
        }
    }
}
