#pragma once

// Which cells of a cache have an F16 copy of their row, and in which slots. Bookkeeping on positions and sequences alone: there is
// no tensor here, and tests/cpp/llama/test_hot_slots.cpp needs no model.
//
// llama_kv_hot_rows owns the slots and moves the rows to where they say. Whoever asks what is hot gets them from there, const: the
// mask of a graph, saved states, exported rows, statistics.

#include "hot_set/hot_layout.h"
#include "hot_set/hot_ring.h"
#include "hot_set/hot_window.h"

#include "llama-batch.h"
#include "llama-kv-cells.h"

#include <cstdint>
#include <vector>

// Invariants:
//
// - Cells and their positions belong to the cold cache: they are read here and never changed.
// - A slot belongs to one cell at most, and a cell has one slot at most (mixedkv::hot_ring).
// - No slot belongs to an empty cell once the operation that emptied the cell has called release_dead() or release_cells().
// - After advance() each slot belongs to a cell that the window of one of its sequences holds.
// - To lose a slot costs precision and never a token: the cold row stays. What was evaluated without is noted in pool_use.
// - Where rows lie follows from what is held, not from how that came about: a restored state sums its rows in the same order.
class llama_kv_hot_slots {
public:
    // Who uses the slots, and who went without, by sequence.
    struct pool_use {
        uint64_t               n_steps   = 1;
        uint64_t               n_evicted = 0;  // rows that went before their window did
        std::vector<uint64_t>  step;           // when the sequence was evaluated last, 0: it rests
        std::vector<llama_pos> short_from;     // first position that was evaluated without a row of its window, -1: none
    };

    // cells by stream, and the stream of each sequence: the cold cache's, which outlives this
    llama_kv_hot_slots(
            const llama_kv_cells_vec    & cells,
            const std::vector<uint32_t> & seq_to_stream,
                          uint32_t        n_seq_max,
        const mixedkv::hot_window       & window,
        const mixedkv::hot_layout       & layout);

    //
    // what is held
    //

    const mixedkv::hot_window & get_window() const { return window; }

    const mixedkv::hot_layout & get_layout() const { return layout; }

    const mixedkv::hot_ring & get_ring(uint32_t strm) const { return rings[strm]; }

    const pool_use & get_use() const { return use; }

    // sequences that share a stream
    uint32_t get_n_seq() const { return n_stream == 1 ? n_seq_max : 1; }

    // whether a query at `pos` finds all keys of its window, sinks included, in F16
    bool is_window_whole(llama_seq_id seq_id, llama_pos pos) const;

    // live cells that are read in F16
    uint32_t get_n_cells_hot() const;

    // the slot that a query whose window begins at `begin` reads, -1: it reads the cold row
    int32_t get_hot_slot(uint32_t strm, uint32_t cell, llama_pos begin) const;

    // the slot as counted from the first one of the sequence; behind its last one for a row that has a slot elsewhere, as
    //   rows that it shares with another sequence may
    int32_t get_own_slot(llama_seq_id seq_id, int32_t slot) const;

    // the first sequence of a cell
    llama_seq_id get_seq(uint32_t strm, uint32_t cell) const;

    //
    // sequence operations, after the cold cache has done them to its cells
    //

    void clear();

    // slots of cells that died; every slot is looked at after the next ubatch
    void release_dead();

    // across streams the copy takes over all slots of the stream
    void seq_cp (llama_seq_id seq_id_src, llama_seq_id seq_id_dst);
    void seq_add(llama_pos shift);
    void seq_div(int d);

    // until it is evaluated again, or wakes, slots of the sequence count as free
    void rest(llama_seq_id seq_id) { use.step[seq_id] = 0; }
    void wake(llama_seq_id seq_id) { use.step[seq_id] = use.n_steps; }

    //
    // steps
    //

    // after a ubatch has been placed: lets go of the slots that its queries no longer read, and gives slots to its hot tokens;
    //   idxs are its cells by stream of strms
    void advance(
            const std::vector<llama_seq_id> & strms, const std::vector<std::vector<uint32_t>> & idxs, const llama_ubatch & ubatch);

    // as it was before: who held which slot, by stream of strms; cells that are empty by now get none
    void roll_back(
            const std::vector<llama_seq_id> & strms, const std::vector<std::vector<int32_t>> & owners, const pool_use & use);

