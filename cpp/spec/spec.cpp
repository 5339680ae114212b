#include "spec/spec.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <locale>
#include <map>
#include <sstream>

namespace mixedkv {
namespace {

using text = std::string;

// --- words ---

text join(const std::vector<text> & words, const text & between = ", ") {
    text res;
    for (const text & word : words) {
        res += (res.empty() ? "" : between) + word;
    }
    return res;
}

bool contains(const std::vector<text> & words, const text & word) {
    return std::find(words.begin(), words.end(), word) != words.end();
}

std::vector<text> split(const text & s, char at) {
    std::vector<text> res(1);
    for (const char c : s) {
        if (c == at) {
            res.emplace_back();
        } else {
            res.back() += c;
        }
    }
    return res;
}

// as words are compared: in lower case, without spaces. Messages show what was typed
text plain(const text & s) {
    text res;
    for (const char c : s) {
        if (c != ' ') {
            res += c >= 'A' && c <= 'Z' ? char(c - 'A' + 'a') : c;
        }
    }
    return res;
}

text quoted(const text & s) {
    return "'" + s + "'";
}

text did_you_mean(const text & word, const std::vector<text> & known) {
    double best = 0.6; // of the letters, in order
    text   res;
    for (const text & each : known) {
        std::vector<size_t> row(each.size() + 1); // longest common subsequence
        for (const char c : word) {
            for (size_t i = 1, diagonal = 0; i <= each.size(); ++i) {
                const size_t above = row[i];
                row[i]             = each[i - 1] == c ? diagonal + 1 : std::max(above, row[i - 1]);
                diagonal           = above;
            }
        }
        const double alike = 2.0 * double(row.back()) / double(word.size() + each.size());
        if (alike >= best && (res.empty() || alike > best)) {
            best = alike;
            res  = " (did you mean " + each + "?)";
        }
    }
    return res;
}

// --- numbers, whatever the locale ---

bool read_number(const text & s, double & out) {
    std::istringstream in(s);
    in.imbue(std::locale::classic());
    const bool has_digits = s.find_first_not_of("0123456789.e-") == text::npos && !s.empty();
    return has_digits && in >> out && in.peek() == std::istringstream::traits_type::eof();
}

text shortest(double value) {
    for (int digits = 1;; ++digits) {
        std::ostringstream out;
        out.imbue(std::locale::classic());
        out.precision(digits);
        out << value;
        double back = 0.0;
        if ((read_number(out.str(), back) && back == value) || digits == 17) {
            return out.str();
        }
    }
}

bool is_whole(const text & s, size_t most_digits) {
    return !s.empty() && s.size() <= most_digits && s.find_first_not_of("0123456789") == text::npos;
}

// --- what a value may be: each takes it as it was typed, and returns its normal form ---

text whole(const text & name, const text & typed, int64_t least) {
    const text    value = plain(typed);
    const int64_t n     = is_whole(value, 10) ? std::stoll(value) : -1;
    if (n < least || n > INT32_MAX) {
        throw spec_error(name + "=" + typed + " is not a whole number from " + std::to_string(least) + " to " +
                         std::to_string(INT32_MAX));
    }
    return std::to_string(n);
}

// of types that were cold types once, what replaces them
text replacement(const text & type) {
    static const std::map<text, text> replaced = {
        { "lm3", "tc3" }, { "iq4_nl", "lm4" }, { "q4_1", "q5_0" }, { "q5_1", "q5_0" }
    };
    const auto found = replaced.find(type);
    return found == replaced.end() ? "" : "; " + quoted(type) + " was taken out, use " + quoted(found->second);
}

text one_of(const text & name, const text & typed, const std::vector<text> & known) {
    const text value = plain(typed);
    if (!contains(known, value)) {
        throw spec_error(name + "=" + quoted(typed) + " is not one of " + join(known) + replacement(value));
    }
    return value;
}

// "3", "0-3" or "4-"
text layers_text(const layer_range & range) {
    const text first = std::to_string(range.first);
    return range.first == range.last ? first : first + "-" + (range.last < 0 ? "" : std::to_string(range.last));
}

layer_range parse_range(const text & typed) {
    const size_t colon = typed.find(':');
    const auto   ends  = split(plain(typed.substr(0, colon)), '-');
    const auto   types = split(colon == text::npos ? "" : typed.substr(colon + 1), '/');
    const bool   open  = ends.size() == 2 && ends[1].empty();
    if (ends.size() > 2 || !is_whole(ends[0], 6) || !(open || is_whole(ends.back(), 6)) || types.size() > 2 ||
        types[0].empty() || types.back().empty()) {
        throw spec_error("layers: " + quoted(typed) +
                         " is not a range with types: use e.g. 0-3:q8_0/q4_0, 5:q8_0 or 6-:q4_0");
    }
    const layer_range res = { std::stoi(ends[0]), open ? -1 : std::stoi(ends.back()), plain(types[0]),
                              plain(types.back()) };
    if (!open && res.last < res.first) {
        throw spec_error("layers: " + quoted(typed) + " ends before it begins");
    }
    for (const text & type : types) {
        if (!contains(cold_types(), plain(type))) {
            throw spec_error("layers: " + quoted(type) + " in " + quoted(typed) + " is not one of " +
                             join(cold_types()) + replacement(plain(type)));
        }
    }
    return res;
}

text normal_layers(const text &, const text & value) {
    std::vector<text> items;
    for (const layer_range & range : parse_layers(value)) {
        const text types = range.type_k + (range.type_k == range.type_v ? "" : "/" + range.type_v);
        items.push_back(layers_text(range) + ":" + types);
    }
    return join(items, ",");
}

// bytes as they are typed
text budget_text(const text & value) {
    static const std::pair<uint64_t, text> units[] = { { 1 << 30, "GiB" }, { 1 << 20, "MiB" }, { 1 << 10, "KiB" } };
    for (const auto & [unit, name] : units) {
        if (value != "0" && is_whole(value, 19) && std::stoull(value) % unit == 0) {
            return std::to_string(std::stoull(value) / unit) + name;
        }
    }
    return value;
}

// bits of "4.5bit", 0 for what is no number of bits
double bits_of(const text & value) {
    const size_t unit = value.rfind("bit");
    double       bits = 0.0;
    const bool   ends = unit != text::npos && (value.substr(unit) == "bit" || value.substr(unit) == "bits");
    return ends && read_number(value.substr(0, unit), bits) ? bits : 0.0;
}

text normal_budget(const text & name, const text & typed) {
    const text value = plain(typed);
    if (value.find("bit") == text::npos) {
        try {
            return value.find_first_not_of('0') == text::npos ? "0" : std::to_string(parse_size(value, 1));
        } catch (const spec_error &) {
            throw spec_error(name + "=" + quoted(typed) + " is not a size: use e.g. 2GiB, or 4.5bit for an element");
        }
    }
    const double bits = bits_of(value);
    if (!(bits >= 1.0 && bits <= 16.0)) {
        throw spec_error(name + "=" + typed + ": use 1bit to 16bit, as 4.5bit");
    }
    return shortest(bits) + "bit";
}

constexpr double usual_delta = 0.05;

struct sparseness {
    double error = 0.0;
    double delta = usual_delta;
};

bool read_sparse(const text & value, sparseness & out) {
    const auto parts = split(value.rfind("eps:", 0) == 0 ? value.substr(4) : "", '/');
    return parts.size() <= 2 && read_number(parts[0], out.error) &&
           (parts.size() == 1 || read_number(parts[1], out.delta)) && out.error >= 1e-6 && out.error < 1.0 &&
           out.delta >= 1e-6 && out.delta <= 0.3; // E is then still a standard error
}

text normal_sparse(const text & name, const text & typed) {
    const text value = plain(typed);
    sparseness s;
    if (value.empty()) {
        return "";
    }
    if (!read_sparse(value, s)) {
        throw spec_error(name + "=" + typed +
                         ": use eps:E or eps:E/D, as eps:0.05, with E from 0.000001 to below 1 and D from 0.000001 to "
                         "0.3. The sum of a query's attention weights is wrong by more than a share E with a "
                         "probability of at most D, 0.05 if left out");
    }
    return "eps:" + shortest(s.error) + (s.delta == usual_delta ? "" : "/" + shortest(s.delta));
}

// The standard error of a normally distributed error that is beyond E with the probability D; 0 for none
double standard_error(const text & value) {
    sparseness s;
    if (!read_sparse(value, s)) {
        return 0.0;
    }
    double low = 0.0, high = 8.0; // of standard errors
    for (int i = 0; i < 60; ++i) {
        const double middle                                         = (low + high) / 2;
        (std::erfc(middle / std::sqrt(2.0)) > s.delta ? low : high) = middle;
    }
    return s.error / high;
}

const std::vector<text> & attentions(bool mixed) {
    static const std::vector<text> all = { "auto", "fused", "merged" }, uniform = { "auto", "fused" };
    return mixed ? all : uniform;
}

// --- the options: a new one is a row here, a member of mixedkv_config, a field of MixedKVConfig, and what it does ---

struct option {
    text key;   // of a spec
    text field; // of Python
    text usual; // the default
    bool is_number;
    bool is_full; // also where it is the default

