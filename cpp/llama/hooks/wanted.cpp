#include "hooks/wanted.h"

#include "weights/weights.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <cstring>

void llama_wanted_logits::set(llama_eval_chain & chain, const uint32_t * bits, size_t n_words) {
    if (now) {
        chain.remove(*this);
        now = nullptr;
    }
    if (bits) {
        this->bits.assign(bits, bits + n_words);
        now = this->bits.data();
        chain.add(*this);
    }
}

// other backends know nothing of it, and compute all rows
bool llama_wanted_logits::before(ggml_tensor * node) {
    if (node->op == GGML_OP_MUL_MAT && std::strcmp(node->name, "result_output") == 0 &&
            size_t(node->ne[0]) <= bits.size() * WEIGHTS_ROWS && node->buffer && ggml_backend_buffer_is_host(node->buffer)) {
        const uint32_t * const * at = &now;
        std::memcpy(node->op_params + WEIGHTS_WANTED_PARAM, &at, sizeof(at));
    }
    return false;
}

llama_eval_listener::verdict llama_wanted_logits::after(ggml_tensor * /*node*/) {
    return verdict::go_on;
}
