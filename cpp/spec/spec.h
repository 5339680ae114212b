// A cache in its written form: "mixed:balanced,threshold=64", "q8_0/q4_0". The options of a cache, their defaults and
// what they may be stand in spec.cpp and nowhere else.

#pragma once

#include "mixedkv/mixedkv.h"

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace mixedkv {

// What a spec or a field should be; the message names it.
struct spec_error : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

// Option by option as text, by its name in Python: quantization_threshold "64".
using spec_fields = std::vector<std::pair<std::string, std::string>>;

struct cache_spec {
    bool        mixed = true; // false: a uniform cache, whose fields are type_k, type_v and attention
    spec_fields fields;       // all of them, in their normal form
};

// Of a spec in any case, with spaces.
cache_spec parse_spec(const std::string & text);

// Of fields by name; those left out have their defaults.
cache_spec make_spec(bool mixed, const spec_fields & given);

// The spec that reads back: what differs from the defaults. full: cold types, window and sinks as well.
std::string format_spec(const cache_spec & spec, bool full);

// Whether a field is a number in Python where it is digits.
bool is_number(const std::string & field);

// Drafts that a window has F16 rows for: the most that an engine verifies in a step.
constexpr uint32_t drafts_kept = 16;

struct layer_range {
    int32_t     first;
    int32_t     last; // -1: the model's
    std::string type_k, type_v;
};

// The layers of the field of this name, in order.
std::vector<layer_range> parse_layers(const std::string & text);

// Bytes of "2GiB", "500M", "10GB" or "4096"; a number without a unit counts `unit` bytes. GB and its like are powers of
// 1000, GiB and G of 1024.
uint64_t parse_size(const std::string & text, uint64_t unit);

// Types of a mixed cache's older rows, of a uniform cache, and presets, by name.
const std::vector<std::string> & cold_types();
const std::vector<std::string> & uniform_types();
const std::vector<std::string> & presets();

// What the library is given. `layers` is what config.layers points to.
mixedkv_spec to_native(const cache_spec & spec, std::vector<mixedkv_layer_types> & layers);

} // namespace mixedkv
