// What a mixed cache saves besides upstream's state of the cold store: which of the saved cells have an F16 row,
// and these rows. A restored sequence goes on as if it had never left.

#include "cache/mixed.h"

#include "llama-hparams.h"
#include "llama-io.h"

#include <stdexcept>
#include <vector>

static constexpr uint32_t HOT_STATE_MAGIC   = 0x31564b4d; // "MKV1"
static constexpr uint32_t HOT_STATE_VERSION = 3;

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
        hot_write(io, seq_id);
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
                hot.release_cells(strm, sinfos[s].idxs[0]);
                touch_rows(strm, sinfos[s].idxs[0]);
            }
        }

        if (is_mixed()) {
            hot_read(io, seq_id, sinfos);
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

void llama_kv_cache_mixed::hot_write(llama_io_write_i & io, llama_seq_id seq_id) const {
    const auto write_u32 = [&](uint32_t value) { io.write(&value, sizeof(value)); };

    write_u32(HOT_STATE_MAGIC);
    write_u32(HOT_STATE_VERSION);
    write_u32(layers.size());
    for (const auto & layer : layers) {
        write_u32(basis.get_scales_id(layer.il));
    }

    for (uint32_t strm = 0; strm < n_stream; ++strm) {
        hot.state_write(io, strm, seq_id, saved_cells(strm, seq_id));
    }
}

void llama_kv_cache_mixed::hot_read(llama_io_read_i & io, llama_seq_id seq_id, const slot_info_vec_t & sinfos) {
    const auto read_u32 = [&]() {
        uint32_t value;
        io.read(&value, sizeof(value));
        return value;
    };

    if (read_u32() != HOT_STATE_MAGIC || read_u32() != HOT_STATE_VERSION || read_u32() != layers.size()) {
        throw std::runtime_error("failed to restore the KV cache: the state was not saved by this version's mixed cache");
    }

    for (const auto & layer : layers) {
        if (read_u32() != basis.get_scales_id(layer.il)) {
            throw std::runtime_error("failed to restore the KV cache: its keys were saved with other scales: evaluate its tokens anew");
        }
    }

    for (uint32_t s = 0; s < n_stream; ++s) {
        const uint32_t strm = seq_id == -1 ? s : seq_to_stream[seq_id];

        hot.state_read(io, strm, seq_id, sinfos[s].empty() ? std::vector<uint32_t>() : sinfos[s].idxs[0]);
    }
}
