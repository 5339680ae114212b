#include "blocks/fill.h"

#include "blocks/view.h"
#include "cache/mixed.h"
#include "graph/node.h"
#include "hooks/context.h"
#include "hooks/eval-chain.h"
#include "hooks/support.h"

#include "llama-batch.h"
#include "llama-context.h"

#include <algorithm>

static std::vector<llama_kv_cache_mixed *> get_mixed(llama_context & ctx) {
    std::vector<llama_kv_cache_mixed *> res;

    for (llama_kv_cache * kv : llama_kv_mixed_caches(ctx.get_memory())) {
        if (auto * mixed = dynamic_cast<llama_kv_cache_mixed *>(kv); mixed && mixed->get_readers().is_fused() && !mixed->get_readers().has_device_nodes()) {
            res.push_back(mixed);
        }
    }

    return res;
}

static llama_kv_cache_mixed * find_mixed(llama_context & ctx, int32_t il) {
    const auto caches = get_mixed(ctx);
    const auto found  = std::find_if(caches.begin(), caches.end(), [&](auto * kv) { return llama_kv_rows_has_layer(*kv, il); });

    return found == caches.end() ? nullptr : *found;
}

static std::string positions_problem(llama_context & ctx, const llama_kv_fill & fill) {
    for (uint32_t i = 0; i < fill.n; ++i) {
        if (fill.positions[i] <= (i == 0 ? -1 : fill.positions[i - 1])) {
            return "positions must ascend from 0 or more";
        }
    }

    for (llama_kv_cache * kv : llama_kv_mixed_caches(ctx.get_memory())) {
        for (const auto & row : llama_kv_rows_find(*kv, fill.seq_id, fill.positions[0], fill.positions[fill.n - 1] + 1)) {
            if (std::binary_search(fill.positions, fill.positions + fill.n, row.pos)) {
                return "the sequence has a row at position " + std::to_string(row.pos) + ": remove it first";
            }
        }
    }

    return "";
}

std::string llama_kv_fill_problem(llama_context & ctx, const llama_kv_fill & fill) {
    if (fill.n == 0 || fill.n > llama_n_batch(&ctx)) {
        return "give 1 to " + std::to_string(llama_n_batch(&ctx)) + " tokens (n_batch)";
    }

    const size_t n_caches = llama_kv_mixed_caches(ctx.get_memory()).size();
    if ((fill.mass || fill.last_layer >= 0) && get_mixed(ctx).size() != n_caches) {
        return "attention can be watched and evaluation ended early only where every layer has the fused attention: "
            "use a mixed cache in CPU memory";
    }

    if (fill.last_layer >= 0 && !find_mixed(ctx, fill.last_layer)) {
        return "last_layer=" + std::to_string(fill.last_layer) + " has no KV cache: evaluation can end after a layer that has one";
    }

    return positions_problem(ctx, fill);
}

//
// ends each graph after the attention of a layer
//

class stop_after : public llama_eval_listener {
public:
    explicit stop_after(const llama_kv_node & node) : node(node) {}

    bool before(ggml_tensor * t) override {
        return llama_kv_node_attends(t, node);
    }

    verdict after(ggml_tensor *) override {
        return verdict::stop;
    }

private:
    const llama_kv_node & node;
};

//
// attention by cell, then by position
//

class mass_watch {
public:
    mass_watch(llama_context & ctx, const llama_kv_fill & fill) : fill(fill), caches(get_mixed(ctx)), masses(caches.size()) {
        for (size_t i = 0; i < caches.size() && fill.mass; ++i) {
            caches[i]->set_mass(&masses[i]);
        }
    }

    ~mass_watch() {
        for (auto * kv : caches) {
            kv->set_mass(nullptr);
        }
    }

    void add() const {
        for (size_t i = 0; i < caches.size() && fill.mass; ++i) {
            const auto & cells = caches[i]->get_cells(fill.seq_id);

            for (const auto & of_thread : masses[i].by_thread) {
                for (uint32_t cell = 0; cell < std::min<size_t>(of_thread.size(), cells.size()); ++cell) {
                    if (!cells.is_empty(cell) && cells.seq_has(cell, fill.seq_id) && uint32_t(cells.pos_get(cell)) < fill.n_mass) {
                        fill.mass[cells.pos_get(cell)] += of_thread[cell];
                    }
                }
            }
        }
    }

private:
    const llama_kv_fill & fill;

    std::vector<llama_kv_cache_mixed *> caches;
    std::vector<llama_kv_mass>          masses;
};

static int32_t decode(llama_context & ctx, const llama_batch & batch, int32_t last_layer) {
    const auto inside = llama_kv_mixed_enter(ctx);

    const llama_batch_compat compat(&ctx, batch);
    compat.batch_ext->fills = true;

    if (last_layer < 0) {
        return ctx.decode(*compat.batch_ext);
    }

    stop_after             stop(find_mixed(ctx, last_layer)->get_node(last_layer));
    const llama_eval_guest guest(ctx.hooks.evals, stop);

    ctx.hooks.finite.off = true; // what it looks at is not computed
    const int32_t res    = ctx.decode(*compat.batch_ext);
    ctx.hooks.finite.off = false;

    return res;
}

// What it lacked before it lacks again, whichever micro-batch failed. What is behind stays: see vendor/patches/08.
static void take_back(llama_context & ctx, const llama_kv_fill & fill) {
    for (uint32_t i = 0; i < fill.n; ++i) {
        ctx.get_memory()->seq_rm(fill.seq_id, fill.positions[i], fill.positions[i] + 1);
    }
}

int32_t llama_kv_fill_decode(llama_context & ctx, const llama_kv_fill & fill) {
    std::vector<llama_token>    tokens(fill.tokens, fill.tokens + fill.n);
    std::vector<llama_pos>      positions(fill.positions, fill.positions + fill.n);
    std::vector<int32_t>        n_seq(fill.n, 1);
    std::vector<int8_t>         logits(fill.n, false);
    llama_seq_id                seq_id = fill.seq_id;
    std::vector<llama_seq_id *> seqs(fill.n, &seq_id);

    logits.back() = fill.logits;

    const llama_batch batch = {
        int32_t(fill.n), tokens.data(), nullptr, positions.data(), n_seq.data(), seqs.data(), logits.data()
    };

    const mass_watch attention(ctx, fill);
    const int32_t    res = decode(ctx, batch, fill.last_layer);

    ctx.synchronize();

    if (res == 0) {
        attention.add();
        for (uint32_t i = 0; i < fill.n && fill.last_layer >= 0; ++i) { // rows of later layers were not computed
            ctx.hooks.validity.limit(ctx.get_memory(), fill.seq_id, fill.positions[i], fill.positions[i] + 1, MIXEDKV_UNVERIFIED);
        }
    } else {
        take_back(ctx, fill);
    }

    return res;
}
