#pragma once

// A KV cache of mixed precision: upstream's cache of a quantised type is the cold store and holds every token;
// recent tokens and attention sinks have an F16 copy besides, in a ring.
//
// Upstream reaches it through llama-kv-mixed-hooks.h, and through methods of llama_kv_cache and llama_kv_cache_context
// that vendor/patches makes virtual.

#include "hot_set/hot_layout.h"
#include "hot_set/hot_ring.h"
#include "hot_set/hot_window.h"
#include "mixedkv/mixedkv.h"

#include "llama-kv-cache.h"
#include "llama-kv-equalize.h"
#include "llama-kv-node.h"
#include "llama-kv-pages.h"
#include "llama-kv-placement.h"
#include "llama-kv-turns.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

// K and V, or the one that a layer has: latent attention (MLA) reads values from the first elements of its keys
inline std::vector<ggml_tensor *> llama_kv_tensors(ggml_tensor * k, ggml_tensor * v) {
    return v ? std::vector<ggml_tensor *>{ k, v } : std::vector<ggml_tensor *>{ k };
}

class llama_kv_cache_mixed : public llama_kv_cache {
public:
    // the arguments of llama_kv_cache, after the configuration
    llama_kv_cache_mixed(
            const mixedkv_config & config,
            const llama_model & model,
          const llama_hparams & hparams,
                    ggml_type   type_k,
                    ggml_type   type_v,
                         bool   v_trans,
                         bool   offload,
                         bool   unified,
                     uint32_t   kv_size,
                     uint32_t   n_seq_max,
                     uint32_t   n_pad,
                     uint32_t   n_swa,
               llama_swa_type   swa_type,
               llama_memory_t   mem_other,
        const layer_filter_cb & filter,
        const  layer_reuse_cb & reuse,
        const  layer_share_cb & share,
                 const char *   name_tag = "");

    //
    // llama_memory_i
    //

    llama_memory_context_ptr init_full() override;

    void clear(bool data) override;

    bool seq_rm  (llama_seq_id seq_id,                              llama_pos p0, llama_pos p1) override;
    void seq_cp  (llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1) override;
    void seq_keep(llama_seq_id seq_id)                                                          override;
    void seq_add (llama_seq_id seq_id,                              llama_pos p0, llama_pos p1, llama_pos shift) override;
    void seq_div (llama_seq_id seq_id,                              llama_pos p0, llama_pos p1, int d) override;

    std::map<ggml_backend_buffer_type_t, size_t> memory_breakdown() const override;

    void state_write(llama_io_write_i & io, llama_seq_id seq_id = -1, llama_state_seq_flags flags = 0) const override;
    void state_read (llama_io_read_i  & io, llama_seq_id seq_id = -1, llama_state_seq_flags flags = 0) override;

    //
    // llama_kv_cache
    //

    llama_kv_cache_context * make_context(slot_info_vec_t sinfos, std::vector<llama_ubatch> ubatches) override;

    llama_memory_context_ptr init_update(llama_context * lctx, bool optimize) override;

    bool update(llama_context * lctx, bool do_shift, const stream_copy_info & sc_info) override;

    ggml_cgraph * build_graph_shift(llm_graph_result * res, llama_context * lctx) const override;

    //
    // llama_kv_cache_mixed specific API
    //

    // false: a uniform cache that only wants the fused attention node
    bool is_mixed() const { return config.mixed; }

    bool has_ring() const { return n_ring > 0; }

    // rows of the ring per stream: slots, one row that nobody reads, padding
    uint32_t get_n_ring() const { return n_ring; }

    // row for tokens that get no slot: written, never read
    uint32_t get_trash_row() const { return n_ring - 1; }

    // the window as it was set, and as it is: shorter where limit_window says so
    const mixedkv::hot_window & get_rule()   const { return rule; }
    const mixedkv::hot_window & get_window() const { return window; }