    //
    // rows from elsewhere
    //

    // others take over these cells
    void release_cells(uint32_t strm, const std::vector<uint32_t> & cells);

    // Rows from outside were put into these cells; wanted[i] is the slot that row i would like, as get_own_slot tells it, any_slot
    // or none. Lets go of the slots that nobody holds any more and returns the slot that each row gets, or none.
    static constexpr int32_t any_slot = INT32_MAX;
    std::vector<int32_t> adopt(llama_seq_id seq_id, const std::vector<uint32_t> & cells, const std::vector<int32_t> & wanted);

    // of a saved state, seq_id -1: of all sequences. They get the slots that they had where that is possible: attention sums its
    // rows in order of slots, so the next logits are the same bits
    void restore(uint32_t strm, llama_seq_id seq_id, const std::vector<uint32_t> & cells, const std::vector<uint32_t> & wanted);

    //
    // windows that change, see docs/decisions/042
    //

    // n_draft stays
    void set_window(const mixedkv::hot_window & value);

    // puts each row to the slot that it would get if the tokens came one after the other
    void lay_out(const mixedkv::hot_layout & layout);

private:
    const llama_kv_cells_vec    & v_cells;
    const std::vector<uint32_t> & seq_to_stream;

    const uint32_t n_seq_max;
    const uint32_t n_stream;

    mixedkv::hot_window window;

    mixedkv::hot_layout layout; // for the window

    std::vector<mixedkv::hot_ring> rings; // per stream

    pool_use use;

    // first hot position of each sequence after its last ubatch: what lies between it and the next one leaves
    std::vector<llama_pos> begins;

    // by stream: sequences were changed from outside, so every slot is looked at after the next ubatch
    std::vector<bool> dirty;

    // does any sequence of the cell hold its row, seen from the sequence's last token?
    bool is_wanted(uint32_t strm, uint32_t cell, const mixedkv::hot_window & window) const;

    // slots of cells that nobody wants any more
    void release_unwanted(uint32_t strm, const mixedkv::hot_window & window);

    // the same for the sequences of a ubatch, when only they went on
    void release_left(uint32_t strm, const llama_ubatch & ubatch);

    // Each sequence has slots of its own for its sinks and, where there is room for all, for its window, in which it goes round. A
    // token takes the one after that of the token before it, so drafts that were rejected leave no trace, and neither does a
    // state that was restored.
    uint32_t first_sink  (llama_seq_id seq_id) const;
    uint32_t first_recent(llama_seq_id seq_id) const;
    uint32_t next_slot(uint32_t strm, uint32_t cell) const;

    // the slot of the token before that of the cell, none: there is no such token, or it is cold
    int32_t last_slot(uint32_t strm, uint32_t cell) const;

    // of the recent rows of its sequence that are no younger than the cell's, none: there are no such rows
    int32_t oldest_slot(uint32_t strm, uint32_t cell) const;

    // a slot for the cell, or none
    int32_t assign_slot(uint32_t strm, uint32_t cell);

    // the slot that get_own_slot told, if the cell can have it
    int32_t assign_own_slot(llama_seq_id seq_id, uint32_t cell, uint32_t wanted, bool is_alone);

    // the row goes before its window does
    void evict(uint32_t strm, uint32_t slot);

    // sequences of a ubatch go on
    void use_by(const llama_ubatch & ubatch);

    // what is known of positions that are no longer there is forgotten
    void trim_use();

    //
    // the same where windows of their own are too many: cache/hot-pool.cpp
    //

    // a page's rows belong to one sequence, but for tokens that several share
    struct page_info {
        llama_seq_id owner = -1; // of these the one that was evaluated last, -1: nobody's
        llama_pos    first = 0;  // lowest position
    };

    page_info get_page(uint32_t strm, uint32_t i_page) const;

    // nobody needs it: what a sequence that rests holds comes back from a checkpoint
    bool is_free(const page_info & page, llama_seq_id seq_id) const;

    int32_t assign_sink (uint32_t strm, uint32_t cell);
    int32_t next_in_page(uint32_t strm, uint32_t cell);
    int32_t next_page   (uint32_t strm, llama_seq_id seq_id, int32_t last);
    bool    take_page   (uint32_t strm, llama_seq_id seq_id, uint32_t slot);
    void    evict_page  (uint32_t strm, uint32_t i_page);
};