    text (*normal)(const text & name, const text & value);
    void (*apply)(const text & value, mixedkv_spec & out); // nullptr: to_native() does it
};

ggml_type type_of(const text & name) {
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        if (ggml_type_name(ggml_type(i)) && name == ggml_type_name(ggml_type(i))) {
            return ggml_type(i);
        }
    }
    throw spec_error(quoted(name) + " is no type");
}

template <int least>
text at_least(const text & name, const text & value) {
    return whole(name, value, least);
}

template <const std::vector<text> & (*known)()>
text type_in(const text & name, const text & value) {
    return one_of(name, value, known());
}

template <bool mixed>
text normal_attention(const text & name, const text & value) {
    return one_of(name, value, attentions(mixed));
}

void apply_attention(const text & value, mixedkv_spec & out) {
    const auto & known   = attentions(true);
    out.config.attention = mixedkv_attention(std::find(known.begin(), known.end(), value) - known.begin());
}

template <uint32_t mixedkv_config::* member>
void apply_number(const text & value, mixedkv_spec & out) {
    out.config.*member = uint32_t(std::stoul(value));
}

template <ggml_type mixedkv_spec::* member>
void apply_type(const text & value, mixedkv_spec & out) {
    out.*member = type_of(value);
}

void apply_budget(const text & value, mixedkv_spec & out) {
    out.budget_bits  = bits_of(value);
    out.budget_bytes = out.budget_bits > 0.0 ? 0 : std::stoull(value);
}

void apply_sparse(const text & value, mixedkv_spec & out) {
    out.config.sparse_error = float(standard_error(value));
}

const std::vector<option> & options(bool mixed) {
    static const std::vector<option> all = {
        { "cold_k", "cold_type_k", "q4_0", false, true, type_in<cold_types>, apply_type<&mixedkv_spec::type_k> },
        { "cold_v", "cold_type_v", "q4_0", false, true, type_in<cold_types>, apply_type<&mixedkv_spec::type_v> },
        { "threshold", "quantization_threshold", "64", true, true, at_least<0>,
          apply_number<&mixedkv_config::threshold> },
        { "group", "group_size", "16", true, true, at_least<1>, apply_number<&mixedkv_config::group_size> },
        { "sinks", "sink_tokens", "4", true, true, at_least<0>, apply_number<&mixedkv_config::sink_tokens> },
        { "attention", "attention", "auto", false, false, normal_attention<true>, apply_attention },
        { "layers", "layers", "", false, false, normal_layers, nullptr },
        { "budget", "budget", "0", true, false, normal_budget, apply_budget },
        { "sparse", "sparse", "", false, false, normal_sparse, apply_sparse },
    };
    static const std::vector<option> uniform = {
        { "type_k", "type_k", "f16", false, false, type_in<uniform_types>, apply_type<&mixedkv_spec::type_k> },
        { "type_v", "type_v", "f16", false, false, type_in<uniform_types>, apply_type<&mixedkv_spec::type_v> },
        { "attention", "attention", "auto", false, false, normal_attention<false>, apply_attention },
    };
    return mixed ? all : uniform;
}

// The option whose key, or whose field, is that; nullptr for none
const option * find_option(bool mixed, const text option::* member, const text & name) {
    const auto & all   = options(mixed);
    const auto   found = std::find_if(all.begin(), all.end(), [&](const option & o) { return o.*member == name; });
    return found == all.end() ? nullptr : &*found;
}

// Chosen from docs/benchmarks.md, with the reasons. Plain "mixed" is compact: the bits of q4_0.
const std::vector<std::pair<text, text>> preset_specs = {
    { "compact", "" },
    { "balanced", "cold_k=q8_0,threshold=128,group=32" },
    { "quality", "cold_k=q8_0,cold_v=q8_0,threshold=256,group=32" },
};

// Words of earlier versions, and what to do instead
const std::map<text, text> taken_out = {
    { "bits", "" }, // with its number
    { "draft", "leave it out, a window always has room for 16 rejected drafts" },
    { "equalize", "leave it out, K is always equalised" },
    { "hot_budget", "leave it out, F16 rows follow from the sequences of the context" },
    { "rounding", "leave it out, it follows from the cold types" },
    { "shrink", "leave it out, or set a smaller threshold" },
    { "v_skip", "leave it out, or use sparse=eps:0.05" },
};

// --- a cache by its options ---

using values = std::map<text, text>; // by key

// Names of options in messages: keys of a spec, "cold" for both types where it was given; or fields
struct namer {
    bool by_field;
    bool cold = false;

