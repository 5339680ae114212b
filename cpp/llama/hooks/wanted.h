#pragma once

// The logits that are wanted of a context's evaluations: docs/decisions/093-the-head-where-it-is-needed.md. Of the output
// matrix only these rows are multiplied, in whole blocks, where cpp/weights makes the product.

#include "hooks/eval-chain.h"

#include <cstdint>
#include <vector>

class llama_wanted_logits : public llama_eval_listener {
public:
    // a bit for each token; nullptr: all
    void set(llama_eval_chain & chain, const uint32_t * bits, size_t n_words);

    bool    before(ggml_tensor * node) override;
    verdict after (ggml_tensor * node) override;

private:
    std::vector<uint32_t> bits;

    const uint32_t * now = nullptr; // what nodes have the address of, as long as their graphs are there
};
