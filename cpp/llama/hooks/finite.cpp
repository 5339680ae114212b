#include "hooks/finite.h"

#include "cache/mixed.h"
#include "graph/query-sums.h"
#include "hooks/states.h"
#include "hooks/support.h"
#include "rows/access.h"

#include "llama-context.h"
#include "llama-graph.h"

#include <algorithm>
#include <cstring>

// No NaN, not plus infinity, and not all of them minus infinity, which those are that nobody wants. On integers, since a compiler
// may take floats to be numbers.
static bool is_finite(const float * x, int64_t n) {
    static constexpr uint32_t infinity = 0x7f800000;

    uint32_t wrong = 0;
    uint32_t some  = 0;

    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof(bits));

        wrong |= uint32_t(int32_t(bits & ~(1u << 31)) > int32_t(infinity)) | uint32_t(bits == infinity);
        some  |= bits ^ (infinity | (1u << 31));
    }

    return !wrong && some;
}

const float * llama_finite_watch::fetch(llama_context & ctx, const ggml_tensor * t) {
    const ggml_tensor * owner = t->view_src ? t->view_src : t;

    if (owner->buffer && ggml_backend_buffer_is_host(owner->buffer)) {
        return (const float *) t->data;
    }

    ctx.synchronize();
    room.resize(ggml_nelements(t));
    ggml_backend_tensor_get(t, room.data(), 0, ggml_nbytes(t));
    return room.data();
}

void llama_finite_watch::note(const llama_ubatch & ubatch, uint32_t i) {
    for (int32_t j = 0; j < ubatch.n_seq_id[i]; ++j) {
        const auto [it, is_new] = found.emplace(ubatch.seq_id[i][j], ubatch.pos[i]);
        it->second = std::min(it->second, ubatch.pos[i]);
    }
}

static bool is_readable(const ggml_tensor * t) {
    return t && t->type == GGML_TYPE_F32 && t->data && ggml_is_contiguous(t);
}

void llama_finite_watch::end_step(llama_context & ctx, llm_graph_result & res, const llama_ubatch & ubatch) {
    if (off) {
        return;
    }

    const size_t n_before = found.size();
    ggml_cgraph * gf      = res.get_gf();

    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        const ggml_tensor * t = ggml_graph_node(gf, i);
        if (!llama_kv_is_query_sums(t) || t->ne[1] != int64_t(ubatch.n_tokens)) {
            continue;
        }
        const float * sums = fetch(ctx, t);
        for (uint32_t j = 0; j < ubatch.n_tokens; ++j) {
            if (!is_finite(sums + j, 1)) {
                note(ubatch, j);
            }
        }
    }

    // of a body without a head: its hidden states
    const ggml_tensor * out = is_readable(res.get_logits()) ? res.get_logits() : res.get_embd();
    if (is_readable(out)) {
        const bool    all = out->ne[1] == int64_t(ubatch.n_tokens);
        const float * row = fetch(ctx, out);
        for (uint32_t j = 0, n = 0; j < ubatch.n_tokens && n < out->ne[1]; ++j) {
            if (!all && !ubatch.output[j]) {
                continue;
            }
            if (!is_finite(row + out->ne[0]*n++, out->ne[0])) {
                note(ubatch, j);
            }
        }
    }

    if (!found.empty() && !llama_kv_mixed_caches(ctx.get_memory()).empty()) {
        for (const auto & [seq_id, pos] : found) {
            ctx.hooks.validity.limit(ctx.get_memory(), seq_id, pos, -1, MIXEDKV_UNVERIFIED);
        }
    }
    if (found.size() > n_before) {
        LLAMA_LOG_ERROR("mixedkv: NaN or infinite values came out of sequence %d at position %d\n",
                found.begin()->first, found.begin()->second);
    }
}

std::vector<mixedkv_not_finite> llama_finite_watch::get() const {
    std::vector<mixedkv_not_finite> res;
    for (const auto & [seq_id, pos] : found) {
        res.push_back({ seq_id, pos });
    }
    return res;
}

//
// cells that no sequence has
//

// body(first, n) for each run of cells in [0, size) that is_unused
template <typename P, typename F> static void for_each_run(uint32_t size, P && is_unused, F && body) {
    for (uint32_t i = 0, n; i < size; i += n + 1) {
        for (n = 0; i + n < size && is_unused(i + n); ++n) {}
        if (n > 0) {
            body(i, n);
        }
    }
}

static void clear_rows(const llama_kv_cache & kv) {
    const bool v_trans = kv_access::get_v_trans(kv);

    for (uint32_t s = 0; s < kv.get_n_stream(); ++s) {
        const auto & cells = kv_access::get_cells(kv)[s];

        for_each_run(kv.get_size(), [&](uint32_t i) { return cells.is_empty(i); }, [&](uint32_t first, uint32_t n) {
            for (const auto & layer : kv_access::get_layers(kv)) {
                ggml_backend_tensor_memset(layer.k, 0, s*layer.k->nb[2] + first*layer.k->nb[1], n*layer.k->nb[1]);
                if (!layer.v) {
                    continue;
                }
                if (!v_trans) {
                    ggml_backend_tensor_memset(layer.v, 0, s*layer.v->nb[2] + first*layer.v->nb[1], n*layer.v->nb[1]);
                    continue;
                }
                const size_t size = ggml_element_size(layer.v); // [kv_size, n_embd_v_gqa], whatever ne says
                for (int64_t j = 0; j < layer.v->ne[0]; ++j) {
                    ggml_backend_tensor_memset(layer.v, 0, s*layer.v->nb[2] + (j*kv.get_size() + first)*size, n*size);
                }
            }
        });
    }
}

static void clear_states(const llama_memory_recurrent & mem) {
    for_each_run(mem.size, [&](uint32_t i) { return mem.cells[i].is_empty(); }, [&](uint32_t first, uint32_t n) {
        llama_kv_for_each_state(mem, first, n, [](ggml_tensor * t, size_t at, size_t bytes) { ggml_backend_tensor_memset(t, 0, at, bytes); });
    });
}

void llama_kv_clear_unused(llama_context & ctx) {
    ctx.synchronize();

    for (auto * kv : llama_kv_mixed_caches(ctx.get_memory())) {
        clear_rows(*kv);
        if (auto * mixed = dynamic_cast<llama_kv_cache_mixed *>(kv)) {
            mixed->get_hot().clear_unused();
        }
    }
    if (const auto * mem = llama_kv_mixed_states(ctx.get_memory())) {
        clear_states(*mem);
    }
}
