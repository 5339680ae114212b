#include "hooks/eval-chain.h"

#include "model/stream.h"

#include "llama-context.h"

#include <algorithm>

bool llama_eval_chain::given_callback::before(ggml_tensor * node) {
    return callback(node, true, data);
}

llama_eval_listener::verdict llama_eval_chain::given_callback::after(ggml_tensor * node) {
    return callback(node, false, data) ? verdict::go_on : verdict::stop;
}

void llama_eval_chain::begin(llama_context & ctx, const llama_model & model, llama_cparams & cparams) {
    this->ctx      = &ctx;
    this->cparams  = &cparams;
    given.callback = cparams.cb_eval;
    given.data     = cparams.cb_eval_user_data;

    if (llama_eval_listener * stream = llama_stream_listener(model)) {
        add(*stream);
    }
}

void llama_eval_chain::add(llama_eval_listener & listener) {
    listeners.push_back(&listener);
    install();
}

void llama_eval_chain::remove(llama_eval_listener & listener) {
    listeners.erase(std::remove(listeners.begin(), listeners.end(), &listener), listeners.end());
    install();
}

// both the graphs that are built from now on and the one that is used again look at it
void llama_eval_chain::install() {
    const bool alone = listeners.empty(); // then ggml calls the caller's own, as upstream has it

    cparams->cb_eval           = alone ? given.callback : on_node;
    cparams->cb_eval_user_data = alone ? given.data     : this;

    if (ctx->get_sched()) {
        ggml_backend_sched_set_eval_callback(ctx->get_sched(), cparams->cb_eval, cparams->cb_eval_user_data);
    }
}

bool llama_eval_chain::before(ggml_tensor * node) {
    // ggml breaks off one part of the graph at a time: of a later part one node is computed, and nobody is asked about it
    if (ended != verdict::go_on) {
        return true;
    }

    waiting.clear();
    if (given.callback && given.before(node)) {
        waiting.push_back(&given);
    }
    for (auto * listener : listeners) {
        if (listener->before(node)) {
            waiting.push_back(listener);
        }
    }

    return !waiting.empty();
}

bool llama_eval_chain::after(ggml_tensor * node) {
    for (auto * listener : waiting) {
        ended = std::max(ended, listener->after(node));
    }
    waiting.clear();

    return ended == verdict::go_on;
}

bool llama_eval_chain::on_node(ggml_tensor * node, bool ask, void * data) {
    auto & chain = *static_cast<llama_eval_chain *>(data);

    return ask ? chain.before(node) : chain.after(node);
}

ggml_status llama_eval_chain::end_graph(ggml_status status) {
    const bool failed = ended == verdict::fail;

    waiting.clear();
    ended = verdict::go_on;
    for (auto * listener : listeners) {
        listener->end_graph();
    }

    return status == GGML_STATUS_SUCCESS && failed ? GGML_STATUS_ABORTED : status;
}
