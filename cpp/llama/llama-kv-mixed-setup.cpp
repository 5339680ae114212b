#include "llama-kv-mixed-setup.h"

#include <optional>

static thread_local std::optional<mixedkv_config> config_next;   // set by mixedkv_configure_next
static thread_local std::optional<mixedkv_config> config_active; // of the context that is being made

static thread_local std::string last_error;

static thread_local bool fills = false;

void llama_kv_mixed_set_error(const std::string & message) {
    last_error = message;
}

const std::string & llama_kv_mixed_get_error() {
    return last_error;
}

void llama_kv_mixed_set_next(const mixedkv_config * config) {
    config_next = config ? std::make_optional(*config) : std::nullopt;
}

const mixedkv_config * llama_kv_mixed_take_next() {
    config_active = config_next;
    config_next.reset();

    return llama_kv_mixed_config();
}

const mixedkv_config * llama_kv_mixed_config() {
    return config_active ? &*config_active : nullptr;
}

void llama_kv_mixed_drop_config() {
    config_active.reset();
}

void llama_kv_mixed_set_fills(bool value) {
    fills = value;
}

bool llama_kv_mixed_fills() {
    return fills;
}
