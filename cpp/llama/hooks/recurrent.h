#pragma once

// What vendor/patches adds to llama_memory_recurrent.

#include "llama-batch.h"
#include "llama-cparams.h"

#include <array>

// Tokens of each sequence in the latest micro-batch: there are snapshots between those, and of no others.
class llama_recurrent_lengths {
    std::array<llama_pos, LLAMA_MAX_SEQ> data = {};

public:
    // 0: the state's snapshots are none of the latest micro-batch
    llama_pos at(llama_seq_id seq_id) const { return data[seq_id]; }

    // llama_memory_recurrent::set_rs_idx
    void forget(llama_seq_id seq_id) { data[seq_id] = 0; }

    // llama_memory_recurrent::find_slot: this is the latest micro-batch
    void set(const llama_ubatch & ubatch) {
        data = {};
        for (uint32_t i = 0; i < ubatch.n_tokens; i += ubatch.n_seq_tokens) {
            for (int32_t j = 0; j < ubatch.n_seq_id[i]; ++j) {
                data[ubatch.seq_id[i][j]] = ubatch.n_seq_tokens;
            }
        }
    }

    // llama_memory_recurrent::prepare: they are as now again when what is returned goes
    class kept {
        llama_recurrent_lengths &                  lengths;
        const std::array<llama_pos, LLAMA_MAX_SEQ> data;

    public:
        explicit kept(llama_recurrent_lengths & lengths) : lengths(lengths), data(lengths.data) {}
        ~kept() { lengths.data = data; }

        kept(const kept &) = delete;
    };

    kept keep() { return kept(*this); }
};
