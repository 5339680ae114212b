#include "graph/page-summaries.h"

#include <algorithm>

static constexpr uint32_t N_PAGE = mixedkv::attention_page;

void llama_kv_layer_pages::sum_up(
        const mixedkv::attention_rows & k, const std::vector<mixedkv::attention_pair> * source, uint32_t page) {
    const int64_t first = int64_t(page)*N_PAGE;

    mixedkv::attention_sum_up_page(k, first, n_head_kv, d_k, means.data() + size_t(page)*n_head_kv*d_k, spreads.data() + size_t(page)*n_head_kv);

    for (size_t i = 0; i < pairs.size(); ++i) {
        const float * const from[] = { (*source)[i].cosines, (*source)[i].sines };
        for (int j = 0; j < 2; ++j) {
            float sum = 0.0f;
            for (uint32_t key = 0; key < N_PAGE; ++key) {
                sum += from[j][first + key];
            }
            turns[2*i + j][page] = sum/N_PAGE;
        }
    }
}

size_t llama_kv_layer_pages::n_bytes() const {
    size_t res = means.size()*sizeof(means[0]) + spreads.size()*sizeof(spreads[0]);
    for (const auto & row : turns) {
        res += row.size()*sizeof(row[0]);
    }
    return res;
}

void llama_kv_pages::alloc(uint32_t n_cells, uint32_t n_stream, size_t n_layers) {
    n_pages = n_cells/N_PAGE; // a page that is not whole is always read
    known.assign(size_t(n_pages + 1)*n_stream, 0);
    is_listed.assign(known.size(), 0);
    layers.resize(n_layers);
}

void llama_kv_pages::add(size_t ikv, int n_head_kv, int d_k, const std::vector<mixedkv::attention_pair> * pairs) {
    auto res = std::make_unique<llama_kv_layer_pages>();

    res->n_head_kv = n_head_kv;
    res->d_k       = d_k;
    res->means.resize(known.size()*n_head_kv*d_k);
    res->spreads.resize(known.size()*n_head_kv);
    if (pairs) {
        res->pairs = *pairs;
        for (auto & pair : res->pairs) {
            for (const float ** to : { &pair.cosines, &pair.sines }) {
                res->turns.emplace_back(known.size() + N_PAGE); // vectors of them are read
                *to = res->turns.back().data();
            }
        }
    }

    layers[ikv] = std::move(res);
}

void llama_kv_pages::touch(uint32_t strm, uint32_t cell) {
    const uint32_t page = strm*n_pages + cell/N_PAGE;

    if (empty() || cell/N_PAGE >= n_pages) {
        return;
    }

    known[page] = 0;
    if (!is_listed[page]) {
        is_listed[page] = 1;
        changed.push_back(page);
    }
}

void llama_kv_pages::touch_stream(uint32_t strm) {
    for (uint32_t page = 0; page < n_pages; ++page) {
        touch(strm, page*N_PAGE);
    }
}

void llama_kv_pages::touch_moved(const std::vector<llama_kv_cells> & cells) {
    for (uint32_t strm = 0; strm < cells.size() && !empty(); ++strm) {
        for (uint32_t cell = 0; cell < cells[strm].size(); ++cell) {
            if (!cells[strm].is_empty(cell) && cells[strm].get_shift(cell) != 0) {
                touch(strm, cell);
            }
        }
    }
}

void llama_kv_pages::begin_step(const std::vector<llama_kv_cells> & cells, const std::vector<std::pair<uint32_t, uint32_t>> & written) {
    static constexpr uint8_t IS_WRITTEN = 2;

    if (empty()) {
        return;
    }

    for (const auto & [strm, cell] : written) {
        touch(strm, cell);
        is_listed[strm*n_pages + std::min(cell/N_PAGE, n_pages - 1)] = IS_WRITTEN;
    }

    const auto is_whole = [&](uint32_t page) {
        const uint32_t first = page % n_pages*N_PAGE;
        for (uint32_t cell = first; cell < first + N_PAGE; ++cell) {
            if (cells[page/n_pages].is_empty(cell)) {
                return false; // nobody sees all of it
            }
        }
        return true;
    };

    due.clear();
    size_t n = 0;
    for (const uint32_t page : changed) {
        if (is_listed[page] == IS_WRITTEN || !is_whole(page)) {
            is_listed[page] = 1;
            changed[n++] = page;
        } else {
            is_listed[page] = 0;
            known[page]     = 1;
            due.push_back(page);
        }
    }
    changed.resize(n);
}

void llama_kv_pages::undo_step() {
    for (const uint32_t page : due) {
        touch(page/n_pages, page % n_pages*N_PAGE);
    }
    due.clear();
}

size_t llama_kv_pages::n_bytes() const {
    size_t res = 0;
    for (const auto & layer : layers) {
        res += layer ? layer->n_bytes() : 0;
    }
    return res;
}