    text operator()(const text & key) const {
        if (cold && (key == "cold_k" || key == "cold_v")) {
            return "cold";
        }
        const option * own = by_field ? find_option(true, &option::key, key) : nullptr;
        return own ? own->field : key;
    }
};

void check_together(const values & v, const namer & name) {
    const int64_t threshold = std::stoll(v.at("threshold"));
    const int64_t group     = std::stoll(v.at("group"));
    if (threshold > 0 && threshold < group) {
        const text t = name("threshold") + "=", g = name("group") + "=";
        throw spec_error(t + v.at("threshold") + " is smaller than " + g + v.at("group") +
                         " (64 and 16 unless given): a window cannot let go of more than it holds. Use " + g +
                         v.at("threshold") + " or less, or " + t + v.at("group") + " or more (0: no recent window)");
    }
    if (!v.at("sparse").empty() && v.at("attention") == "merged") {
        throw spec_error(name("sparse") + "=" + v.at("sparse") +
                         " needs the fused attention: leave it or attention=merged out");
    }
    if (v.at("budget") != "0") {
        for (const text key : { "cold_k", "cold_v", "layers" }) {
            if (v.at(key) != find_option(true, &option::key, key)->usual) {
                throw spec_error(name("budget") + "=" + budget_text(v.at("budget")) +
                                 " chooses the cold types: leave " +
                                 (name.cold ? "cold" : name("cold_k") + ", " + name("cold_v")) + " and layers out");
            }
        }
    }
}

cache_spec make(bool mixed, const values & given, const namer & name) {
    cache_spec res;
    values     all;
    res.mixed = mixed;
    for (const option & each : options(mixed)) {
        const auto found = given.find(each.key);
        all[each.key]    = found == given.end() ? each.usual : each.normal(name(each.key), found->second);
        res.fields.emplace_back(each.field, all[each.key]);
    }
    if (mixed) {
        check_together(all, name);
    }
    return res;
}

std::vector<text> keys_of_mixed() {
    std::vector<text> keys = { "cold" };
    for (const option & each : options(true)) {
        keys.push_back(each.key);
    }
    return keys;
}

// key=value, key=value: layers have commas of their own
std::vector<std::pair<text, text>> parse_items(const text & s) {
    std::vector<std::pair<text, text>> res;
    for (const text & item : split(s, ',')) {
        const size_t equals = item.find('=');
        if (equals == text::npos && item.find(':') != text::npos && !res.empty() && res.back().first == "layers") {
            res.back().second += "," + item;
            continue;
        }
        if (equals == text::npos || equals == 0 || equals + 1 == item.size()) {
            throw spec_error(quoted(item) + " is not key=value; known keys: " + join(keys_of_mixed()));
        }
        res.emplace_back(plain(item.substr(0, equals)), item.substr(equals + 1));
    }
    return res;
}

// Adds them to those of a preset
void read_options(const text & s, values & out, namer & name) {
    std::vector<text> seen;
    const auto        has = [&](const text & key) { return contains(seen, key); };
    for (const auto & [key, value] : parse_items(s)) {
        if (taken_out.count(key)) {
            throw spec_error(key +
                             " was taken out: " + (key == "bits" ? "use budget=" + value + "bit" : taken_out.at(key)));
        }
        if (!contains(keys_of_mixed(), key)) {
            throw spec_error("unknown key " + quoted(key) + did_you_mean(key, keys_of_mixed()) +
                             "; known keys: " + join(keys_of_mixed()));
        }
        if (has(key) || (has("cold") && (key == "cold_k" || key == "cold_v"))) {
            throw spec_error("gives " + key + " twice");
        }
        if (key == "cold" && (has("cold_k") || has("cold_v"))) {
            throw spec_error("cold stands for both cold_k and cold_v, which is given too");
        }
        seen.push_back(key);
        if (key == "cold") {
            name.cold     = true;
            out["cold_k"] = out["cold_v"] = value;
        } else {
            out[key] = value;
        }
    }
}

cache_spec parse_mixed(const text & rest) {
    values       given;
    namer        name{ false };
    const size_t comma = rest.find(',');
    const text   first = rest.substr(0, comma), word = plain(first);
    if (contains(presets(), word)) {
        for (const auto & [preset, spec] : preset_specs) {
            if (preset == word && !spec.empty()) {
                read_options(spec, given, name);
            }
        }
        if (comma != text::npos) {
            read_options(rest.substr(comma + 1), given, name);
        }
    } else if (first.find('=') == text::npos) {
        throw spec_error(quoted(first) + " is neither a preset (" + join(presets()) + ") nor key=value" +
                         did_you_mean(word, presets()));
    } else {
        read_options(rest, given, name);
    }
    return make(true, given, name);
}

cache_spec parse_uniform(const text & typed, const std::vector<std::pair<text, text>> & items) {
    const text        name  = plain(typed);
    const auto        types = split(name, '/');
    values            given = { { "type_k", types[0] }, { "type_v", types.back() } };
    std::vector<text> known = { "mixed" };
    known.insert(known.end(), uniform_types().begin(), uniform_types().end());
    if (types.size() > 2 || !contains(uniform_types(), types[0]) || !contains(uniform_types(), types.back())) {
        const text gone   = replacement(types[0]);
        const bool joined = name.rfind("mixed", 0) == 0 && name.find('=') != text::npos; // without its colon
        throw spec_error(
            quoted(typed) + " names no cache" +
            (joined ? " (did you mean mixed:" +
                          name.substr(std::min(name.size(), name.find_first_of("abcdefghijklmnopqrstuvwxyz", 5))) + "?)"
                    : did_you_mean(name, known)) +
            ": use one of " + join(known) + (gone.empty() ? replacement(types.back()) : gone));
    }
    for (const auto & [key, value] : items) {
        if (key != "attention") {
            throw spec_error("a uniform cache takes attention only, not " + key);
        }
        given[key] = value;
    }
    return make(false, given, { false });
}

} // namespace

