// Which layers have pages, and when their rows change: see graph/key-sketches.h.

#include "cache/mixed.h"

#include "llama-hparams.h"

#include <algorithm>
#include <stdexcept>

void llama_kv_cache_mixed::make_pages() {
    if (!config.mixed || config.sparse_error == 0.0f) {
        return;
    }
    if (!readers.is_fused() || readers.has_device_nodes()) {
        throw std::runtime_error("sparse needs the KV cache in CPU memory, where the fused attention reads it: set offload_kqv = false, "
                "or leave sparse out");
    }

    scratch.page_error = config.sparse_error;

    // a sliding window sees few keys, and its cells are taken over again and again
    if (n_swa > 0) {
        return;
    }

    pages.alloc(get_size(), n_stream, layers.size());
    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        const int32_t il = layers[ikv].il;
        scratch.most_heads_kv = std::max<int>(scratch.most_heads_kv, hparams.n_head_kv(il));
        pages.add(ikv, hparams.n_head_kv(il), hparams.n_embd_head_k(il));
    }
}

void llama_kv_cache_mixed::begin_pages(const slot_info & sinfo) {
    std::vector<std::pair<uint32_t, uint32_t>> written;

    for (uint32_t s = 0; s < sinfo.n_stream() && !pages.empty(); ++s) {
        for (const uint32_t cell : sinfo.idxs[s]) {
            written.emplace_back(sinfo.strm[s], cell);
        }
    }

    pages.begin_step(v_cells, written);
}

void llama_kv_cache_mixed::touch_rows(uint32_t strm, const std::vector<uint32_t> & cells) {
    for (const uint32_t cell : cells) {
        pages.touch(strm, cell);
    }
}

llama_kv_cache_mixed::page_check llama_kv_cache_mixed::check_pages() {
    page_check res;

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        const auto * layer = pages.get(ikv);
        if (!layer) {
            continue;
        }
        llama_kv_layer_sketch again = *layer;
        for (uint32_t strip = 0; strip < pages.get_n_strips()*n_stream; ++strip) {
            if (pages.get_known(0)[strip]) {
                again.make(llama_kv_node_rows(layers[ikv].k, again.d_k), strip);
                ++res.n_known;
            }
        }
        res.n_wrong += again.bits != layer->bits || again.steps != layer->steps;
    }

    return res;
}
