#pragma once

#include "llama-hparams.h"
#include "llama-kv-cache.h"

// upstream's cache has no getters for these
struct kv_access : llama_kv_cache {
    static const auto & get_layers(const llama_kv_cache & kv) { return kv.*(&kv_access::layers); }
    static const auto & get_ids   (const llama_kv_cache & kv) { return kv.*(&kv_access::map_layer_ids); }
    static       auto & get_cells (const llama_kv_cache & kv) { return *(kv.*(&kv_access::v_cells_impl)); }

    static bool     get_v_trans(const llama_kv_cache & kv) { return kv.*(&kv_access::v_trans); }
    static uint32_t get_n_swa  (const llama_kv_cache & kv) { return kv.*(&kv_access::n_swa); }

    static llama_swa_type get_swa_type(const llama_kv_cache & kv) { return kv.*(&kv_access::swa_type); }

    static bool is_masked(const llama_kv_cache & kv, llama_pos pos, llama_pos query) {
        return llama_hparams::is_masked_swa(get_n_swa(kv), get_swa_type(kv), pos, query);
    }

    // edge of the Hadamard blocks, 0: the cache is not rotated; as llama_kv_cache::build_input_k_rot and _v_rot choose them
    static int64_t get_rot(const llama_kv_cache & kv, bool is_k) {
        if (!(is_k ? kv.*(&kv_access::attn_rot_k) : kv.*(&kv_access::attn_rot_v))) {
            return 0;
        }
        int64_t res = 64;
        while (is_k && kv.*(&kv_access::n_embd_head_k_all) % (2*res) == 0) {
            res *= 2;
        }
        return res;
    }
};
