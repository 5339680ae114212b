#pragma once

// Tokens evaluated at positions that a sequence lacks, between others that it has.

#include "llama.h"

#include <string>
#include <vector>

struct llama_kv_fill {
    llama_seq_id        seq_id;
    const llama_token * tokens;
    const llama_pos *   positions; // ascending, none of them in the sequence
    uint32_t            n;
    bool                logits;     // of the last token
    int32_t             last_layer; // compute rows up to this layer only, -1: all
    float *             mass;       // [n_mass], by position: attention that the tokens pay to it is added; nullptr: is not asked for
    uint32_t            n_mass;
};

// empty, or why it cannot be done
std::string llama_kv_fill_problem(llama_context & ctx, const llama_kv_fill & fill);

// what llama_decode returns
int32_t llama_kv_fill_decode(llama_context & ctx, const llama_kv_fill & fill);