const std::vector<text> & cold_types() {
    static const std::vector<text> types = { "q8_0", "q5_0", "q4_0", "lm4", "tc3" };
    return types;
}

const std::vector<text> & uniform_types() {
    static const std::vector<text> types = { "f16", "bf16", "f32",  "q8_0", "q5_0",  "q4_0",
                                             "lm4", "tc3",  "q5_1", "q4_1", "iq4_nl" };
    return types;
}

const std::vector<text> & presets() {
    static const std::vector<text> names = [] {
        std::vector<text> res;
        for (const auto & [name, _] : preset_specs) {
            res.push_back(name);
        }
        return res;
    }();
    return names;
}

bool is_number(const text & field) {
    const option * own = find_option(true, &option::field, field);
    return own && own->is_number;
}

cache_spec parse_spec(const text & spec) {
    const size_t colon = spec.find(':');
    const text   name  = spec.substr(0, colon);
    const text   rest  = colon == text::npos ? "" : spec.substr(colon + 1);
    if (plain(name) != "mixed") {
        return parse_uniform(name, colon == text::npos ? spec_fields() : parse_items(rest));
    }
    return colon == text::npos ? make(true, {}, { false }) : parse_mixed(rest);
}

cache_spec make_spec(bool mixed, const spec_fields & given) {
    values by_key;
    for (const auto & [field, value] : given) {
        const option * own = find_option(mixed, &option::field, field);
        if (!own) {
            throw spec_error(field + " is no field of a cache");
        }
        by_key[own->key] = value;
    }
    return make(mixed, by_key, { true });
}

