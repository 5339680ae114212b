#include "llama-kv-mixed-setup.h"

#include <optional>
#include <utility>
#include <vector>

struct owned_config {
    mixedkv_config                   config;
    std::vector<mixedkv_layer_types> layers;
    std::vector<mixedkv_value_basis> bases;

    std::vector<std::vector<float>> numbers; // of the bases
};

// a copy of all that it points to
static owned_config own(const mixedkv_config & config) {
    owned_config res = { config, { config.layers, config.layers + config.n_layers }, { config.bases, config.bases + config.n_bases }, {} };

    for (auto & basis : res.bases) {
        const size_t n = size_t(basis.n_head_kv)*basis.n_embd_head;
        res.numbers.emplace_back(basis.directions, basis.directions + n*basis.n_embd_head);
        res.numbers.emplace_back(basis.scales, basis.scales + n);
        basis.directions = res.numbers.end()[-2].data();
        basis.scales     = res.numbers.end()[-1].data();
    }

    return res;
}

static thread_local std::optional<owned_config> config_next;   // set by mixedkv_configure_next
static thread_local std::optional<owned_config> config_active; // of the context that is being made

static thread_local std::string last_error;

static thread_local bool fills = false;

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
    config_active->config.bases  = config_active->bases.data();

    return &config_active->config;
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
