#pragma once

#include "llama-hparams.h"
#include "llama-kv-cache.h"

#include "ggml-cpp.h"

// upstream's cache has no getters for these
struct kv_access : llama_kv_cache {
    static const auto & get_layers(const llama_kv_cache & kv) { return kv.*(&kv_access::layers); }
    static const auto & get_ids   (const llama_kv_cache & kv) { return kv.*(&kv_access::map_layer_ids); }
    static       auto & get_cells (const llama_kv_cache & kv) { return *(kv.*(&kv_access::v_cells_impl)); }

    // the stream of each sequence
    static const auto & get_streams(const llama_kv_cache & kv) { return kv.*(&kv_access::seq_to_stream); }

    static bool     get_v_trans(const llama_kv_cache & kv) { return kv.*(&kv_access::v_trans); }
    static uint32_t get_n_swa  (const llama_kv_cache & kv) { return kv.*(&kv_access::n_swa); }

    // its cells are another cache's, which turns their keys
    static bool is_shared(const llama_kv_cache & kv) { return kv.*(&kv_access::other); }

    static llama_swa_type get_swa_type(const llama_kv_cache & kv) { return kv.*(&kv_access::swa_type); }

    static bool is_masked(const llama_kv_cache & kv, llama_pos pos, llama_pos query) {
        return llama_hparams::is_masked_swa(get_n_swa(kv), get_swa_type(kv), pos, query);
    }

    // the matrix that rows are rotated by, nullptr: they are not
    static ggml_tensor * build_rot(const llama_kv_cache & kv, bool is_k, ggml_context * ctx) {
        return is_k ? kv.build_input_k_rot(ctx) : kv.build_input_v_rot(ctx);
    }

    // its edge, 0: upstream rotates nothing
    static int64_t get_rot(const llama_kv_cache & kv, bool is_k) {
        ggml_context_ptr    ctx(ggml_init({ ggml_tensor_overhead(), nullptr, true }));
        const ggml_tensor * rot = build_rot(kv, is_k, ctx.get());
        return rot ? rot->ne[0] : 0;
    }
};
