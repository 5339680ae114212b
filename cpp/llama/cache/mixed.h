#pragma once

// A KV cache of mixed precision: upstream's cache of a quantised type is the cold store and holds every token;
// recent tokens and attention sinks have an F16 copy besides, in the hot rows. The cache composes these (cache/hot-rows.h), the basis
// that rows are stored in (rows/row-basis.h), and which node reads each layer's (cache/layer-readers.h).
//
// Who calls it: upstream, through hooks/hooks.h and the methods of llama_kv_cache and llama_kv_cache_context that
// vendor/patches makes virtual; its own context at each step; the C API and blocks of rows between steps, while they hold the
// context's lock.

#include "mixedkv/mixedkv.h"

#include "llama-kv-cache.h"
#include "cache/hot-rows.h"
#include "cache/layer-readers.h"
#include "cache/placement.h"
#include "graph/node.h"
#include "graph/key-sketches.h"
#include "rows/row-basis.h"

#include <map>
#include <string>
#include <vector>

// Invariants:
//
// - Every live cell has a valid cold row. Whatever happens to hot rows, no token is lost, and the base's operations hold.
// - A sequence operation is the base's first: hot rows look at cells as they are after it.
// - A cell is in one state for all layers: it has hot rows in all of them, or in none.
// - A ubatch whose graph has not ended well leaves cells, hot rows and pages as they were: begin_step, roll_back.
// - Keys of the cold store and of hot rows are in the same basis, but for the bias subtracted from cold rows (llama_kv_row_basis).
// - What graphs point to (nodes, scratch, tensors) lives as long as the cache; only make_room() makes other tensors.
class llama_kv_cache_mixed : public llama_kv_cache {
public:
    // the arguments of llama_kv_cache, after the configuration
    template <typename... Args>
    explicit llama_kv_cache_mixed(const mixedkv_config & config, Args &&... args) :
        llama_kv_cache(std::forward<Args>(args)...), config(config), hot(*this, hparams, config),
        basis(*this, model, hparams, config.mixed), readers(*this, hparams, basis, config.attention, hot.has_rows()),
        placement(n_seq_max) {
        set_up();
    }

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

    std::unique_ptr<llama_kv_cache_context> make_context(slot_info_vec_t sinfos, std::vector<llama_ubatch> ubatches);

    llama_memory_context_ptr init_update(llama_context * lctx, bool optimize) override;

    bool update(llama_context * lctx, bool do_shift, const stream_copy_info & sc_info) override;

    // places tokens on trial: what cells lose comes back
    slot_info_vec_t prepare(const std::vector<llama_ubatch> & ubatches) override;

    // rotates whole heads: upstream's cannot where RoPE rotates a part of quantised ones
    ggml_cgraph * build_graph_shift(llm_graph_result * res, llama_context * lctx) const override;
    bool          get_can_shift() const override;

    //
    // llama_kv_cache_mixed specific API
    //

    // false: a uniform cache that only wants the fused attention node
    bool is_mixed() const { return config.mixed; }

    // what it was made with; the window may be another one since
    const mixedkv_config & get_config() const { return config; }

    // bits of Q and of attention weights that are forced, 0: what suits the rows
    int get_rounding() const { return scratch.rounding; }

    // the F16 rows, and which cells have one
          llama_kv_hot_rows & get_hot()       { return hot; }
    const llama_kv_hot_rows & get_hot() const { return hot; }

    // what rows are stored times, rotated by and without
          llama_kv_row_basis & get_basis()       { return basis; }
    const llama_kv_row_basis & get_basis() const { return basis; }

    // which node reads a layer's rows
    const llama_kv_layer_readers & get_readers() const { return readers; }

    // empty, or why the window cannot be set
    std::string window_problem(mixedkv::hot_window value) const;

    // makes the rows that such a window takes; throws when there is no memory, and nothing has changed
    void make_room(const mixedkv::hot_window & value);

    const llama_kv_cells & get_stream_cells(uint32_t strm) const { return v_cells[strm]; }

