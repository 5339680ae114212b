#include "hooks/setup.h"
#include "hooks/windows.h"

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

static thread_local std::optional<owned_config> config_next;   // set by mixedkv_configure_next
static thread_local std::optional<owned_config> config_active; // of the context that is being made

static thread_local std::string last_error;

static thread_local uint32_t n_sliding = 0; // set by mixedkv_limit_sliding, 0: no limit

void llama_kv_mixed_set_error(const std::string & message) {
    last_error = message;
}

const std::string & llama_kv_mixed_get_error() {
    return last_error;
}

void llama_kv_mixed_set_next(const mixedkv_config * config) {
    config_next.reset();
    if (config) {
        config_next = own(*config);
    }
}

const mixedkv_config * llama_kv_mixed_take_next() {
    config_active = std::exchange(config_next, std::nullopt);

    return llama_kv_mixed_config();
}

const mixedkv_config * llama_kv_mixed_config() {
    if (!config_active) {
        return nullptr;
    }
    config_active->config.layers = config_active->layers.data();

    return &config_active->config;
}

void llama_kv_mixed_drop_config() {
    config_active.reset();
}

void llama_kv_mixed_limit_sliding(uint32_t n_windows) {
    n_sliding = n_windows;
}

uint32_t llama_kv_mixed_windows(uint32_t n_seq_max) {
    return n_sliding == 0 ? n_seq_max : std::min(n_sliding, n_seq_max);
}
