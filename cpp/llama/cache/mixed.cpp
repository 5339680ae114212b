#include "cache/mixed.h"
#include "graph/guard.h"
#include "rows/access.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

//
// llama_kv_cache_mixed
//

// For tests: 8 or 16 bits of Q and of attention weights, whatever suits the rows
static int forced_rounding() {
    const char * bits = std::getenv("MIXEDKV_ROUNDING");
    if (!bits || !*bits) {
        return 0;
    }
    if (strcmp(bits, "8") != 0 && strcmp(bits, "16") != 0) {
        throw std::runtime_error(std::string("MIXEDKV_ROUNDING=") + bits + ": use 8, 16 or nothing");
    }
    return bits[0] == '8' ? 8 : 16;
}

void llama_kv_cache_mixed::set_up() {
    // llama_kv_mixed_admit has refused these with a better message; they would break the assumptions below
    if (v_trans || other) {
        throw std::runtime_error("the mixed KV cache needs flash attention and rows of its own");
    }

    llama_kv_guard_rotation(*this);

    // who changes rows to it: the graph, or nodes, which on a device read tensors
    if (!readers.is_fused()) {
        basis.alloc_for_graph();
    } else if (readers.has_device_nodes()) {
        basis.alloc_scales();
    }

    if (config.mixed) {
        scratch.rounding = forced_rounding();
    }
    make_pages();

    uint32_t n_views = 0;
    for (const auto & layer : layers) {
        if (hot.has_rows() && readers.is_merged(layer.il)) {
            llama_kv_guard_flash(readers.get_device(layer.il), hparams, layer.il);
            ++n_views;
        }
    }
    if (n_views > 0 && config.attention == MIXEDKV_ATTENTION_AUTO) {
        LLAMA_LOG_WARN("%s: %u of %zu layers attend through an F16 view of all their rows, which is slow at depth: their device has no "
                "kernels for such rows, heads or biases of K (docs/platforms.md)\n", __func__, n_views, layers.size());
    }
}

int64_t llama_kv_rows_rotation(const llama_kv_cache & kv, bool is_k) {
    const auto * mixed = dynamic_cast<const llama_kv_cache_mixed *>(&kv);
    const auto * rot   = mixed && is_k ? mixed->get_basis().get_latent_rot() : nullptr;

    return rot ? rot->ne[0] : kv_access::get_rot(kv, is_k);
}

llama_memory_context_ptr llama_kv_cache_mixed::init_update(llama_context * lctx, bool optimize) {
    hot.set_context(lctx);
    basis.set_context(lctx);

    return llama_kv_cache::init_update(lctx, optimize);
}

void llama_kv_cache_mixed::place(slot_info_vec_t & sinfos, const std::vector<llama_ubatch> & ubatches) {
    if (n_stream == 1 && n_seq_max > 1 && n_swa == 0) {
        placement.place(v_cells[0], sinfos, ubatches);
    }
}

std::map<ggml_backend_buffer_type_t, size_t> llama_kv_cache_mixed::memory_breakdown() const {
    auto res = llama_kv_cache::memory_breakdown();

    hot.add_memory(res);
    if (!pages.empty()) {
        res[ggml_backend_cpu_buffer_type()] += pages.n_bytes();
    }

    return res;
}

//
// sequence operations
//

void llama_kv_cache_mixed::clear(bool data) {
    llama_kv_cache::clear(data);

    hot.clear(data);

    for (uint32_t s = 0; data && s < n_stream; ++s) {
        pages.touch_stream(s);
    }
}

bool llama_kv_cache_mixed::seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    // before each token llama_cpp.Llama removes what lies behind the last one
    const auto ends_before = [&](llama_seq_id s) { return v_cells[seq_to_stream[s]].seq_pos_max(s) < p0; };
    if (seq_id >= 0 && ends_before(seq_id)) {
        return true;
    }
    for (llama_seq_id s = 0; seq_id < 0 && ends_before(s);) {
        if (++s == (llama_seq_id) n_seq_max) {
            return true;
        }
    }

    const bool res = llama_kv_cache::seq_rm(seq_id, p0, p1);
    if (!is_trial) {
        hot.release_dead();
    }
    return res;
}

