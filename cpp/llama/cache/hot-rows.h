#pragma once

// The F16 rows of a mixed cache: a ring of them for each layer, and the slots that say which cell has which row.
//
// llama_kv_cache_mixed composes one beside its cold store, and tells it of each sequence operation after the cold store has carried
// it out. Others reach it through llama_kv_cache_mixed::get_hot(): the cache's context at each step and for the graph, blocks that
// come in, and the C API, which sets windows.

#include "cache/hot-slots.h"

#include "mixedkv/mixedkv.h"

#include "ggml-cpp.h"
#include "llama-kv-cache.h"

#include <map>
#include <optional>
#include <utility>
#include <vector>

// K and V, or the one that a layer has: latent attention (MLA) reads values from the first elements of its keys
inline std::vector<ggml_tensor *> llama_kv_tensors(ggml_tensor * k, ggml_tensor * v) {
    return v ? std::vector<ggml_tensor *>{ k, v } : std::vector<ggml_tensor *>{ k };
}

// Invariants:
//
// - A row that is here is a second copy: the cold store has one of every token, so rows can be let go of at any time.
// - A layer's ring lies in memory of the kind where its cold rows lie. All rings have n_rows rows for each stream: the slots, which
//   may be fewer than memory was allocated for, then padding and at last a row that is written and never read.
// - Between two steps the row in a slot is that of the slot's cell. During a step it is that of the cell's token before the step,
//   until the last layer that reads it has done so: then the graph writes the ubatch's rows.
// - A step that fails leaves rows and slots as begin_step() found them.
// - Without rows (has_rows() is false) there are no slots either, and no window ever opens: graphs have no place for it.
class llama_kv_hot_rows {
public:
    using slot_info = llama_kv_cache::slot_info;

    // llama_kv_cache_mixed's constructor, with its base, which outlives this; throws where hot_budget is less than one window
    llama_kv_hot_rows(const llama_kv_cache & cold, const llama_hparams & hparams, const mixedkv_config & config);

    // llama_kv_cache_mixed::init_update: the context that computes on the cache, before its first step
    void set_context(llama_context * lctx) { this->lctx = lctx; }

    bool has_rows() const { return n_rows > 0; }

    // rows of the ring per stream: slots, padding, one row that nobody reads
    uint32_t get_n_rows() const { return n_rows; }

    // row for tokens that get no slot: written, never read
    uint32_t get_trash_row() const { return n_rows - 1; }

    const llama_kv_hot_slots & get_slots() const { return slots; }

    // K and V of a layer
    size_t get_bytes(int32_t il) const;

    void add_memory(std::map<ggml_backend_buffer_type_t, size_t> & memory) const;

    //
    // sequence operations: llama_kv_cache_mixed, after the cold store
    //

    void clear(bool data);

    // zeroes slots that no cell has, and the row that nobody reads: the merged view multiplies them
    void clear_unused();

    void release_dead()                             { slots.release_dead(); }
    void seq_cp (llama_seq_id src, llama_seq_id dst) { slots.seq_cp(src, dst); }
    void seq_add(llama_pos shift)                   { slots.seq_add(shift); }
    void seq_div(int d)                             { slots.seq_div(d); }

    // llama_kv_cache_mixed::update: the copy between streams that seq_cp has announced
    void copy_stream(uint32_t src, uint32_t dst);

    // C API: until it is evaluated again, or wakes, slots of the sequence count as free
    void rest(llama_seq_id seq_id) { slots.rest(seq_id); }
    void wake(llama_seq_id seq_id) { slots.wake(seq_id); }

    //
    // steps: llama_kv_cache_mixed_context, in this order
    //

    // what a step that fails needs to leave nothing
    struct checkpoint {
        std::vector<llama_seq_id>          strms;
        std::vector<std::vector<int32_t>>  owners; // by stream of strms, as the others: who held which slot
        std::vector<std::vector<uint32_t>> taken;  // slots that the ubatch gets from live cells
        std::vector<std::vector<uint8_t>>  rows;   // of the slots in `taken`, see copy_rows
        std::optional<llama_kv_hot_slots::pool_use> use; // of the whole cache
    };

    // before the ubatch is placed
    checkpoint begin_step(const slot_info & sinfo) const;

    // after it has been: returns the ring row of each token over all streams
    std::vector<int64_t> advance(const slot_info & sinfo, const llama_ubatch & ubatch);

    // before its graph runs: keeps the rows that it overwrites
    void keep_rows(checkpoint & step) const;

    // the graph has not ended well; the cold store has been put back
    void roll_back(const checkpoint & step);

    //
    // graph: llama_kv_cache_mixed_context, and build_graph_shift for get_k_ring
    //