    // empty, or why the window cannot be set
    std::string window_problem(mixedkv::hot_window value) const;

    // whether that takes more F16 rows than there are, and makes them; throws when there is no memory, and nothing has changed
    bool is_wider(mixedkv::hot_window value) const;
    void make_room(const mixedkv::hot_window & value);

    // rows move to where they lie in a ring of such windows, see llama-kv-cache-mixed-window.cpp
    void set_window(const mixedkv::hot_window & value);

    // no more than so many recent tokens, whatever is set; the memory of slots that are left over goes back
    void limit_window(uint32_t threshold);

    // bytes of the ring that went back to the system
    uint64_t get_bytes_given_back() const { return n_given_back; }

    const mixedkv::hot_ring & get_ring(uint32_t strm)        const { return rings[strm]; }
    const llama_kv_cells    & get_stream_cells(uint32_t strm) const { return v_cells[strm]; }

    // after a ubatch has been placed: lets go of the slots that its queries no longer read,
    //   gives slots to its hot tokens and returns the ring row of each token over all streams
    std::vector<int64_t> advance(const slot_info & sinfo, const llama_ubatch & ubatch);

    // What the ring's pool knows of the sequences that share it, by sequence, see llama-kv-cache-mixed-pool.cpp.
    struct pool_use {
        uint64_t               n_steps   = 1;
        uint64_t               n_evicted = 0;  // rows that went before their window did
        std::vector<uint64_t>  step;           // when the sequence was evaluated last, 0: it rests
        std::vector<llama_pos> lost;           // highest position whose row went, -1: none
        std::vector<llama_pos> short_from;     // first position that was evaluated without such rows, -1: none
    };

    const pool_use & get_use() const { return use; }

    // until it is evaluated again, slots of the sequence count as free
    void rest(llama_seq_id seq_id) { use.step[seq_id] = 0; }

    // slots of a stream's ring
    uint32_t get_n_slots() const { return layout.n_slots; }

    // they are fewer than the windows of all sequences
    bool is_shared() const { return layout.is_shared(); }

    // whether a query at `pos` finds all keys of its window, sinks included, in F16
    bool is_window_whole(llama_seq_id seq_id, llama_pos pos) const;

    // the cache before a ubatch was placed, as far as llama_context::decode does not restore it when the graph fails
    struct checkpoint {
        slot_info                         sinfo;
        std::vector<uint32_t>             heads;  // by stream of sinfo, as the others
        std::vector<std::vector<int32_t>> owners; // who held which ring slot
        std::vector<std::vector<uint8_t>> rows;   // of the slots in `taken`, see copy_rows
        std::vector<std::vector<uint32_t>> taken; // slots that the ubatch gets from live cells
        std::optional<pool_use>           use;    // of the whole cache
    };

    checkpoint begin_step(const slot_info & sinfo) const;

    // after the ubatch has been placed, before its graph runs: keeps the rows that it overwrites
    void keep_rows(checkpoint & step) const;

    void roll_back(const checkpoint & step);

    // rows from outside were put into these cells, wanted[i] is the slot that row i would like, as get_own_slot tells it,
    //   any_slot or none: lets go of the slots that nobody holds any more and returns the slot that each row gets, or none
    static constexpr int32_t any_slot = INT32_MAX;
    std::vector<int32_t> adopt(llama_seq_id seq_id, const std::vector<uint32_t> & cells, const std::vector<int32_t> & wanted);

    // the merged view has a multiple of these rows: flash attention of backends has its fast bodies for those alone
    static constexpr uint32_t n_pad_view = 256;

    // what the merged view of a layer takes of the context's compute buffers at most
    size_t get_view_bytes() const;

    // attention of this layer reads the rows with the fused node
    bool is_fused(int32_t il) const;

    // the layer stores no values: they are the first elements of its keys
    bool is_latent(int32_t il) const { return !layers[map_layer_ids.at(il)].v; }