llama_kv_cache::slot_info_vec_t llama_kv_cache_mixed::prepare(const std::vector<llama_ubatch> & ubatches) {
    is_trial = true;
    auto res = llama_kv_cache::prepare(ubatches);
    is_trial = false;

    return res;
}

bool llama_kv_cache_mixed::get_can_shift() const {
    return model.arch != LLM_ARCH_STEP35 && (hparams.n_pos_per_embd() == 1 || hparams.rope_sections[3] == 0);
}

void llama_kv_cache_mixed::seq_cp(llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1) {
    llama_kv_cache::seq_cp(seq_id_src, seq_id_dst, p0, p1);

    // across streams upstream copies whole streams, cell by cell, at the next update: so do we
    hot.seq_cp(seq_id_src, seq_id_dst);
}

void llama_kv_cache_mixed::seq_keep(llama_seq_id seq_id) {
    llama_kv_cache::seq_keep(seq_id);
    hot.release_dead();
}

void llama_kv_cache_mixed::seq_add(llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos shift) {
    llama_kv_cache::seq_add(seq_id, p0, p1, shift);
    hot.seq_add(shift);
}

void llama_kv_cache_mixed::seq_div(llama_seq_id seq_id, llama_pos p0, llama_pos p1, int d) {
    llama_kv_cache::seq_div(seq_id, p0, p1, d);
    hot.seq_div(d);
}

bool llama_kv_cache_mixed::update(llama_context * lctx, bool do_shift, const stream_copy_info & sc_info) {
    if (!sc_info.empty()) {
        llama_synchronize(lctx);

        for (size_t i = 0; i < sc_info.ssrc.size(); ++i) {
            hot.copy_stream(sc_info.ssrc[i], sc_info.sdst[i]);
            pages.touch_stream(sc_info.sdst[i]);
        }
    }

    pages.touch_moved(v_cells);

    return llama_kv_cache::update(lctx, do_shift && has_moved(), sc_info);
}

//
// steps
//

llama_kv_cache_mixed::checkpoint llama_kv_cache_mixed::begin_step(const slot_info & sinfo) const {
    checkpoint res;

    res.sinfo = sinfo;
    res.hot   = hot.begin_step(sinfo);
    for (const llama_seq_id strm : sinfo.strm) {
        res.heads.push_back(v_heads[strm]);
    }

    return res;
}

void llama_kv_cache_mixed::roll_back(const checkpoint & step) {
    for (uint32_t s = 0; s < step.sinfo.n_stream(); ++s) {
        auto & cells = v_cells[step.sinfo.strm[s]];

        // tokens of several sequences are still in all but the first, and their rows may not have been stored
        for (const uint32_t cell : step.sinfo.idxs[s]) {
            if (!cells.is_empty(cell)) {
                cells.rm(cell);
            }
        }
        v_heads[step.sinfo.strm[s]] = step.heads[s];
    }

    hot.roll_back(step.hot);
    pages.undo_step();
}

//
// windows
//

std::string llama_kv_cache_mixed::window_problem(mixedkv::hot_window value) const {
    if (!is_mixed()) {
        return "this KV cache is uniform: only a mixed cache has a window";
    }

    value.n_draft = hot.get_slots().get_window().n_draft;
    if (const std::string problem = value.problem(); !problem.empty()) {
        return problem;
    }

    if (!hot.has_rows() && hot.is_wider(value)) {
        return "quantization_threshold " + std::to_string(value.threshold) + " and sink_tokens " + std::to_string(value.sink_tokens) +
            ": the cache was made without F16 rows, and graphs without them stay so: make it with a window";
    }

    return "";
}

