#pragma once

// Who is told of the nodes of a context's graphs: see hooks/eval-chain.h.

struct ggml_tensor;

class llama_eval_listener {
public:
    virtual ~llama_eval_listener() = default;

    // in rising order: of several listeners the last one counts
    enum class verdict {
        go_on,
        stop, // the rest of the graph is not wanted
        fail, // the graph has failed, whatever was computed
    };

    // The node will be computed. True: once it has been, after() is to be called.
    virtual bool    before(ggml_tensor * node) = 0;
    virtual verdict after (ggml_tensor * node) = 0;
    virtual void    end_graph() {} // well or not, on the thread that the others were called on
};
