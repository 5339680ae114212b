// Values in bases of their own, see docs/decisions/048.

#include "llama-kv-cache-mixed.h"
#include "llama-kv-rows-access.h"

#include <algorithm>

void llama_kv_cache_mixed::make_bases() {
    // where all layers are fused nobody rotates: their nodes are told so
    const int64_t rotation = is_fused() ? 0 : kv_access::get_rot(*this, false);

    for (const auto & layer : layers) {
        for (uint32_t i = 0; config.mixed && i < config.n_bases; ++i) {
            if (config.bases[i].il == int32_t(layer.il)) {
                bases.add(config.bases[i], ggml_backend_buffer_get_type(layer.v->buffer), rotation);
            }
        }
    }
}

uint32_t llama_kv_cache_mixed::get_rows_id(int32_t il) const {
    const uint32_t scales = get_scales(il) ? get_scales(il)->id : 0;

    return get_basis(il) ? std::max(scales*16777619u ^ get_basis(il)->id, 1u) : scales;
}

ggml_tensor * llama_kv_cache_mixed::build_to_basis(ggml_context * ctx, ggml_tensor * v, int32_t il) const {
    v = is_calibrated() ? bases.build_to(ctx, v, map_layer_ids.at(il)) : v;

    return is_calibrated() && !is_fused(il) ? ggml_cont(ctx, v) : v;
}

ggml_tensor * llama_kv_cache_mixed::build_from_basis(ggml_context * ctx, ggml_tensor * out, int32_t il) const {
    return is_calibrated() ? bases.build_from(ctx, out, map_layer_ids.at(il)) : out;
}