void llama_kv_cache_mixed::make_room(const mixedkv::hot_window & value) {
    // A graph with the rows of before is not run again: its mask has another size, where masks are padded too.
    hot.make_room(value, readers.pads_mask() ? n_pad_view : 1);
}

//
// graph
//

llama_kv_node & llama_kv_cache_mixed::get_node(int32_t il) {
    return nodes.try_emplace(il, llama_kv_node{ scratch }).first->second;
}

llama_kv_key_order::split_rule llama_kv_cache_mixed::get_cold_splits() const {
    return llama_kv_key_order::cold_splits(n_stream == 1 ? n_seq_max : 1, get_size(), n_swa);
}

llama_pos llama_kv_cache_mixed::get_first_read(llama_pos pos) const {
    constexpr llama_pos block = mixedkv::attention_block::places;

    return n_swa > 0 ? std::max<llama_pos>(0, pos + 1 - (llama_pos) n_swa)/block*block : 0;
}

llama_kv_key_order::split_rule llama_kv_cache_mixed::get_hot_splits(uint32_t n_tokens) const {
    // a few sequences with long windows would leave threads without work
    const bool long_windows = hot.get_n_rows() > 1024 && hot.get_slots().get_n_seq() <= 4;

    return llama_kv_key_order::hot_splits(hot.get_slots().get_n_seq(), hot.get_n_rows() + n_tokens, long_windows);
}

void llama_kv_cache_mixed::set_runs(const llama_ubatch & ubatch, uint32_t n_stream) {
    auto & runs = scratch.runs;

    scratch.next_mask();
    runs.clear();
    for (uint32_t i = 0; n_stream == 1 && i < ubatch.n_tokens; ++i) {
        if (i == 0 || ubatch.seq_id[i][0] != ubatch.seq_id[i - 1][0]) {
            runs.push_back(0);
        }
        runs.back()++;
    }

    // tokens that are the only ones of their sequences choose pages
    const size_t n_single = std::count(runs.begin(), runs.end(), 1) + (n_stream == ubatch.n_tokens && n_stream > 1 ? n_stream : 0);
    if (!pages.empty()) {
        const size_t n = n_single*mixedkv::attention_taken_bytes(get_size(), scratch.most_heads_kv);
        scratch.taken.resize(std::max(scratch.taken.size(), n));
    }
}

//
// statistics
//

uint64_t llama_kv_cache_mixed::get_bytes() const {
    uint64_t res = 0;

    for (const auto & layer : layers) {
        res += ggml_nbytes(layer.k) + (layer.v ? ggml_nbytes(layer.v) : 0) + hot.get_bytes(layer.il);
    }

    return res + pages.n_bytes();
}

uint64_t llama_kv_cache_mixed::get_bytes_f16() const {
    uint64_t res = 0;

    for (const auto & layer : layers) {
        res += (ggml_nelements(layer.k) + (layer.v ? ggml_nelements(layer.v) : 0))*sizeof(ggml_fp16_t);
    }

    return res;
}

size_t llama_kv_cache_mixed::get_view_bytes() const {
    size_t res = 0;

    for (size_t ikv = 0; hot.has_rows() && ikv < layers.size(); ++ikv) {
        if (readers.is_merged(layers[ikv].il)) {
            // F16 rows of K and V; where they are not gathered V's are F32 before, and K's were
            const size_t n_rows = GGML_PAD(get_size() + hot.get_n_rows(), n_pad_view)*n_stream;
            const size_t k      = layers[ikv].k->ne[0]*sizeof(ggml_fp16_t);
            const size_t v      = layers[ikv].v ? layers[ikv].v->ne[0]*sizeof(ggml_fp16_t) : 0;
            res = std::max(res, n_rows*(readers.gathers_k(layers[ikv].il) ? k + v : std::max(3*k, k + 3*v)));
        }
    }

    return res;
}
