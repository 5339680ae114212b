#include "blocks/export.h"

#include "cache/mixed.h"
#include "rows/access.h"

#include "llama-model.h"

#include <algorithm>
#include <cstring>

std::string llama_kv_rows_problem(llama_context & ctx) {
    const std::string arch = "architecture '" + ctx.get_model().arch_name() + "' ";

    if (llama_kv_rows_groups(ctx).empty()) {
        return arch + "keeps no rows in a cache of a known kind, which no token range can be cut from: save its whole state instead";
    }

    if (ctx.get_model().hparams.ple_n_heads > 0) {
        return arch + "has token ids in its cache: save its whole state instead";
    }

    return "";
}

// The first position of [p0, end) that the sequence does not have, -1: it has all. Rows of an image are at its first
// position, and the text behind it goes on after its last column or row.
static llama_pos first_missing(const llama_kv_cache & kv, llama_seq_id seq_id, llama_pos p0, llama_pos end) {
    const auto & cells = kv.get_cells(seq_id);

    llama_pos next = 0;

    for (const auto & [pos, cell] : cells.seq_pos_get(seq_id)) {
        if (pos >= end || (pos > next && pos > p0)) {
            break;
        }
        const auto & ext = cells.ext_get(cell);
        next = std::max({ next, pos + 1, ext.x + 1, ext.y + 1 });
    }

    return next < end ? std::max(next, p0) : -1;
}

std::vector<llama_kv_row> llama_kv_rows_range(
        const llama_kv_cache & kv, llama_seq_id seq_id, llama_pos p0, llama_pos p1, std::string & problem) {
    auto rows = llama_kv_rows_find(kv, seq_id, p0, p1);

    const llama_pos last = kv.get_cells(seq_id).seq_pos_max(seq_id);
    const llama_pos end  = p1 < 0 ? last + 1 : p1;

    // a sliding window lets go of old positions, and of those between: the latest that follow each other are left
    if (kv_access::get_n_swa(kv) > 0 && p0 < end && end <= last + 1) {
        size_t n = !rows.empty() && rows.back().pos == end - 1;
        while (n > 0 && n < rows.size() && rows[rows.size() - n - 1].pos == end - 1 - (llama_pos) n) {
            ++n;
        }
        rows.erase(rows.begin(), rows.end() - n);
        return rows;
    }

    if (p0 < end && kv.has_cell_ext()) {
        const llama_pos missing = first_missing(kv, seq_id, p0, end);
        if (missing >= 0) {
            problem = "sequence " + std::to_string(seq_id) + " does not have position " + std::to_string(missing);
            rows.clear();
        }
        return rows;
    }

    for (size_t i = 0; i < rows.size(); ++i) {
        if (rows[i].pos != p0 + (llama_pos) i) {
            problem = "sequence " + std::to_string(seq_id) + " does not have position " + std::to_string(p0 + (llama_pos) i) +
                " exactly once";
            return {};
        }
    }

    if (end <= p0 || p0 + (llama_pos) rows.size() != end) {
        problem = "sequence " + std::to_string(seq_id) + " has no rows up to position " + std::to_string(std::max(end - 1, p0));
        return {};
    }

    return rows;
}

// rows at consecutive cells are copied at once
template <typename F> static void for_each_run(const std::vector<llama_kv_row> & rows, F && body) {
    for (size_t i = 0, n; i < rows.size(); i += n) {
        for (n = 1; i + n < rows.size() && rows[i + n].cell == rows[i].cell + n; ++n) {
        }
        body(i, rows[i].cell, n);
    }
}

static void export_rows(const ggml_tensor * t, const std::vector<llama_kv_row> & rows, void * dst) {
    for_each_run(rows, [&](size_t i, uint32_t cell, size_t n) {
        ggml_backend_tensor_get(t, (uint8_t *) dst + i*t->nb[1], cell*t->nb[1], n*t->nb[1]);
    });
}

// without flash attention upstream keeps V transposed, element j of a cell at j*n_cells + cell, and rows as long as those
// of the layer with the longest
static void export_columns(const ggml_tensor * t, int64_t n_embd, const std::vector<llama_kv_row> & rows, void * dst) {
    const size_t size = ggml_type_size(t->type);

    std::vector<uint8_t> column;

    for_each_run(rows, [&](size_t i, uint32_t cell, size_t n) {
        column.resize(n*size);
        for (int64_t j = 0; j < n_embd; ++j) {
            ggml_backend_tensor_get(t, column.data(), (j*t->ne[1] + cell)*size, n*size);
            for (size_t r = 0; r < n; ++r) {
                memcpy((uint8_t *) dst + ((i + r)*n_embd + j)*size, column.data() + r*size, size);
            }
        }
    });
}

static void export_hot(const ggml_tensor * t, const std::vector<llama_kv_row> & rows, void * dst) {
    auto * out = (uint8_t *) dst;

    for (const auto & row : rows) {
        if (row.slot >= 0) {
            ggml_backend_tensor_get(t, out, row.slot*t->nb[1], t->nb[1]);
            out += t->nb[1];
        }
    }
}

void llama_kv_rows_export(
        const llama_kv_cache & kv, const llama_hparams & hparams, int32_t il, llama_seq_id seq_id,
        const std::vector<llama_kv_row> & rows, void * k, void * v, void * k_hot, void * v_hot) {
    const auto &   layer = kv_access::get_layers(kv)[kv_access::get_ids(kv).at(il)];
    const uint32_t strm  = kv.get_stream(seq_id);

    export_rows(layer.k_stream[strm], rows, k);

    if (!layer.v) {
        // MLA
    } else if (kv_access::get_v_trans(kv)) {
        export_columns(layer.v_stream[strm], hparams.n_embd_v_gqa(il), rows, v);
    } else {
        export_rows(layer.v_stream[strm], rows, v);
    }

    const auto * mixed = dynamic_cast<const llama_kv_cache_mixed *>(&kv);

    if (mixed && mixed->get_hot().has_rows()) {
        export_hot(mixed->get_hot().get_k_stream(il, strm), rows, k_hot);
    }
    if (mixed && mixed->get_hot().has_rows() && layer.v) {
        export_hot(mixed->get_hot().get_v_stream(il, strm), rows, v_hot);
    }
}
