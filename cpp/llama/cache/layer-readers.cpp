#include "cache/layer-readers.h"

#include "graph/guard.h"
#include "graph/in-place.h"
#include "graph/node.h"
#include "rows/access.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

static llama_kv_layer_shape shape_of(const llama_hparams & hparams, uint32_t il, ggml_type type_k, ggml_type type_v) {
    llama_kv_layer_shape res;
    res.type_k        = type_k;
    res.type_v        = type_v;
    res.n_embd_head_k = hparams.n_embd_head_k(il);
    res.n_embd_head_v = hparams.n_embd_head_v(il);
    res.n_head        = hparams.n_head(il);
    res.n_head_kv     = hparams.n_head_kv(il);

    return res;
}

// Off unless asked for, until a GPU has run it: see docs/decisions/127
static bool may_read_in_place() {
    const char * value = std::getenv("MIXEDKV_IN_PLACE");
    return value && strcmp(value, "1") == 0;
}

bool llama_kv_devices_read(const llama_kv_layer_shape & layer) {
    constexpr int64_t any_size = 256;

    bool res = false;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_t dev  = ggml_backend_dev_get(i);
        const auto         type = ggml_backend_dev_type(dev);
        if (type != GGML_BACKEND_DEVICE_TYPE_GPU && type != GGML_BACKEND_DEVICE_TYPE_IGPU) {
            continue;
        }
        res = llama_kv_node_runs_on(dev, layer) || (may_read_in_place() && llama_kv_in_place_runs_on(dev, layer, any_size));
        if (!res) {
            break;
        }
    }
    return res;
}

static ggml_backend_dev_t device_of(const ggml_tensor * rows) {
    return ggml_backend_buft_get_device(ggml_backend_buffer_get_type(rows->buffer));
}

llama_kv_layer_readers::llama_kv_layer_readers(const llama_kv_cache & cold, const llama_hparams & hparams, const llama_kv_row_basis & basis,
        mixedkv_attention attention, bool has_hot) :
    cold(cold) {
    const bool may_fuse = attention != MIXEDKV_ATTENTION_MERGED;

    for (const auto & rows : kv_access::get_layers(cold)) {
        ggml_backend_dev_t dev = device_of(rows.k);

        const bool host     = ggml_backend_buft_is_host(ggml_backend_buffer_get_type(rows.k->buffer));
        const bool has_bias = basis.get_pairs(rows.il); // kernels of devices add no biases to K
        const auto shape    = shape_of(hparams, rows.il, rows.k->type, rows.v ? rows.v->type : rows.k->type);
        const bool has_node = !host && rows.v && llama_kv_node_runs_on(dev, shape);
        const bool gathers  = llama_kv_gathers_f16(dev, rows.k) && (!rows.v || llama_kv_gathers_f16(dev, rows.v));

        layer res;
        res.on_device   = may_fuse && has_node && !has_bias;
        res.fused       = res.on_device || (may_fuse && host);
        res.in_place    = may_fuse && may_read_in_place() && has_hot && !host && !res.fused && !has_bias && rows.v && llama_kv_in_place_runs_on(dev, shape, rows.k->ne[1]);
        res.gathers_k   = gathers && !has_bias;
        res.gathers_v   = gathers;
        res.last_reader = -1;
        layers.push_back(res);

        if (attention == MIXEDKV_ATTENTION_FUSED && !res.fused && !res.in_place) {
            throw std::runtime_error("attention 'fused' needs the KV cache in CPU memory, or on a CUDA device that has kernels for its "
                    "heads and types and no biases of K, but layer " + std::to_string(rows.il) + " has it elsewhere: use attention "
                    "'merged', or offload_kqv = false");
        }
    }

    const bool all_fused = is_fused();

    for (const auto & [il, ikv] : kv_access::get_ids(cold)) {
        layers[ikv].last_reader = std::max(layers[ikv].last_reader, int32_t(il));

        // the graph then changes the basis of all layers, and a node would look for biases in Q as it was
        layers[ikv].fused = layers[ikv].fused && (all_fused || !basis.get_pairs(il));
    }
}

const llama_kv_layer_readers::layer & llama_kv_layer_readers::get(int32_t il) const {
    return layers[kv_access::get_ids(cold).at(il)];
}

bool llama_kv_layer_readers::is_fused() const {
    return std::all_of(layers.begin(), layers.end(), [](const layer & l) { return l.fused; });
}

bool llama_kv_layer_readers::has_device_nodes() const {
    return std::any_of(layers.begin(), layers.end(), [](const layer & l) { return l.on_device; });
}

bool llama_kv_layer_readers::has_cpu_nodes() const {
    return std::any_of(layers.begin(), layers.end(), [](const layer & l) { return l.fused && !l.on_device; });
}

ggml_backend_dev_t llama_kv_layer_readers::get_device(int32_t il) const {
    return device_of(kv_access::get_layers(cold)[kv_access::get_ids(cold).at(il)].k);
}

bool llama_kv_layer_readers::is_latent(int32_t il) const {
    return !kv_access::get_layers(cold)[kv_access::get_ids(cold).at(il)].v;
}

int32_t llama_kv_layer_readers::get_layer_id(int32_t il) const {
    return kv_access::get_layers(cold)[kv_access::get_ids(cold).at(il)].il;
}

uint32_t llama_kv_layer_readers::get_n_readers() const {
    return kv_access::get_ids(cold).size();
}