    // so does that of every layer
    bool is_fused() const { return std::find(fused.begin(), fused.end(), false) == fused.end(); }

    // F16 rows [n_embd_head, n_head_kv, n_ring, n_stream] of the streams of sinfo
    ggml_tensor * get_k_ring(ggml_context * ctx, int32_t il, const slot_info & sinfo) const;
    ggml_tensor * get_v_ring(ggml_context * ctx, int32_t il, const slot_info & sinfo) const;

    // store rows of the ubatch, [n_embd_head, n_head_kv, n_tokens], at the ring rows idxs [n_tokens]
    ggml_tensor * cpy_k_ring(ggml_context * ctx, ggml_tensor * cur, ggml_tensor * idxs, int32_t il) const;
    ggml_tensor * cpy_v_ring(ggml_context * ctx, ggml_tensor * cur, ggml_tensor * idxs, int32_t il) const;

    // models can attend to the rows of a lower layer: whose rows layer il reads, and the last layer that does
    int32_t get_layer_id(int32_t il) const;
    bool    is_last_reader(int32_t il) const;

    // whether a row lies at another position than K was turned to; if what did has gone, forget about it
    bool has_moved();

    // what the nodes of layer il need when they run; lives as long as the cache
    llama_kv_node & get_node(int32_t il);

    // The matrix that latent rows are rotated by when they are quantised, in blocks that values end with too; nullptr: they are
    // not. Upstream rotates none of them.
    ggml_tensor * get_latent_rot() const { return latent_rot; }

    // what keys of layer il are stored times, nullptr: nothing
    const llama_kv_scales * get_scales(int32_t il) const { return equalizer.get(map_layer_ids.at(il)); }

    // tells them apart, 0: there are none
    uint32_t get_scales_id(int32_t il) const { return get_scales(il) ? get_scales(il)->id : 0; }

    // what cold rows of K of the layer lack, nullptr: nothing
    const std::vector<mixedkv::attention_pair> * get_pairs(int32_t il) const;

    // cells of these streams have got positions
    void update_turns(const slot_info & sinfo);

    // where graphs add that by themselves: cosines and sines [n_turns, n_tokens] and [n_turns, n_kv, n_stream], and what
    //   rows [n_embd_head, n_head_kv, ...] with such turns lack, nullptr: nothing
    uint32_t get_n_turns() const { return is_fused() ? 0 : turns.n_turns(); }
    void set_input_turns(ggml_tensor * cur, ggml_tensor * cells, const llama_ubatch & ubatch);
    ggml_tensor * build_lacking(ggml_context * ctx, ggml_tensor * turns, int32_t il) const;

    // the same for graphs that do it by themselves
    void scale_qk(ggml_context * ctx, ggml_tensor *& q, ggml_tensor *& k, int32_t il) const;

    // chooses the cells of tokens that are about to be stored anew, as many as sinfos have
    void place(slot_info_vec_t & sinfos, const std::vector<llama_ubatch> & ubatches);

    // tells the fused nodes which tokens of the ubatch belong together
    void set_runs(const llama_ubatch & ubatch, uint32_t n_stream);

    // where the fused nodes add up the attention that they compute, nullptr: nowhere
    void set_mass(llama_kv_mass * mass) { scratch.mass = mass; }

    const mixedkv::attention_skips & get_skips() const { return scratch.skips; }

    // pages of which a layer's attention reads those that matter, nullptr: it reads all
    llama_kv_layer_pages * get_pages(int32_t il) { return pages.get(map_layer_ids.at(il)); }
    const llama_kv_pages & get_all_pages() const { return pages; }
    void begin_pages(const slot_info & sinfo); // of the ubatch, which has been placed
    void touch_rows(uint32_t strm, const std::vector<uint32_t> & cells); // that came from elsewhere

    // sums all up again: how many there are, by layers, and in how many layers one differs from what is kept
    struct page_check { uint32_t n_known = 0, n_wrong = 0; };
    page_check check_pages();

