#include "hooks/setup.h"
#include "hooks/windows.h"

#include "attention/thread_memory.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

struct owned_config {
    mixedkv_config                   config;
    std::vector<mixedkv_layer_types> layers;
};

// a copy of all that it points to
static owned_config own(const mixedkv_config & config) {
    return { config, { config.layers, config.layers + config.n_layers } };
}

struct thread_settings {
    std::optional<owned_config> next;   // set by mixedkv_configure_next
    std::optional<owned_config> active; // of the context that is being made
    std::string                 last_error;
};

static thread_settings & own_settings() {
    return mixedkv::thread_memory<thread_settings, struct own_settings_tag>();
}

static thread_local uint32_t n_sliding = 0; // set by mixedkv_limit_sliding, 0: no limit

void llama_kv_mixed_set_error(const std::string & message) {
    own_settings().last_error = message;
}

const std::string & llama_kv_mixed_get_error() {
    return own_settings().last_error;
}

void llama_kv_mixed_set_next(const mixedkv_config * config) {
    auto & next = own_settings().next;
    next.reset();
    if (config) {
        next = own(*config);
    }
}

const mixedkv_config * llama_kv_mixed_take_next() {
    auto & own = own_settings();
    own.active = std::exchange(own.next, std::nullopt);

    return llama_kv_mixed_config();
}

const mixedkv_config * llama_kv_mixed_config() {
    auto & active = own_settings().active;
    if (!active) {
        return nullptr;
    }
    active->config.layers = active->layers.data();

    return &active->config;
}

void llama_kv_mixed_drop_config() {
    own_settings().active.reset();
}

void llama_kv_mixed_limit_sliding(uint32_t n_windows) {
    n_sliding = n_windows;
}

uint32_t llama_kv_mixed_windows(uint32_t n_seq_max) {
    return n_sliding == 0 ? n_seq_max : std::min(n_sliding, n_seq_max);
}
