#pragma once

// ggml has one callback for the nodes of a context's graphs. Whoever needs it is a listener of the context's chain, so that
// nobody takes it away from another: docs/decisions/010-a-failed-step-leaves-nothing.md.

#include "model/eval-listener.h"

#include "ggml-backend.h"

#include <vector>

struct llama_context;
struct llama_cparams;
struct llama_model;

class llama_eval_chain {
public:
    // llama_context's constructor: the callback that its caller gave is a listener like others, and so is the model's stream
    void begin(llama_context & ctx, const llama_model & model, llama_cparams & cparams);

    void add   (llama_eval_listener & listener);
    void remove(llama_eval_listener & listener);

    // llama_context::graph_compute: ggml calls it success when a graph was broken off
    ggml_status end_graph(ggml_status status);

private:
    using verdict = llama_eval_listener::verdict;

    // the caller's own; false says that the rest is not wanted
    class given_callback : public llama_eval_listener {
    public:
        bool    before(ggml_tensor * node) override;
        verdict after (ggml_tensor * node) override;

        ggml_backend_sched_eval_callback callback = nullptr;
        void *                           data     = nullptr;
    };

    void install();
    bool before(ggml_tensor * node);
    bool after (ggml_tensor * node);

    static bool on_node(ggml_tensor * node, bool ask, void * data);

    llama_context * ctx     = nullptr;
    llama_cparams * cparams = nullptr;

    given_callback                     given;
    std::vector<llama_eval_listener *> listeners;
    std::vector<llama_eval_listener *> waiting; // for the node at hand

    verdict ended = verdict::go_on; // of the graph at hand
};

// Listens as long as it is there.
class llama_eval_guest {
public:
    llama_eval_guest(llama_eval_chain & chain, llama_eval_listener & listener) : chain(chain), listener(listener) {
        chain.add(listener);
    }

    ~llama_eval_guest() {
        chain.remove(listener);
    }

    llama_eval_guest(const llama_eval_guest &) = delete;

private:
    llama_eval_chain &    chain;
    llama_eval_listener & listener;
};
