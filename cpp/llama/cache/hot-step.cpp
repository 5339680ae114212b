// A ubatch whose graph fails or is aborted leaves nothing behind, see docs/decisions/010: llama_context::decode removes its
// tokens from their first sequence and knows nothing of the hot rows.

#include "cache/hot-rows.h"

#include "llama.h"

#include "ggml-backend.h"

#include <algorithm>

// of the ring's buffers
static constexpr auto on_host = [](const auto & ring) { return ggml_backend_buffer_is_host(ring.second.get()); };

llama_kv_hot_rows::checkpoint llama_kv_hot_rows::begin_step(const slot_info & sinfo) const {
    checkpoint res;

    res.strms = sinfo.strm;
    res.use   = slots.get_use();

    for (uint32_t s = 0; s < sinfo.n_stream(); ++s) {
        const auto & ring = slots.get_ring(sinfo.strm[s]);

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

std::vector<int64_t> llama_kv_hot_rows::advance(const slot_info & sinfo, const llama_ubatch & ubatch) {
    std::vector<int64_t> res(ubatch.n_tokens, 0);

    slots.advance(sinfo.strm, sinfo.idxs, ubatch);

    for (uint32_t s = 0; s < sinfo.n_stream(); ++s) {
        const uint32_t strm = sinfo.strm[s];

        for (uint32_t ii = 0; ii < sinfo.size(); ++ii) {
            const int32_t slot = slots.get_ring(strm).slot_of(sinfo.idxs[s][ii]);

            res[s*sinfo.size() + ii] = int64_t(strm)*n_rows + (slot >= 0 ? uint32_t(slot) : get_trash_row());
        }
    }

    return res;
}

void llama_kv_hot_rows::keep_rows(checkpoint & step) const {
    for (size_t s = 0; s < step.strms.size(); ++s) {
        const uint32_t strm   = step.strms[s];
        const auto &   owners = step.owners[s];

        std::vector<uint32_t> taken;
        for (uint32_t slot = 0; slot < owners.size(); ++slot) {
            const int32_t cell = slots.get_ring(strm).cell_of(slot);
            if (owners[slot] >= 0 && cell >= 0 && cell != owners[slot]) {
                taken.push_back(slot);
            }
        }
        step.taken.push_back(std::move(taken));

        // an accelerator that fails takes the process along: only what the CPU computes is aborted
        step.rows.emplace_back();
        if (std::any_of(bufs.begin(), bufs.end(), on_host)) {
            copy_rows(strm, step.taken.back(), step.rows.back());
        }
    }
}

void llama_kv_hot_rows::roll_back(const checkpoint & step) {
    auto owners = step.owners;

    for (size_t s = 0; s < step.taken.size(); ++s) {
        if (step.taken[s].empty()) {
            continue;
        }
        if (step.rows[s].empty()) {
            for (const uint32_t slot : step.taken[s]) {
                owners[s][slot] = mixedkv::hot_ring::none;
            }
        } else {
            put_rows(step.strms[s], step.taken[s], step.rows[s]);
        }
    }

    slots.roll_back(step.strms, owners, *step.use);
}

void llama_kv_hot_rows::synchronize() const {
    if (lctx && !std::all_of(bufs.begin(), bufs.end(), on_host)) {
        llama_synchronize(lctx);
    }
}

// body(tensor, offset in it, offset in the copy, bytes) for slots that follow each other
template <typename F>
void llama_kv_hot_rows::for_each_run(uint32_t strm, const std::vector<uint32_t> & slots, F && body) const {
    size_t offset = 0;

    for (const auto & layer : layers) {
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

void llama_kv_hot_rows::copy_rows(uint32_t strm, const std::vector<uint32_t> & slots, std::vector<uint8_t> & rows) const {
    if (slots.empty()) {
        return;
    }
    synchronize();

    size_t row = 0;
    for (const auto & layer : layers) {
        row += layer.k->nb[1] + (layer.v ? layer.v->nb[1] : 0);
    }
    rows.resize(slots.size()*row);

    for_each_run(strm, slots, [&](const ggml_tensor * t, size_t at, size_t offset, size_t size) {
        ggml_backend_tensor_get(t, rows.data() + offset, at, size);
    });
}

void llama_kv_hot_rows::put_rows(uint32_t strm, const std::vector<uint32_t> & slots, const std::vector<uint8_t> & rows) {
    if (slots.empty()) {
        return;
    }
    synchronize();

    for_each_run(strm, slots, [&](ggml_tensor * t, size_t at, size_t offset, size_t size) {
        ggml_backend_tensor_set(t, rows.data() + offset, at, size);
    });
}
