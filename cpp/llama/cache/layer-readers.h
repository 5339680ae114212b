#pragma once

// Which node reads the rows of each layer of a cache. The fused node reads them as they lie, on the CPU or on a CUDA device. On
// Vulkan llama.cpp's own shaders can too (graph/in-place.h), where that is asked for. Otherwise attention of a backend reads a
// merged view: an F16 copy of all rows, made in the graph (cache/mixed-view.cpp).
//
// llama_kv_cache_mixed composes one, and it never changes: graphs are built by it. Others reach it through
// llama_kv_cache_mixed::get_readers().

#include "mixedkv/mixedkv.h"

#include "ggml-backend.h"
#include "graph/node.h"
#include "llama-kv-cache.h"
#include "rows/row-basis.h"

#include <cstdint>
#include <vector>

// Whether there are GPUs, and each reads the rows of such a layer as they lie where it keeps values and subtracts no bias
bool llama_kv_devices_read(const llama_kv_layer_shape & layer);

class llama_kv_layer_readers {
public:
    // with its base, which outlives this; has_hot: there are F16 rows besides. Throws where attention has to be fused and can
    // neither be that nor in place
    llama_kv_layer_readers(const llama_kv_cache & cold, const llama_hparams & hparams, const llama_kv_row_basis & basis,
            mixedkv_attention attention, bool has_hot);

    // the fused node reads this layer
    bool is_fused(int32_t il) const { return get(il).fused; }

    // the device that has its rows computes these nodes
    bool is_on_device(int32_t il) const { return get(il).on_device; }

    // llama.cpp's own attention on the device that has its rows reads them as they lie
    bool is_in_place(int32_t il) const { return get(il).in_place; }

    // where there are F16 rows: it is given a view
    bool is_merged(int32_t il) const { return !is_fused(il) && !is_in_place(il); }

    // the fused node reads every layer
    bool is_fused() const;

    // some layer is read by the fused node: on a device, and on the CPU, which has an order of the F16 rows
    bool has_device_nodes() const;
    bool has_cpu_nodes() const;

    // attention that is made by backends has its fast bodies for such numbers of columns, and ours copies them by 16 bytes
    bool pads_mask() const { return !is_fused() || has_device_nodes(); }

    // which makes F16 rows as it gathers them: the merged view takes one pass over the cold rows, unless a bias is subtracted from K
    bool gathers_k(int32_t il) const { return get(il).gathers_k; }
    bool gathers_v(int32_t il) const { return get(il).gathers_v; }

    // the device of this layer's rows
    ggml_backend_dev_t get_device(int32_t il) const;

    // the layer stores no values: they are the first elements of its keys
    bool is_latent(int32_t il) const;

    // models can attend to the rows of a lower layer: whose rows layer il reads, and the last layer that does
    int32_t get_layer_id(int32_t il) const;
    bool    is_last_reader(int32_t il) const { return get(il).last_reader == il; }

    // layers that attend to the rows of this cache
    uint32_t get_n_readers() const;

private:
    struct layer {
        bool    fused;
        bool    on_device; // of those that are fused
        bool    in_place;  // of those that are not
        bool    gathers_k;
        bool    gathers_v;
        int32_t last_reader;
    };

    const llama_kv_cache & cold;

    std::vector<layer> layers; // by index of the KV cache layer

    const layer & get(int32_t il) const;
};
