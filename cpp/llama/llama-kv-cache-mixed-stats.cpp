// What of a mixed cache can be seen from outside.

#include "llama-kv-cache-mixed.h"

#include <algorithm>

uint32_t llama_kv_cache_mixed::get_n_cells_hot() const {
    uint32_t res = 0;

    auto hot = window;
    hot.n_draft = 0;

    for (uint32_t strm = 0; strm < n_stream; ++strm) {
        for (const int32_t cell : rings[strm].owners()) {
            res += cell >= 0 && is_wanted(strm, cell, hot);
        }
    }

    return res;
}

size_t llama_kv_cache_mixed::get_ring_bytes(int32_t il) const {
    if (!has_ring()) {
        return 0;
    }

    const auto & ring = ring_layers[map_layer_ids.at(il)];

    return ggml_nbytes(ring.k) + (ring.v ? ggml_nbytes(ring.v) : 0);
}

uint64_t llama_kv_cache_mixed::get_bytes() const {
    uint64_t res = 0;

    for (const auto & layer : layers) {
        res += ggml_nbytes(layer.k) + (layer.v ? ggml_nbytes(layer.v) : 0) + get_ring_bytes(layer.il);
    }

    return res + pages.n_bytes();
}

uint64_t llama_kv_cache_mixed::get_bytes_f16() const {
    uint64_t res = 0;

    for (const auto & layer : layers) {
        res += (ggml_nelements(layer.k) + (layer.v ? ggml_nelements(layer.v) : 0))*sizeof(ggml_fp16_t);
    }

    return res;
}

size_t llama_kv_cache_mixed::get_view_bytes() const {
    size_t res = 0;

    for (size_t ikv = 0; has_ring() && ikv < layers.size(); ++ikv) {
        if (!fused[ikv]) {
            // F16 rows of K, then besides them V's in F32 and F16
            const size_t n_rows = GGML_PAD(get_size() + n_ring, n_pad_view)*n_stream;
            const size_t k      = layers[ikv].k->ne[0]*sizeof(ggml_fp16_t);
            const size_t v      = layers[ikv].v ? layers[ikv].v->ne[0]*sizeof(ggml_fp16_t) : 0;
            res = std::max(res, n_rows*std::max(3*k, k + 3*v));
        }
    }

    return res;
}

int32_t llama_kv_cache_mixed::get_hot_slot(uint32_t strm, uint32_t cell, llama_pos begin) const {
    return window.contains(v_cells[strm].pos_get(cell), begin) ? rings[strm].slot_of(cell) : mixedkv::hot_ring::none;
}