text format_spec(const cache_spec & spec, bool full) {
    const auto & all  = options(spec.mixed);
    const text & k    = spec.fields[0].second;
    const text & v    = spec.fields[1].second;
    text         name = spec.mixed ? "mixed" : k == v ? k : k + "/" + v;
    const auto   add  = [&](const text & key, const text & value) {
        name += (name.find(':') == text::npos ? ":" : ",") + key + "=" + value;
    };
    const bool both = spec.mixed && !full && k == v;
    if (both && k != all[0].usual) {
        add("cold", k);
    }
    for (size_t i = both || !spec.mixed ? 2 : 0; i < all.size(); ++i) {
        const text & value = spec.fields[i].second;
        if (value != all[i].usual || (full && all[i].is_full)) {
            add(all[i].key, all[i].key == "budget" ? budget_text(value) : value);
        }
    }
    return name;
}

std::vector<layer_range> parse_layers(const text & value) {
    std::vector<layer_range> res;
    for (const text & item : value.empty() ? std::vector<text>() : split(value, ',')) {
        res.push_back(parse_range(item));
    }
    std::sort(res.begin(), res.end(), [](const auto & a, const auto & b) { return a.first < b.first; });
    for (size_t i = 1; i < res.size(); ++i) {
        if (res[i - 1].last < 0 || res[i].first <= res[i - 1].last) {
            throw spec_error("layers " + layers_text(res[i - 1]) + " and " + layers_text(res[i]) +
                             " overlap: name each layer once");
        }
    }
    return res;
}

