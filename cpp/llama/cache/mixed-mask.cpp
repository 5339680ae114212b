// What the tokens of a ubatch see: of cells, and of F16 rows in their place (docs/decisions/002).

#include "cache/mixed-context.h"

#include <cstring>

static constexpr ggml_fp16_t F16_NEG_INF = 0xFC00;

void llama_kv_cache_mixed_context::set_input_kq_mask(ggml_tensor * dst, const llama_ubatch * ubatch, bool causal_attn) const {
    if (!kv_mixed->get_hot().has_rows()) {
        llama_kv_cache_context::set_input_kq_mask(dst, ubatch, causal_attn);
        return;
    }

    const int64_t n_kv   = get_n_kv();
    const int64_t n_mask = dst->ne[0];

    // upstream decides what is visible, in rows of n_kv columns at the front of the same memory
    ggml_tensor narrow = *dst;
    narrow.ne[0] = n_kv;
    for (int i = 1; i < GGML_MAX_DIMS; ++i) {
        narrow.nb[i] = narrow.nb[i - 1]*narrow.ne[i - 1];
    }
    llama_kv_cache_context::set_input_kq_mask(&narrow, ubatch, causal_attn);

    ggml_fp16_t * data = (ggml_fp16_t *) dst->data;

    for (int64_t i = dst->ne[1]*dst->ne[3] - 1; i >= 0; --i) {
        ggml_fp16_t * row = data + i*n_mask;

        memmove(row, data + i*n_kv, n_kv*sizeof(ggml_fp16_t));
        std::fill(row + n_kv, row + n_mask, F16_NEG_INF);
    }

    route_hot(dst, *ubatch);
    if (kv_mixed->has_cpu_nodes()) {
        order_hot(dst, *ubatch);
    }
}

// For each visible pair exactly one column stays open: the hot one where there is an F16 row, the cold one otherwise.
void llama_kv_cache_mixed_context::route_hot(ggml_tensor * mask, const llama_ubatch & ubatch) const {
    const auto & sinfo  = sinfos[i_cur];
    const auto & window = kv_mixed->get_hot().get_slots().get_window();

    const int64_t n_kv   = get_n_kv();
    const int64_t n_ring = kv_mixed->get_hot().get_n_rows();
    const int64_t n_tps  = sinfo.size();

    for (uint32_t s = 0; s < sinfo.n_stream(); ++s) {
        const auto & cells  = kv_mixed->get_stream_cells(sinfo.strm[s]);
        const auto & owners = step->hot.owners[s];

        for (int64_t ii = 0; ii < n_tps; ++ii) {
            const int64_t i = s*n_tps + ii;

            ggml_fp16_t * row = (ggml_fp16_t *) mask->data + i*mask->ne[0];

            const llama_pos begin = window.begin(ubatch.pos[i]);

            const auto route = [&](int64_t cell, llama_pos p, int64_t column) {
                if (row[cell] != F16_NEG_INF && window.contains(p, begin)) {
                    row[column] = row[cell];
                    row[cell]   = F16_NEG_INF;
                }
            };

            for (size_t slot = 0; slot < owners.size(); ++slot) {
                const int64_t cell = owners[slot];
                if (cell >= 0 && cell < n_kv && !cells.is_empty(cell)) {
                    route(cell, cells.pos_get(cell), n_kv + slot);
                }
            }

            for (int64_t jj = 0; jj < n_tps; ++jj) {
                route(sinfo.idxs[s][jj], ubatch.pos[s*n_tps + jj], n_kv + n_ring + jj);
            }
        }
    }
}

void llama_kv_cache_mixed_context::order_hot(const ggml_tensor * mask, const llama_ubatch & ubatch) const {
    const auto & sinfo = sinfos[i_cur];
    const auto & slots = kv_mixed->get_hot().get_slots();

    const int64_t n_kv   = get_n_kv();
    const int64_t n_ring = kv_mixed->get_hot().get_n_rows();
    const int64_t n_tps  = sinfo.size();

    auto & hot = kv_mixed->get_hot_keys();
    hot.resize(sinfo.n_stream());

    for (uint32_t s = 0; s < sinfo.n_stream(); ++s) {
        const uint32_t strm   = sinfo.strm[s];
        const auto &   cells  = kv_mixed->get_stream_cells(strm);
        const auto &   owners = step->hot.owners[s];
        auto &         order  = hot[s].order;

        order = kv_mixed->make_hot_order();
        for (size_t slot = 0; slot < owners.size(); ++slot) {
            const int64_t cell = owners[slot];
            if (cell >= 0 && cell < n_kv && !cells.is_empty(cell)) {
                order.add(slots.get_seq(strm, cell), cells.pos_get(cell), slot);
            }
        }
        for (int64_t jj = 0; jj < n_tps; ++jj) {
            order.add(slots.get_seq(strm, sinfo.idxs[s][jj]), ubatch.pos[s*n_tps + jj], n_ring + jj);
        }
        order.arrange(order.most_splits(slots.get_n_seq(), n_ring + n_tps));

        hot[s].mask.resize(n_tps*order.size());
        for (int64_t i = 0; i < n_tps; ++i) {
            const auto * row = (const ggml_fp16_t *) mask->data + (s*n_tps + i)*mask->ne[0];
            order.copy_mask(row + n_kv, hot[s].mask.data() + i*order.size());
        }
    }
}
