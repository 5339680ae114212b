#pragma once

// What each row is: computed from the start, or something less. Kept beside the cells, by cell, for every attention cache.
//
// Who calls it: llama_step, which lets no token be better than the worst that it attends to; llama_kv_cache::update, where it
// copies streams; blocks of rows that come in; the C API.

#include "mixedkv/mixedkv.h"

#include "llama-batch.h"

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

class llama_kv_cache;
class llama_kv_cells;
class llama_memory_i;

class llama_kv_truth {
public:
    // A cell that holds another position than this has been moved, or filled by who does not say with what.
    struct row {
        llama_pos     pos   = -1;
        llama_token   token = LLAMA_TOKEN_NULL; // of an image, or unknown
        mixedkv_truth truth = MIXEDKV_DOUBTED;
    };

    // of a cell that holds a token; a row that was moved is approximate from then on
    mixedkv_truth get(const llama_kv_cache & kv, uint32_t strm, uint32_t cell);

    void set(const llama_kv_cache & kv, uint32_t strm, uint32_t cell, mixedkv_truth truth, llama_token token);

    // rows of a sequence at [p0, p1) in all caches are no better than this
    void limit(llama_memory_i * memory, llama_seq_id seq_id, llama_pos p0, llama_pos p1, mixedkv_truth truth);

    // rows at [p0, p0 + n) are this, and of these tokens
    void say(llama_memory_i * memory, llama_seq_id seq_id, llama_pos p0, const llama_token * tokens, uint32_t n, mixedkv_truth truth);

    // rows of a sequence in a cache are what those of the same tokens are in layers that keep all
    void follow(llama_memory_i * memory, const llama_kv_cache & kv, llama_seq_id seq_id);

    // a sequence was read from a state, -1: all were; partial: sliding windows alone
    void forget(llama_seq_id seq_id, bool partial);

    // llama_kv_cache::update: rows of stream `to` are those of `from`
    void copy_stream(const llama_kv_cache & kv, uint32_t from, uint32_t to);

    // leading rows of a sequence that are computed, in all caches; those at [p0, p0 + n) of these tokens
    llama_pos count_computed(llama_memory_i * memory, llama_seq_id seq_id, llama_pos p0, const llama_token * tokens, uint32_t n);

    // Before a micro-batch is placed: empty, or which row a sliding window has let go of that its tokens read. Also notes which
    // of its sequences lack F16 rows.
    std::string begin_step(llama_memory_i * memory, const llama_ubatch & ubatch);

    // after its graph has ended well
    void end_step(llama_memory_i * memory, const llama_ubatch & ubatch);

    // why the latest evaluation was refused, "": it was not
    std::string refused;

private:
    std::map<std::pair<const llama_kv_cache *, uint32_t>, std::vector<row>> rows;

    std::vector<bool> lacks_hot; // by sequence, of the step at hand

    std::vector<row> & of(const llama_kv_cache & kv, uint32_t strm);
};
