#pragma once

// What vendor/patches adds to llama_context, and calls where one is at hand.

#include "hooks/eval-chain.h"
#include "hooks/finite.h"
#include "hooks/hooks.h"
#include "hooks/setting.h"
#include "hooks/step.h"
#include "hooks/validity.h"
#include "hooks/wanted.h"

#include <mutex>

// the first member of llama_context
struct llama_context_hooks {
    std::recursive_mutex busy; // held by the thread that evaluates, or reads or moves rows
    llama_step_room      room;
    llama_eval_chain     evals;    // who is told of the nodes of its graphs
    llama_kv_validity    validity; // what each row is
    llama_kv_setting     setting;  // how rows are computed now
    llama_wanted_logits  wanted;
    llama_finite_watch   finite;   // values that are no numbers
};

// llama_decode, llama_encode: no other thread evaluates or touches rows as long as what is returned is there
std::unique_lock<std::recursive_mutex> llama_kv_mixed_enter(llama_context & ctx);

// llama_context's state functions: so it is here, and pending shifts and copies are carried out, before rows are saved and
// before others replace them
std::unique_lock<std::recursive_mutex> llama_kv_mixed_settle(llama_context & ctx);

// the same where a state is read into a sequence, -1: into all; once that is done nothing is known of its rows
class llama_kv_mixed_reading {
public:
    llama_kv_mixed_reading(llama_context & ctx, llama_seq_id seq_id, llama_state_seq_flags flags);
    ~llama_kv_mixed_reading();

    llama_kv_mixed_reading(const llama_kv_mixed_reading &) = delete;

private:
    llama_context &       ctx;
    llama_seq_id          seq_id;
    llama_state_seq_flags flags;

    std::unique_lock<std::recursive_mutex> inside;
};
