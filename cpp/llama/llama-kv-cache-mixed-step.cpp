// A ubatch whose graph fails or is aborted leaves nothing behind, see docs/decisions/010: llama_context::decode removes its
// tokens from their first sequence and knows nothing of the hot set.

#include "llama-kv-cache-mixed.h"

#include "llama.h"

// of the ring's buffers
static constexpr auto on_host = [](const auto & ring) { return ggml_backend_buffer_is_host(ring.second.get()); };

llama_kv_cache_mixed::checkpoint llama_kv_cache_mixed::begin_step(const slot_info & sinfo) const {
    checkpoint res;

    res.sinfo = sinfo;
    res.use   = use;

    for (uint32_t s = 0; s < sinfo.n_stream(); ++s) {
        const auto & ring = rings[sinfo.strm[s]];

        res.heads.push_back(v_heads[sinfo.strm[s]]);
        res.owners.push_back(ring.owners());

        // cells that a sliding window takes over hold another token from here on
        for (const uint32_t cell : sinfo.idxs[s]) {
            if (ring.slot_of(cell) >= 0) {
                res.owners.back()[ring.slot_of(cell)] = mixedkv::hot_ring::none;
            }
        }
    }

    return res;
}

void llama_kv_cache_mixed::keep_rows(checkpoint & step) const {
    for (uint32_t s = 0; s < step.sinfo.n_stream(); ++s) {
        const uint32_t strm   = step.sinfo.strm[s];
        const auto &   owners = step.owners[s];

        std::vector<uint32_t> taken;
        for (uint32_t slot = 0; slot < owners.size(); ++slot) {
            const int32_t cell = rings[strm].cell_of(slot);
            if (owners[slot] >= 0 && cell >= 0 && cell != owners[slot]) {
                taken.push_back(slot);
            }
        }
        step.taken.push_back(std::move(taken));

        // an accelerator that fails takes the process along: only what the CPU computes is aborted
        step.rows.emplace_back();
        if (std::any_of(ring_bufs.begin(), ring_bufs.end(), on_host)) {
            copy_rows(strm, step.taken.back(), step.rows.back());
        }
    }
}

void llama_kv_cache_mixed::roll_back(const checkpoint & step) {
    for (uint32_t s = 0; s < step.sinfo.n_stream(); ++s) {
        const uint32_t strm  = step.sinfo.strm[s];
        auto &         cells = v_cells[strm];
        auto &         ring  = rings[strm];

        // tokens of several sequences are still in all but the first, and their rows may not have been stored
        for (const uint32_t cell : step.sinfo.idxs[s]) {
            if (!cells.is_empty(cell)) {
                cells.rm(cell);
            }
        }
        v_heads[strm] = step.heads[s];

        auto owners = step.owners[s];
        if (s < step.taken.size() && !step.taken[s].empty()) {
            if (step.rows[s].empty()) {
                for (const uint32_t slot : step.taken[s]) {
                    owners[slot] = mixedkv::hot_ring::none;
                }
            } else {
                put_rows(strm, step.taken[s], step.rows[s]);
            }
        }

        ring.clear();
        for (uint32_t slot = 0; slot < owners.size(); ++slot) {
            if (owners[slot] >= 0 && !cells.is_empty(owners[slot])) {
                ring.assign(owners[slot], slot);
            }
        }
    }

    pages.undo_step();
    use = *step.use;
    dirty.assign(n_stream, true);
}

void llama_kv_cache_mixed::synchronize() const {
    if (lctx && !std::all_of(ring_bufs.begin(), ring_bufs.end(), on_host)) {
        llama_synchronize(lctx);
    }
}

// body(tensor, offset in it, offset in the copy, bytes) for slots that follow each other
template <typename F>
void llama_kv_cache_mixed::for_each_run(uint32_t strm, const std::vector<uint32_t> & slots, F && body) const {
    size_t offset = 0;

    for (const auto & layer : ring_layers) {
        for (ggml_tensor * t : layer.stream(strm)) {
            for (size_t i = 0, n; i < slots.size(); i += n) {
                for (n = 1; i + n < slots.size() && slots[i + n] == slots[i] + n; ++n) {
                }
                body(t, slots[i]*t->nb[1], offset, n*t->nb[1]);
                offset += n*t->nb[1];
            }
        }
    }
}

void llama_kv_cache_mixed::copy_rows(uint32_t strm, const std::vector<uint32_t> & slots, std::vector<uint8_t> & rows) const {
    if (slots.empty()) {
        return;
    }
    synchronize();

    size_t row = 0;
    for (const auto & layer : ring_layers) {
        row += layer.k->nb[1] + (layer.v ? layer.v->nb[1] : 0);
    }
    rows.resize(slots.size()*row);

    for_each_run(strm, slots, [&](const ggml_tensor * t, size_t at, size_t offset, size_t size) {
        ggml_backend_tensor_get(t, rows.data() + offset, at, size);
    });
}

void llama_kv_cache_mixed::put_rows(uint32_t strm, const std::vector<uint32_t> & slots, const std::vector<uint8_t> & rows) {
    if (slots.empty()) {
        return;
    }
    synchronize();

    for_each_run(strm, slots, [&](ggml_tensor * t, size_t at, size_t offset, size_t size) {
        ggml_backend_tensor_set(t, rows.data() + offset, at, size);
    });
}