uint64_t parse_size(const text & spec, uint64_t unit) {
    const size_t                        digits = std::min(spec.find_first_not_of("0123456789."), spec.size());
    const text                          rest   = plain(spec.substr(digits));
    static const std::map<text, double> units  = {
        { "b", 1.0 },     { "k", 0x1p10 },   { "ki", 0x1p10 }, { "kib", 0x1p10 }, { "kb", 1e3 },    { "m", 0x1p20 },
        { "mi", 0x1p20 }, { "mib", 0x1p20 }, { "mb", 1e6 },    { "g", 0x1p30 },   { "gi", 0x1p30 }, { "gib", 0x1p30 },
        { "gb", 1e9 },    { "t", 0x1p40 },   { "ti", 0x1p40 }, { "tib", 0x1p40 }, { "tb", 1e12 },
    };
    const auto found = units.find(rest);
    double     value = 0.0;
    const bool known = read_number(spec.substr(0, digits), value) && (rest.empty() || found != units.end());
    if (known) {
        value *= rest.empty() ? double(unit) : found->second;
    }
    if (!known || !(value < 0x1p60)) {
        throw spec_error(quoted(spec) + " is not a size: use e.g. 2GiB or 500MiB");
    }
    return uint64_t(value);
}

// For tests: F16 rows that all sequences share, or "all"
static uint32_t hot_budget() {
    const char * rows = std::getenv("MIXEDKV_HOT_BUDGET");
    if (!rows || !*rows) {
        return MIXEDKV_HOT_BUDGET_AUTO;
    }
    return text(rows) == "all" ? MIXEDKV_HOT_BUDGET_ALL : uint32_t(std::stoul(whole("MIXEDKV_HOT_BUDGET", rows, 1)));
}

mixedkv_spec to_native(const cache_spec & spec, std::vector<mixedkv_layer_types> & layers) {
    mixedkv_spec res      = {};
    res.config.mixed      = spec.mixed;
    res.config.n_draft    = spec.mixed ? drafts_kept : 0;
    res.config.hot_budget = spec.mixed ? hot_budget() : MIXEDKV_HOT_BUDGET_AUTO;
    const auto & all      = options(spec.mixed);
    for (size_t i = 0; i < all.size(); ++i) {
        if (all[i].apply) {
            all[i].apply(spec.fields[i].second, res);
            continue;
        }
        layers.clear();
        for (const layer_range & range : parse_layers(spec.fields[i].second)) {
            layers.push_back({ range.first, range.last, type_of(range.type_k), type_of(range.type_v) });
        }
        res.config.layers   = layers.data();
        res.config.n_layers = uint32_t(layers.size());
    }
    return res;
}

} // namespace mixedkv
