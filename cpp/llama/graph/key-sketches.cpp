#include "graph/key-sketches.h"

#include <algorithm>

static constexpr uint32_t N_STRIP = mixedkv::attention_strip;

void llama_kv_layer_sketch::make(const mixedkv::attention_rows & k, uint32_t strip) {
    mixedkv::attention_sketch(k, int64_t(strip)*N_STRIP, n_head_kv, d_k, bits.data() + strip*mixedkv::attention_sketch_bytes(d_k),
            steps.data() + size_t(strip)*N_STRIP, n_strips);
}

void llama_kv_sketches::alloc(uint32_t n_cells, uint32_t n_stream, size_t n_layers) {
    n_strips = n_cells/N_STRIP; // a strip that is not whole is always read
    known.assign(size_t(n_strips + 1)*n_stream, 0);
    is_listed.assign(known.size(), 0);
    layers.resize(n_layers);
}

void llama_kv_sketches::add(size_t ikv, int n_head_kv, int d_k) {
    auto res = std::make_unique<llama_kv_layer_sketch>();

    res->n_head_kv = n_head_kv;
    res->d_k       = d_k;
    res->n_strips  = known.size();
    res->bits.resize(known.size()*n_head_kv*mixedkv::attention_sketch_bytes(d_k));
    res->steps.resize(known.size()*n_head_kv*N_STRIP);

    layers[ikv] = std::move(res);
}

void llama_kv_sketches::touch(uint32_t strm, uint32_t cell) {
    const uint32_t strip = strm*n_strips + cell/N_STRIP;

    if (empty() || cell/N_STRIP >= n_strips) {
        return;
    }

    known[strip] = 0;
    if (!is_listed[strip]) {
        is_listed[strip] = 1;
        changed.push_back(strip);
    }
}

void llama_kv_sketches::touch_stream(uint32_t strm) {
    for (uint32_t strip = 0; strip < n_strips; ++strip) {
        touch(strm, strip*N_STRIP);
    }
}

void llama_kv_sketches::touch_moved(const std::vector<llama_kv_cells> & cells) {
    for (uint32_t strm = 0; strm < cells.size() && !empty(); ++strm) {
        for (uint32_t cell = 0; cell < cells[strm].size(); ++cell) {
            if (!cells[strm].is_empty(cell) && cells[strm].get_shift(cell) != 0) {
                touch(strm, cell);
            }
        }
    }
}

void llama_kv_sketches::begin_step(const std::vector<llama_kv_cells> & cells, const std::vector<std::pair<uint32_t, uint32_t>> & written) {
    static constexpr uint8_t IS_WRITTEN = 2;

    if (empty()) {
        return;
    }

    for (const auto & [strm, cell] : written) {
        touch(strm, cell);
        is_listed[strm*n_strips + std::min(cell/N_STRIP, n_strips - 1)] = IS_WRITTEN;
    }

    const auto is_whole = [&](uint32_t strip) {
        const uint32_t first = strip % n_strips*N_STRIP;
        for (uint32_t cell = first; cell < first + N_STRIP; ++cell) {
            if (cells[strip/n_strips].is_empty(cell)) {
                return false; // nobody sees all of it
            }
        }
        return true;
    };

    due.clear();
    size_t n = 0;
    for (const uint32_t strip : changed) {
        if (is_listed[strip] == IS_WRITTEN || !is_whole(strip)) {
            is_listed[strip] = 1;
            changed[n++] = strip;
        } else {
            is_listed[strip] = 0;
            known[strip]     = 1;
            due.push_back(strip);
        }
    }
    changed.resize(n);
}

void llama_kv_sketches::undo_step() {
    for (const uint32_t strip : due) {
        touch(strip/n_strips, strip % n_strips*N_STRIP);
    }
    due.clear();
}

size_t llama_kv_sketches::n_bytes() const {
    size_t res = 0;
    for (const auto & layer : layers) {
        res += layer ? layer->n_bytes() : 0;
    }
    return res;
}