    const llama_kv_cells & get_seq_cells(llama_seq_id seq_id) const { return v_cells[seq_to_stream[seq_id]]; }

    // layers that attend to the rows of this cache
    uint32_t get_n_readers() const { return map_layer_ids.size(); }

    // live cells that are read in F16
    uint32_t get_n_cells_hot() const;

    // K and V of the ring
    size_t get_ring_bytes(int32_t il) const;

    // of all layers, and what an F16 cache would take
    uint64_t get_bytes() const;
    uint64_t get_bytes_f16() const;

    // the slot that a query whose window begins at `begin` reads, -1: it reads the cold row
    int32_t get_hot_slot(uint32_t strm, uint32_t cell, llama_pos begin) const;

    // the slot as counted from the first one of the sequence; behind its last one for a row that has a slot elsewhere, as
    //   rows that it shares with another sequence may
    int32_t get_own_slot(llama_seq_id seq_id, int32_t slot) const;

    // F16 [n_embd_gqa, n_ring]
    const ggml_tensor * get_k_ring_stream(int32_t il, uint32_t strm) const { return ring_layers[map_layer_ids.at(il)].k_stream[strm]; }
    const ggml_tensor * get_v_ring_stream(int32_t il, uint32_t strm) const { return ring_layers[map_layer_ids.at(il)].v_stream[strm]; }

private:
    struct ring_layer {
        ggml_tensor * k; // F16 [n_embd_gqa, n_ring, n_stream]
        ggml_tensor * v; // nullptr: none
        std::vector<ggml_tensor *> k_stream;
        std::vector<ggml_tensor *> v_stream;

        std::vector<ggml_tensor *> stream(uint32_t s) const { return llama_kv_tensors(k_stream[s], v ? v_stream[s] : nullptr); }
    };

    const mixedkv_config config;

    mixedkv::hot_window rule;
    mixedkv::hot_window window;
    uint32_t            limit       = UINT32_MAX;
    bool                was_limited = false;

    mixedkv::hot_layout layout; // for the window

    uint32_t n_slots_max  = 0; // of a stream, as many as were allocated
    uint32_t n_ring       = 0;
    uint64_t n_given_back = 0;

    pool_use use;

    std::vector<mixedkv::hot_ring> rings; // per stream

    // by index of the KV cache layer
    std::vector<ring_layer> ring_layers;
    std::vector<int32_t>    last_reader;
    std::vector<bool>       fused;

    // by layer of the model, and the memory that their attention works in, one layer after the other
    std::map<int32_t, llama_kv_node> nodes;
    llama_kv_scratch                 scratch;

    llama_kv_equalizer equalizer;
    llama_kv_turns     turns;
    llama_kv_pages     pages;
    uint32_t           turns_s0 = 0; // first stream of the ubatch at hand

    // first hot position of each sequence after its last ubatch: what lies between it and the next one leaves
    std::vector<llama_pos> begins;

    // by stream: sequences were changed from outside, so every slot is looked at after the next ubatch
    std::vector<bool> dirty;

    using buffers = std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>>;

    buffers ring_bufs;

    ggml_context_ptr        latent_ctx;
    ggml_backend_buffer_ptr latent_buf;
    ggml_tensor *           latent_rot = nullptr; // F32 [edge, edge]

    // of several sequences in one stream; sliding windows take over cells, which upstream chooses
    llama_kv_placement placement;

    void make_scales();
    void make_latent_rot();
    void make_pages();
    void touch_stream(uint32_t strm);
    void touch_moved();
    void make_rings(uint32_t n_cells);
    std::pair<std::vector<ring_layer>, buffers> alloc_rings(uint32_t n_rows) const;

    // sequences that share a stream
    uint32_t get_n_seq() const { return n_stream == 1 ? n_seq_max : 1; }

    // a ring with that many slots, with the rows of the one before it
    void grow_rings(uint32_t n_slots);

