#include "hooks/context.h"

#include "llama-context.h"

#include <stdexcept>

std::unique_lock<std::recursive_mutex> llama_kv_mixed_enter(llama_context & ctx) {
    return std::unique_lock<std::recursive_mutex>(ctx.hooks.busy);
}

std::unique_lock<std::recursive_mutex> llama_kv_mixed_settle(llama_context & ctx) {
    auto inside = llama_kv_mixed_enter(ctx);

    ctx.memory_update(false);
    if (llama_kv_mixed_has_shift(ctx.get_memory())) {
        throw std::runtime_error("keys could not be turned to their new positions: out of memory");
    }

    return inside;
}

llama_kv_mixed_reading::llama_kv_mixed_reading(llama_context & ctx, llama_seq_id seq_id, llama_state_seq_flags flags) :
    ctx(ctx), seq_id(seq_id), flags(flags), inside(llama_kv_mixed_settle(ctx)) {}

llama_kv_mixed_reading::~llama_kv_mixed_reading() {
    ctx.hooks.validity.forget(seq_id, flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
}
