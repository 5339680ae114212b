#include "hooks/step.h"

#include "hooks/states.h"
#include "hooks/support.h"

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-memory-recurrent.h"

#include <algorithm>

struct llama_step::bookkeeping {
    explicit bookkeeping(const llama_memory_recurrent & mem) :
        cells(mem.cells), head(mem.head), used(mem.used), n(mem.n), rs_z(mem.rs_z), rs_idx(mem.rs_idx), rs_len(mem.rs_len) {}

    void put(llama_memory_recurrent & mem) const {
        mem.cells  = cells;
        mem.head   = head;
        mem.used   = used;
        mem.n      = n;
        mem.rs_z   = rs_z;
        mem.rs_idx = rs_idx;
        mem.rs_len = rs_len;
    }

    std::vector<llama_memory_recurrent::mem_cell> cells;

    uint32_t head;
    uint32_t used;
    uint32_t n;
    int32_t  rs_z;

    std::vector<uint32_t>  rs_idx;
    std::vector<llama_pos> rs_len;
};

llama_step::llama_step(llama_context & ctx, const llama_ubatch & ubatch) :
    ctx(ctx), ubatch(ubatch), recr(llama_kv_mixed_states(ctx.get_memory())) {
    if (!recr) {
        return;
    }

    before = std::make_unique<bookkeeping>(*recr);

    // without these a graph that has begun ends well, and states are too large to be copied for nothing
    if (ctx.abort_callback || ctx.cparams.cb_eval) {
        recr->find_slot(ubatch); // as apply() is about to do
        first = recr->head;
        n     = recr->n;
        before->put(*recr);

        keep_states();
    }
}

llama_step::~llama_step() = default;

void llama_step::keep_states() {
    size_t size = 0;
    llama_kv_for_each_state(*recr, first, n, [&](const ggml_tensor *, size_t, size_t bytes) { size += bytes; });

    llama_step_room & room = ctx.hooks.room;
    if (room.size() < size) {
        room.resize(size);
    }

    ctx.synchronize();

    uint8_t * to = room.data();
    llama_kv_for_each_state(*recr, first, n, [&](const ggml_tensor * t, size_t at, size_t bytes) {
        ggml_backend_tensor_get(t, to, at, bytes);
        to += bytes;
    });
}

void llama_step::put_states() {
    ctx.synchronize();

    const uint8_t * from = ctx.hooks.room.data();
    llama_kv_for_each_state(*recr, first, n, [&](ggml_tensor * t, size_t at, size_t bytes) {
        ggml_backend_tensor_set(t, from, at, bytes);
        from += bytes;
    });
}

// nobody knows what they are: llama.cpp then refuses tokens that would follow those of the sequence
void llama_step::forget_states() {
    std::vector<llama_seq_id> seqs(ubatch.seq_id_unq, ubatch.seq_id_unq + ubatch.n_seqs_unq);

    for (uint32_t i = recr->head; i < std::min(recr->head + recr->n, recr->size); ++i) {
        seqs.insert(seqs.end(), before->cells[i].seq_id.begin(), before->cells[i].seq_id.end());
    }

    before->put(*recr);
    for (const llama_seq_id seq_id : seqs) {
        ctx.get_memory()->seq_rm(seq_id, -1, -1);
    }
}

void llama_step::undo() {
    if (recr && n > 0) {
        before->put(*recr);
        put_states();
    } else if (recr) {
        forget_states();
    }

    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        for (int32_t j = 1; j < ubatch.n_seq_id[i]; ++j) {
            ctx.get_memory()->seq_rm(ubatch.seq_id[i][j], ubatch.pos[i], -1);
        }
    }
}

llm_graph_result * llama_step::process(llm_graph_type gtype, llama_memory_context_i * mctx, ggml_status & status) {
    llm_graph_result * res = nullptr;

    ctx.hooks.validity.use_setting(ctx.hooks.setting.get(ctx, ubatch.token != nullptr));

    status = GGML_STATUS_FAILED;
    if (ctx.hooks.validity.begin_step(ctx.get_memory(), ubatch).empty()) {
        res = ctx.process_ubatch(ubatch, gtype, mctx, status);
    }

    if (res) {
        ctx.hooks.validity.end_step(ctx.get_memory(), ubatch);
        ctx.hooks.finite.end_step(ctx, *res, ubatch);
    } else if (ctx.hooks.validity.refused.empty()) { // otherwise it was not begun
        undo();
    }

    return res;
}

ggml_status llama_step::compute_whole(llama_context & ctx, ggml_cgraph * gf) {
    const auto   callback = ctx.abort_callback;
    void * const data     = ctx.abort_callback_data;

    ctx.set_abort_callback(nullptr, nullptr);
    ggml_backend_sched_set_eval_callback(ctx.get_sched(), nullptr, nullptr); // a graph that is built sets it again

    const ggml_status res = ctx.graph_compute(gf, false);

    ctx.set_abort_callback(callback, data);

    return res;
}