    // the cache before a ubatch was placed, as far as llama_context::decode does not restore it when the graph fails
    struct checkpoint {
        slot_info                     sinfo;
        std::vector<uint32_t>         heads; // by stream of sinfo
        llama_kv_hot_rows::checkpoint hot;
    };

    checkpoint begin_step(const slot_info & sinfo) const;

    void roll_back(const checkpoint & step);

    // the merged view has a multiple of these rows: flash attention of backends has its fast bodies for those alone
    static constexpr uint32_t n_pad_view = 256;

    // what the merged view of a layer takes of the context's compute buffers at most
    size_t get_view_bytes() const;

    // whether a row lies at another position than K was rotated to; if what did has gone, forget about it
    bool has_moved();

    // what the nodes of layer il need when they run; lives as long as the cache
    llama_kv_node & get_node(int32_t il);

    // chooses the cells of tokens that are about to be stored anew, as many as sinfos have
    void place(slot_info_vec_t & sinfos, const std::vector<llama_ubatch> & ubatches);

    // tells the fused nodes which tokens of the ubatch belong together
    void set_runs(const llama_ubatch & ubatch, uint32_t n_stream);

    // where the fused nodes add up the attention that they compute, nullptr: nowhere
    void set_mass(llama_kv_mass * mass) { scratch.mass = mass; }

    // the order in which nodes on the CPU read the keys of a step of n_tokens
    llama_kv_key_order::split_rule get_cold_splits() const;
    llama_kv_key_order::split_rule get_hot_splits(uint32_t n_tokens) const;
    std::vector<llama_kv_key_order> & get_orders() { return scratch.orders; }

    // of a block of that order: the first position that queries from pos on see
    llama_pos get_first_read(llama_pos pos) const;

    const mixedkv::attention_page_counts & get_page_counts() const { return scratch.page_counts; }

    // pages of which a layer's attention reads those that matter, nullptr: it reads all
    llama_kv_layer_sketch * get_pages(int32_t il) { return pages.get(map_layer_ids.at(il)); }
    const llama_kv_sketches & get_all_pages() const { return pages; }
    void begin_pages(const slot_info & sinfo); // of the ubatch, which has been placed
    void touch_rows(uint32_t strm, const std::vector<uint32_t> & cells); // that came from elsewhere

    // sums all up again: how many there are, by layers, and in how many layers one differs from what is kept
    struct page_check { uint32_t n_known = 0, n_wrong = 0; };
    page_check check_pages();

    // of all layers, and what an F16 cache would take
    uint64_t get_bytes() const;
    uint64_t get_bytes_f16() const;

private:
    const mixedkv_config config;

    llama_kv_hot_rows      hot;
    llama_kv_row_basis     basis;
    llama_kv_layer_readers readers; // after the basis, which they depend on

    // by layer of the model, and the memory that their attention works in, one layer after the other
    std::map<int32_t, llama_kv_node> nodes;
    llama_kv_scratch                 scratch;

    llama_kv_sketches pages;

    // of several sequences in one stream; sliding windows take over cells, which upstream chooses
    llama_kv_placement placement;

    // a graph that rotates keys to their new positions, and what it adds for the rows of one layer
    struct moved_rows;
    struct shift_graph;
    class  shift_input;
    std::unique_ptr<shift_input> find_moved(ggml_context * ctx) const;
    void build_shift(const shift_graph & graph, ggml_tensor * rows, const moved_rows & moved, uint32_t il) const;

    void set_up(); // what lies beside the rows
    void make_pages();

    bool is_trial = false; // prepare() is at work

    // cells in the order in which upstream's state_write stores them
    std::vector<uint32_t> saved_cells(uint32_t strm, llama_seq_id seq_id) const;

    // what is saved behind upstream's state of the cold store
    void hot_write(llama_io_write_i & io, llama_seq_id seq_id) const;
    void hot_read (llama_io_read_i  & io, llama_seq_id seq_id, const slot_info_vec_t & sinfos);
};

// the edge of the Hadamard blocks that rows of any cache are rotated by, 0: they are not
int64_t llama_kv_rows_rotation(const llama_kv_cache & kv, bool is_k);
