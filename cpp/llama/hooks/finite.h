#pragma once

// Values that are no numbers, NaN or infinite, where a step's results come out: docs/decisions/112-not-a-number-is-an-error.md.
//
// A row of NaN spoils what is evaluated behind it, and where attention multiplies rows that are masked, all that is evaluated
// beside it or in its cells. So every token is looked at, also where no logits are asked for: see graph/query-sums.h.

#include "mixedkv/mixedkv.h"

#include "llama-batch.h"

#include <cstdint>
#include <map>
#include <vector>

struct llama_context;
class llm_graph_result;

struct ggml_tensor;

class llama_finite_watch {
public:
    // after the graph of a micro-batch has ended well. Rows of its sequences are unverified from the first such token on
    void end_step(llama_context & ctx, llm_graph_result & res, const llama_ubatch & ubatch);

    // the sequences with such tokens since the last call, and where they begin
    std::vector<mixedkv_not_finite> get() const;
    void                            forget() { found.clear(); }

    // graphs are broken off before their last layer
    bool off = false;

private:
    std::map<llama_seq_id, llama_pos> found;

    std::vector<float> room; // for results of a device

    const float * fetch(llama_context & ctx, const ggml_tensor * t);

    void note(const llama_ubatch & ubatch, uint32_t i);
};

// Zeroes what cells hold that no sequence has, in all layers and states.
void llama_kv_clear_unused(llama_context & ctx);