    // the window follows the rule and the limit
    void renew_window();
    void move_rows(uint32_t strm);
    void give_back(const ggml_tensor * ring);

    // does any sequence of the cell hold its row, seen from the sequence's last token?
    bool is_wanted(uint32_t strm, uint32_t cell, const mixedkv::hot_window & window) const;

    // slots of cells that died, and of cells that nobody wants any more
    void release_dead();
    void release_cells(uint32_t strm, const std::vector<uint32_t> & cells);
    void release_unwanted(uint32_t strm, const mixedkv::hot_window & window);

    // the same for the sequences of a ubatch, when only they went on
    void release_left(uint32_t strm, const llama_ubatch & ubatch);

    // Each sequence has slots of its own for its sinks, and where there is room for all one for its window, by turns. A
    // token takes the one after that of the token before it, so drafts that were rejected leave no trace, and neither does a
    // state that was restored.
    uint32_t first_sink(llama_seq_id seq_id) const;
    uint32_t first_turn(llama_seq_id seq_id) const;
    uint32_t next_slot(uint32_t strm, uint32_t cell) const;

    // the slot of the token before that of the cell, none: there is no such token, or it is cold
    int32_t last_slot(uint32_t strm, uint32_t cell) const;

    // the first sequence of a cell
    llama_seq_id get_seq(uint32_t strm, uint32_t cell) const;

    // a slot for the cell, or none
    int32_t assign_slot(uint32_t strm, uint32_t cell);

    // the slot that get_own_slot told, if the cell can have it
    int32_t assign_own_slot(llama_seq_id seq_id, uint32_t cell, uint32_t wanted, bool is_alone);

    // the same where windows of their own are too many: see llama-kv-cache-mixed-pool.cpp
    struct page_info;

    int32_t assign_sink   (uint32_t strm, uint32_t cell);
    int32_t assign_in_page(uint32_t strm, uint32_t cell);
    int32_t next_page     (uint32_t strm, llama_seq_id seq_id, int32_t last);

    page_info              ring_page (uint32_t strm, uint32_t i_page) const;
    std::vector<page_info> ring_pages(uint32_t strm) const;

    // another sequence's page that is as good as free: what it holds comes back from a checkpoint
    bool is_resting(const page_info & page, llama_seq_id seq_id) const;
    bool take_page_of(uint32_t strm, llama_seq_id seq_id, uint32_t slot);
    void evict_page(uint32_t strm, uint32_t i_page);

    // the row goes before its window does
    void evict(uint32_t strm, uint32_t slot);
    void lose (uint32_t strm, uint32_t cell);

    // sequences of a ubatch go on: were they evaluated without rows that went?
    void use_by(const llama_ubatch & ubatch);

    // what is known of positions that no longer are there is forgotten
    void trim_use();

    // rows came from elsewhere
    void renew_use(llama_seq_id seq_id);

    // the context that computes on this cache, once it has
    llama_context * lctx = nullptr;

    // waits for graphs that may still write rows
    void synchronize() const;

    // rows of all layers at these slots, one after the other, to `rows` or from there
    void copy_rows(uint32_t strm, const std::vector<uint32_t> & slots, std::vector<uint8_t> & rows) const;
    void put_rows (uint32_t strm, const std::vector<uint32_t> & slots, const std::vector<uint8_t> & rows);

    template <typename F> void for_each_run(uint32_t strm, const std::vector<uint32_t> & slots, F && body) const;

    // cells in the order in which upstream's state_write stores them
    std::vector<uint32_t> saved_cells(uint32_t strm, llama_seq_id seq_id) const;

    void restore_slots(
            uint32_t strm, llama_seq_id seq_id, const std::vector<uint32_t> & cells, const std::vector<uint32_t> & wanted);

    void ring_write(llama_io_write_i & io, llama_seq_id seq_id) const;
    void ring_read (llama_io_read_i  & io, llama_seq_id seq_id, const slot_info_vec_t & sinfos);
};
