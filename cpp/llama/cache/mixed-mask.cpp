// What the tokens of a ubatch see: of cells, and of F16 rows in their place (docs/decisions/002).

#include "cache/mixed-context.h"

#include <algorithm>
#include <cstring>
#include <limits>

static constexpr ggml_fp16_t F16_NEG_INF = 0xFC00;

void llama_kv_cache_mixed_context::set_input_kq_mask(ggml_tensor * dst, const llama_ubatch * ubatch, bool causal_attn) const {
    if (!hot.has_rows()) {
        llama_kv_cache_context::set_input_kq_mask(dst, ubatch, causal_attn);
        order_keys(dst, *ubatch);
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
    order_keys(dst, *ubatch);
}

// For each visible pair exactly one column stays open: the hot one where there is an F16 row, the cold one otherwise.
void llama_kv_cache_mixed_context::route_hot(ggml_tensor * mask, const llama_ubatch & ubatch) const {
    const auto & sinfo  = sinfos[i_cur];
    const auto & window = hot.get_slots().get_window();

    const int64_t n_kv   = get_n_kv();
    const int64_t n_ring = hot.get_n_rows();
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

// The sequences that the tokens of a step read
struct step_readers {
    std::vector<llama_seq_id> seqs;
    std::vector<int32_t>      of_token;
    llama_pos                 first_pos = std::numeric_limits<llama_pos>::max();

    step_readers(const llama_ubatch & ubatch, int64_t first, int64_t n_tokens) {
        for (int64_t i = first; i < first + n_tokens; ++i) {
            const llama_seq_id seq_id = ubatch.seq_id[i][0]; // as upstream's mask has it
            const auto         at     = std::find(seqs.begin(), seqs.end(), seq_id);

            of_token.push_back(at - seqs.begin());
            if (at == seqs.end()) {
                seqs.push_back(seq_id);
            }
            first_pos = std::min(first_pos, ubatch.pos[i]);
        }
    }

    void add_to(llama_kv_key_order & order, const llama_kv_cells::seq_set_t & cell_seqs, llama_kv_key_order::run keys) const {
        const auto has = [&](llama_seq_id seq_id) { return cell_seqs.test(seq_id); };

        keys.is_shared = std::count_if(seqs.begin(), seqs.end(), has) > 1;
        for (size_t reader = 0; reader < seqs.size(); ++reader) {
            if (has(seqs[reader])) {
                order.add(reader, keys);
            }
        }
    }
};

static_assert(LLAMA_MAX_SEQ <= llama_kv_key_order::most_readers);

// cells from position first_pos on
static void add_cold(llama_kv_key_order & order, const step_readers & readers, const llama_kv_cells & cells, int64_t n_kv, llama_pos first_pos) {
    const auto is_read = [&](int64_t i) { return !cells.is_empty(i) && cells.pos_get(i) >= first_pos; };

    for (int64_t first = 0, end; first < n_kv; first = end) {
        end = first + 1;
        if (!is_read(first)) {
            continue;
        }
        const auto &    seqs = cells.seq_get_all(first);
        const llama_pos pos  = cells.pos_get(first);
        while (end < n_kv && is_read(end) && cells.pos_get(end) == pos + end - first && cells.seq_get_all(end) == seqs) {
            ++end;
        }
        readers.add_to(order, seqs, { pos, int32_t(first), int32_t(end - first), false });
    }
}

void llama_kv_cache_mixed_context::order_keys(const ggml_tensor * mask, const llama_ubatch & ubatch) const {
    const auto & sinfo  = sinfos[i_cur];
    auto &       orders = kv_mixed->get_orders();

    orders.resize(readers.has_cpu_nodes() ? sinfo.n_stream() : 0);

    const bool    has_hot  = hot.has_rows();
    const bool    is_plain = !kv_mixed->get_all_pages().empty(); // pages are left out of rows as they lie
    const int64_t n_kv     = get_n_kv();
    const int64_t n_ring   = hot.get_n_rows();
    const int64_t n_tps    = sinfo.size();

    for (uint32_t s = 0; s < orders.size(); ++s) {
        const auto & cells = kv_mixed->get_stream_cells(sinfo.strm[s]);
        auto &       order = orders[s];

        const step_readers sequences(ubatch, s*n_tps, n_tps);

        order.begin(is_plain ? n_kv : 0, { int32_t(n_kv), int32_t(n_kv + n_ring) }, sequences.of_token);
        if (!is_plain) {
            add_cold(order, sequences, cells, n_kv, kv_mixed->get_first_read(sequences.first_pos));
            order.arrange(kv_mixed->get_cold_splits());
        }
        if (has_hot) {
            const auto & owners = step->hot.owners[s];
            const auto   add    = [&](int64_t cell, llama_pos pos, int64_t column) {
                sequences.add_to(order, cells.seq_get_all(cell), { pos, int32_t(n_kv + column), 1, false });
            };
            for (size_t slot = 0; slot < owners.size(); ++slot) {
                const int64_t cell = owners[slot];
                if (cell >= 0 && cell < n_kv && !cells.is_empty(cell)) {
                    add(cell, cells.pos_get(cell), slot);
                }
            }
            for (int64_t jj = 0; jj < n_tps; ++jj) {
                add(sinfo.idxs[s][jj], ubatch.pos[s*n_tps + jj], n_ring + jj);
            }
            order.arrange(kv_mixed->get_hot_splits(n_tps));
        }
        order.look((const uint16_t *) mask->data + s*n_tps*mask->ne[0], mask->ne[0]);
    }
}
