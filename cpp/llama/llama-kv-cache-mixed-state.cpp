// What a mixed cache saves besides upstream's state of the cold store: which of the saved cells have an F16 row,
// and these rows. A restored sequence goes on as if it had never left.

#include "llama-kv-cache-mixed.h"

#include "llama-hparams.h"
#include "llama-io.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

static constexpr uint32_t RING_STATE_MAGIC   = 0x31564b4d; // "MKV1"
static constexpr uint32_t RING_STATE_VERSION = 3;

// upstream counts blocks as elements there and restores a part of each row
static void check_flags(llama_state_seq_flags flags) {
    if (flags & LLAMA_STATE_SEQ_FLAGS_ON_DEVICE) {
        throw std::runtime_error("the state of a mixed KV cache cannot be kept on the device: leave LLAMA_STATE_SEQ_FLAGS_ON_DEVICE out");
    }
}

void llama_kv_cache_mixed::state_write(llama_io_write_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) const {
    if (is_mixed()) {
        check_flags(flags);
    }

    llama_kv_cache::state_write(io, seq_id, flags);

    if (is_mixed()) {
        ring_write(io, seq_id);
    }
}

void llama_kv_cache_mixed::state_read(llama_io_read_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) {
    slot_info_vec_t sinfos;

    try {
        if (is_mixed()) {
            check_flags(flags);
        }

        state_read_sinfo(io, seq_id, flags, &sinfos, nullptr);

        for (uint32_t s = 0; s < sinfos.size(); ++s) {
            if (!sinfos[s].empty()) {
                const uint32_t strm = seq_id == -1 ? s : seq_to_stream[seq_id];
                release_cells(strm, sinfos[s].idxs[0]);
                touch_rows(strm, sinfos[s].idxs[0]);
            }
        }

        if (is_mixed()) {
            ring_read(io, seq_id, sinfos);
        }
    } catch (...) {
        io.discard();
        state_clear(seq_id);
        throw;
    }
}

std::vector<uint32_t> llama_kv_cache_mixed::saved_cells(uint32_t strm, llama_seq_id seq_id) const {
    std::vector<uint32_t> res;

    const auto & cells = v_cells[strm];

    for (uint32_t i = 0; i < cells.size(); ++i) {
        if (cells.is_empty(i) || (seq_id != -1 && !cells.seq_has(i, seq_id))) {
            continue;
        }
        if (seq_id != -1 && llama_hparams::is_masked_swa(n_swa, swa_type, cells.pos_get(i), cells.seq_pos_max(seq_id))) {
            continue;
        }
        res.push_back(i);
    }

    return res;
}

void llama_kv_cache_mixed::ring_write(llama_io_write_i & io, llama_seq_id seq_id) const {
    const auto write_u32 = [&](uint32_t value) { io.write(&value, sizeof(value)); };

    write_u32(RING_STATE_MAGIC);
    write_u32(RING_STATE_VERSION);
    write_u32(layers.size());
    for (const auto & layer : layers) {
        write_u32(get_scales_id(layer.il));
    }

    for (uint32_t strm = 0; strm < n_stream; ++strm) {
        const auto cells = saved_cells(strm, seq_id);

        std::vector<uint32_t> ordinals;
        std::vector<uint32_t> slots;

        for (uint32_t i = 0; i < cells.size(); ++i) {
            const int32_t slot = rings[strm].slot_of(cells[i]);
            if (slot >= 0) {
                ordinals.push_back(i);
                slots.push_back(slot);
            }
        }

        write_u32(ordinals.size());
        for (size_t i = 0; i < ordinals.size(); ++i) {
            write_u32(ordinals[i]);
            write_u32(get_own_slot(seq_id == -1 ? get_seq(strm, cells[ordinals[i]]) : seq_id, slots[i]));
        }

        for (const auto & layer : ring_layers) {
            for (const uint32_t slot : slots) {
                for (ggml_tensor * t : layer.stream(strm)) {
                    io.write_tensor(t, slot*t->nb[1], t->nb[1]);
                }
            }
        }
    }
}

