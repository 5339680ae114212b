#pragma once

// What each row is: computed from the start, or something less, and under which setting. Kept beside the cells, by cell, for every
// attention cache. A row of another setting than the present one is approximate as long as that stays so.
//
// A row that must never be shared or stored, whatever its tokens and its setting, is at most MIXEDKV_UNVERIFIED: limit() says that of
// rows that are there. It goes along where the row goes, tokens that attend to it are no better, and blocks with it are refused by
// stores.
//
// Who calls it: llama_step, which lets no token be better than the worst that it attends to; llama_kv_cache::update, where it
// copies streams and rotates keys; blocks of rows that come in; the C API.

#include "mixedkv/mixedkv.h"

#include "llama-batch.h"

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

class llama_kv_cache;
class llama_kv_cells;
struct llama_memory_i;

struct llama_kv_validity_seq; // one of a step's

class llama_kv_validity {
public:
    // A cell that holds another position than this has been moved, or filled by who does not say with what.
    struct row {
        llama_pos        pos      = -1;
        llama_token      token    = LLAMA_TOKEN_NULL; // of an image, or unknown
        mixedkv_validity validity = MIXEDKV_UNVERIFIED;
        uint64_t         past     = 0; // a hash of all tokens that it was computed from, in layers that keep all rows
        uint32_t         setting  = 0; // what it was computed under, a number of llama_kv_setting; 0: nobody says
    };

    // Before rows are asked for or computed: the number of the present setting.
    void use_setting(uint32_t number);

    // of a cell that holds a token; a row that was moved is approximate from then on
    mixedkv_validity get(const llama_kv_cache & kv, uint32_t strm, uint32_t cell);

    // of a row that came from outside, until the caller says more
    void mark_unverified(const llama_kv_cache & kv, uint32_t strm, uint32_t cell);

    // rows of a sequence at [p0, p1) in all caches are no better than this
    void limit(llama_memory_i * memory, llama_seq_id seq_id, llama_pos p0, llama_pos p1, mixedkv_validity validity);

    // rows at [p0, p0 + n) are this, of these tokens, and were computed under such a setting behind such a past: approximate
    // behind another
    void record(llama_memory_i * memory, llama_seq_id seq_id, llama_pos p0, uint64_t past, const llama_token * tokens, uint32_t n,
                mixedkv_validity validity, uint32_t setting);

    // of the rows of a sequence before p0; 0: there are none
    uint64_t get_past(llama_memory_i * memory, llama_seq_id seq_id, llama_pos p0);

    // what the row of a sequence at p was computed under, the first of its caches that differs from the present; 0: nobody says
    uint32_t get_setting(llama_memory_i * memory, llama_seq_id seq_id, llama_pos p);

    static uint64_t extend_past(uint64_t past, llama_token token);

    // rows of a sequence in a cache are what those of the same tokens are in layers that keep all
    void copy_from_full_layers(llama_memory_i * memory, const llama_kv_cache & kv, llama_seq_id seq_id);

    // a sequence was read from a state, -1: all were; partial: sliding windows alone
    void forget(llama_seq_id seq_id, bool partial);

    // llama_kv_cache::update: rows of stream `to` are those of `from`
    void copy_stream(const llama_kv_cache & kv, uint32_t from, uint32_t to);

    // llama_kv_cache::update: rows that have moved since the last one are approximate
    void note_shifts(const llama_kv_cache & kv);

    // leading rows of a sequence that are computed, in all caches; those at [p0, p0 + n) of these tokens
    llama_pos count_computed(llama_memory_i * memory, llama_seq_id seq_id, llama_pos p0, const llama_token * tokens, uint32_t n);

    // what the rows of a sequence at [p0, p0 + n) are, the worst of all caches; of other tokens, or none: unverified
    std::vector<mixedkv_validity> query(
        llama_memory_i * memory, llama_seq_id seq_id, llama_pos p0, const llama_token * tokens, uint32_t n);

    // Before a micro-batch is placed: empty, or which row a sliding window has let go of that its tokens read. Also notes which
    // of its sequences lack F16 rows.
    std::string begin_step(llama_memory_i * memory, const llama_ubatch & ubatch);

    // after its graph has ended well
    void end_step(llama_memory_i * memory, const llama_ubatch & ubatch);

    // why the latest evaluation was refused, "": it was not
    std::string refused;

private:
    // All that fills cells or changes positions says so here: where nothing less than computed has come, a step looks at no cell.
    struct stream {
        std::vector<row> rows;
        bool             has_less = true; // maybe: as long as no look at all cells has found that there is none
    };

    std::map<std::pair<const llama_kv_cache *, uint32_t>, stream> streams;

    std::vector<bool> lacks_hot; // by sequence, of the step at hand

    uint32_t setting = 0; // the present one

    stream & of(const llama_kv_cache & kv, uint32_t strm);

    // what is known of a cell's row, whatever the present setting is; notes first that a row at another position than the
    // recorded one is approximate, and that one of which nothing is recorded is unverified
    row & find(const llama_kv_cache & kv, uint32_t strm, uint32_t cell);

    void set(const llama_kv_cache & kv, uint32_t strm, uint32_t cell, const row & value);

    // of the rows of a sequence before a position
    uint64_t past_of(const llama_kv_cache & kv, llama_seq_id seq_id, llama_pos p0);

    // a step's sequences of a stream are no better than the worst row that they attend to
    void note_worst(const llama_kv_cache & kv, uint32_t strm, const std::vector<llama_kv_validity_seq *> & seqs);

    // rows of the ubatch are no better than what was found of their sequences
    void limit_step(const std::vector<llama_kv_cache *> & caches, const llama_ubatch & ubatch,
                    const std::vector<llama_kv_validity_seq> & seqs);

    // the cell's row is of this token, or of one that is not known
    bool is_of(const llama_kv_cache & kv, uint32_t strm, uint32_t cell, llama_token token);

    // the cell's row is no better than this
    void limit_cell(const llama_kv_cache & kv, uint32_t strm, uint32_t cell, mixedkv_validity validity);
};