    // F16 rows [n_embd_head, n_head_kv, n_rows, n_stream] of the streams of sinfo
    ggml_tensor * get_k(ggml_context * ctx, int32_t il, const slot_info & sinfo) const;
    ggml_tensor * get_v(ggml_context * ctx, int32_t il, const slot_info & sinfo) const;

    // store rows of the ubatch, [n_embd_head, n_head_kv, n_tokens], at the ring rows idxs [n_tokens]
    ggml_tensor * cpy_k(ggml_context * ctx, ggml_tensor * cur, ggml_tensor * idxs, int32_t il) const;
    ggml_tensor * cpy_v(ggml_context * ctx, ggml_tensor * cur, ggml_tensor * idxs, int32_t il) const;

    // F16 [n_embd_k_gqa, n_rows, n_stream]
    ggml_tensor * get_k_ring(int32_t il) const { return get_layer(il).k; }

    //
    // rows that leave and come from elsewhere: blocks and states
    //

    // F16 [n_embd_gqa, n_rows] of a stream
    ggml_tensor * get_k_stream(int32_t il, uint32_t strm) const { return get_layer(il).k_stream[strm]; }
    ggml_tensor * get_v_stream(int32_t il, uint32_t strm) const { return get_layer(il).v_stream[strm]; }

    // see llama_kv_hot_slots; the caller writes the rows
    std::vector<int32_t> adopt(llama_seq_id seq_id, const std::vector<uint32_t> & cells, const std::vector<int32_t> & wanted) {
        return slots.adopt(seq_id, cells, wanted);
    }

    // which of the saved cells of a stream have an F16 row, in which slots, and these rows; seq_id -1: cells of all sequences
    void state_write(llama_io_write_i & io, uint32_t strm, llama_seq_id seq_id, const std::vector<uint32_t> & cells) const;
    void state_read (llama_io_read_i  & io, uint32_t strm, llama_seq_id seq_id, const std::vector<uint32_t> & cells);

    // llama_kv_cache_mixed::state_read: these cells have been taken over
    void release_cells(uint32_t strm, const std::vector<uint32_t> & cells) { slots.release_cells(strm, cells); }

    //
    // windows that change: the C API, on a cache that evaluates nothing. See cache/hot-window.cpp
    //

    // whether that takes more F16 rows than there are, and makes them, a multiple of n_pad more: throws when there is no
    // memory, and nothing has changed
    bool is_wider (mixedkv::hot_window value) const;
    void make_room(mixedkv::hot_window value, uint32_t n_pad);

    // rows move to where they lie in a ring of such windows
    void set_window(const mixedkv::hot_window & value);

    // bytes of the ring that went back to the system
    uint64_t get_bytes_given_back() const { return n_given_back; }

private:
    struct layer {
        ggml_tensor * k; // F16 [n_embd_gqa, n_rows, n_stream]
        ggml_tensor * v; // nullptr: none
        std::vector<ggml_tensor *> k_stream;
        std::vector<ggml_tensor *> v_stream;

        std::vector<ggml_tensor *> stream(uint32_t s) const { return llama_kv_tensors(k_stream[s], v ? v_stream[s] : nullptr); }
    };

    using buffers = std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>>;

    const llama_kv_cache & cold;
    const llama_hparams  & hparams;

    const uint32_t n_stream;

    llama_kv_hot_slots slots;

    uint32_t n_slots_max  = 0; // of a stream, as many as were allocated
    uint32_t n_rows       = 0;
    uint64_t n_given_back = 0;

    std::vector<layer> layers; // as the cold store has them
    buffers            bufs;

    llama_context * lctx = nullptr;

    const layer & get_layer(int32_t il) const;

    std::pair<std::vector<layer>, buffers> alloc(uint32_t n_rows) const;

    // a ring with that many slots, with the rows of the one before it
    void grow(uint32_t n_slots, uint32_t n_pad);

    // the window was `before`: slots are laid out for the one that is
    void lay_out(const mixedkv::hot_window & before);
    void move_rows(uint32_t strm, const mixedkv::hot_ring & before);
    void give_back(const ggml_tensor * ring);

    // waits for graphs that may still write rows
    void synchronize() const;

    // rows of all layers at these slots, one after the other, to `rows` or from there
    void copy_rows(uint32_t strm, const std::vector<uint32_t> & slots, std::vector<uint8_t> & rows) const;
    void put_rows (uint32_t strm, const std::vector<uint32_t> & slots, const std::vector<uint8_t> & rows);

    template <typename F> void for_each_run(uint32_t strm, const std::vector<uint32_t> & slots, F && body) const;
};
