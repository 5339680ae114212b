#pragma once

// A micro-batch whose graph fails or is aborted leaves upstream's memories as they were, see docs/decisions/010. The F16 ring
// of a mixed cache does the same for itself: llama_kv_cache_mixed_context.

#include "llama-graph.h"

#include <cstdint>
#include <memory>
#include <vector>

class llama_memory_recurrent;
struct llama_ubatch;

class llama_step {
public:
    // llama_context::decode, before the micro-batch is placed
    llama_step(llama_context & ctx, const llama_ubatch & ubatch);
    ~llama_step();

    // llama_context::process_ubatch. Where the graph has not ended well: puts recurrent states back, and takes the tokens out of
    // all their sequences but the first, which upstream does itself
    llm_graph_result * process(llm_graph_type gtype, llama_memory_context_i * mctx, ggml_status & status);

    // computes a graph that nothing stops half-way: no abort callback, no eval callback
    static ggml_status compute_whole(llama_context & ctx, ggml_cgraph * gf);

private:
    // which cell of a recurrent memory holds which sequence
    struct bookkeeping;

    llama_context &      ctx;
    const llama_ubatch & ubatch;

    llama_memory_recurrent * recr; // nullptr: there is none
    std::unique_ptr<bookkeeping>   before;

    // states that the graph may overwrite: a range of cells, empty where they were not kept
    uint32_t first = 0;
    uint32_t n     = 0;

    void undo();
    void keep_states();
    void put_states();
    void forget_states();
};

// Room for those states. A context has one for all its steps: memory that is new costs more than the copy.
using llama_step_room = std::vector<uint8_t>;