// the slots that they had: attention sums its rows in order of slots, so the next logits are the same bits
void llama_kv_cache_mixed::restore_slots(
        uint32_t strm, llama_seq_id seq_id, const std::vector<uint32_t> & cells, const std::vector<uint32_t> & wanted) {
    const bool is_alone = seq_id == -1 || rings[strm].n_used() == 0;

    // in order of position, as tokens come
    std::vector<std::pair<llama_pos, size_t>> left;

    for (size_t i = 0; i < cells.size(); ++i) {
        const llama_seq_id owner = seq_id == -1 ? get_seq(strm, cells[i]) : seq_id;
        // else it was saved with a wider window than this cache has now
        if (is_wanted(strm, cells[i], window)) {
            use.step[owner] = use.n_steps;
            if (assign_own_slot(owner, cells[i], wanted[i], is_alone) < 0) {
                left.emplace_back(v_cells[strm].pos_get(cells[i]), i);
            }
        }
    }

    std::sort(left.begin(), left.end());
    for (const auto & [_, i] : left) {
        assign_slot(strm, cells[i]);
    }

    for (uint32_t s = 0; s < n_seq_max; ++s) {
        if (seq_to_stream[s] == strm && (seq_id == -1 || seq_id == llama_seq_id(s))) {
            renew_use(s);
        }
    }
}

void llama_kv_cache_mixed::ring_read(llama_io_read_i & io, llama_seq_id seq_id, const slot_info_vec_t & sinfos) {
    const auto read_u32 = [&]() {
        uint32_t value;
        io.read(&value, sizeof(value));
        return value;
    };

    if (read_u32() != RING_STATE_MAGIC || read_u32() != RING_STATE_VERSION || read_u32() != layers.size()) {
        throw std::runtime_error("failed to restore the KV cache: the state was not saved by this version's mixed cache");
    }

    for (const auto & layer : layers) {
        if (read_u32() != get_scales_id(layer.il)) {
            throw std::runtime_error("failed to restore the KV cache: its keys were saved with other scales: set equalize as it was");
        }
    }

    for (uint32_t s = 0; s < n_stream; ++s) {
        const auto & sinfo = sinfos[s];

        const uint32_t n_cells = sinfo.empty() ? 0 : sinfo.size();
        const uint32_t n_hot   = read_u32();

        if (n_hot > n_cells) {
            throw std::runtime_error("failed to restore the KV cache: more F16 rows than tokens");
        }

        if (n_hot > 0 && !has_ring()) {
            throw std::runtime_error("failed to restore the KV cache: it was saved with F16 rows, and this cache has room for none "
                    "(quantization_threshold and sink_tokens are 0)");
        }

        const uint32_t strm = seq_id == -1 ? s : seq_to_stream[seq_id];

        std::vector<uint32_t> cells(n_hot);
        std::vector<uint32_t> wanted(n_hot);
        std::vector<uint32_t> rows(n_hot);

        for (uint32_t i = 0, next = 0; i < n_hot; ++i) {
            const uint32_t ordinal = read_u32();
            if (ordinal < next || ordinal >= n_cells) {
                throw std::runtime_error("failed to restore the KV cache: F16 rows are out of order");
            }
            next = ordinal + 1;

            if (v_cells[strm].is_empty(sinfo.idxs[0][ordinal]) || rings[strm].slot_of(sinfo.idxs[0][ordinal]) >= 0) {
                throw std::runtime_error("failed to restore the KV cache: an F16 row without a token of its own");
            }

            cells[i]  = sinfo.idxs[0][ordinal];
            wanted[i] = read_u32();
        }

        restore_slots(strm, seq_id, cells, wanted);
        for (uint32_t i = 0; i < n_hot; ++i) {
            const int32_t slot = rings[strm].slot_of(cells[i]);
            rows[i] = slot >= 0 ? slot : get_trash_row();
        }

        for (const auto & layer : ring_layers) {
            for (const uint32_t row : rows) {
                for (ggml_tensor * t : layer.stream(strm)) {
                    io.read_tensor(t, row*t->nb[1], t->nb[1]);
                }
            }
        }
    }
}
