#include "hooks/setting.h"

#include "cache/mixed.h"
#include "hooks/support.h"
#include "weights/weights.h"
#include "rows/access.h"
#include "rows/convert.h"

#include "llama-adapter.h"
#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>

// texts come from files too
static constexpr size_t MAX_TEXT  = 1 << 16;
static constexpr size_t MAX_TEXTS = 1 << 12;

//
// parts of the text
//

// of 128 bits, of numbers that nobody chooses to collide
class content_hash {
public:
    void add(const void * data, size_t size) {
        const auto * bytes = (const uint8_t *) data;
        for (size_t i = 0; i < size; i += sizeof(uint64_t)) {
            uint64_t word = 0;
            memcpy(&word, bytes + i, std::min(sizeof(word), size - i));
            mix(word);
        }
        mix(size);
    }

    void add(const std::string & text) { add(text.data(), text.size()); }

    void add(const ggml_tensor * t) {
        std::vector<uint8_t> data(ggml_nbytes(t));
        ggml_backend_tensor_get(t, data.data(), 0, data.size());
        add(t->ne, sizeof(t->ne));
        add(&t->type, sizeof(t->type));
        add(data.data(), data.size());
    }

    std::string text() const {
        char res[33];
        snprintf(res, sizeof(res), "%016llx%016llx", (unsigned long long) a, (unsigned long long) b);
        return res;
    }

private:
    uint64_t a = 0x243f6a8885a308d3;
    uint64_t b = 0x13198a2e03707344;

    void mix(uint64_t word) {
        a = (a ^ word)*0x9e3779b97f4a7c15;
        a = a ^ (a >> 29);
        b = (b ^ (word + (b << 7)))*0xd6e8feb86659fd93;
        b = b ^ (b >> 32);
    }
};

static std::string number(float value) {
    char res[32];
    snprintf(res, sizeof(res), "%.9g", value);
    return res;
}

// "q4_0" where all layers have the same, else "0-3:q8_0,4-29:q4_0"
static std::string by_layer(const std::map<int32_t, std::string> & values) {
    std::string res;
    for (auto it = values.begin(); it != values.end();) {
        auto last = it, next = it;
        while (++next != values.end() && next->second == it->second) {
            last = next;
        }
        if (it == values.begin() && next == values.end()) {
            return it->second;
        }
        res += (res.empty() ? "" : ",") + std::to_string(it->first) +
            (it == last ? "" : "-" + std::to_string(last->first)) + ":" + it->second;
        it = next;
    }
    return res;
}

static std::string pair_of(const std::string & k, const std::string & v) {
    return k == v ? k : k + "/" + v;
}

// of YaRN only what its formula reads: without its ramp the other numbers have no effect
static std::string describe_rope(const llama_context & ctx) {
    const auto & cparams = ctx.get_cparams();
    const auto & model   = ctx.get_model();

    std::string res = number(cparams.rope_freq_base) + "/" + number(cparams.rope_freq_scale) + "/" + number(cparams.yarn_attn_factor);
    if (cparams.yarn_ext_factor != 0.0f) {
        res += "/" + number(cparams.yarn_ext_factor) + "/" + number(cparams.yarn_beta_fast) + "/" + number(cparams.yarn_beta_slow) +
            "/" + std::to_string(cparams.n_ctx_orig_yarn);
    }

    // as llama_model::get_rope_factors chooses
    const bool has_long = std::any_of(model.layers.begin(), model.layers.end(), [](const auto & layer) { return layer.rope_long; });
    if (has_long) {
        res += cparams.n_ctx_seq > model.hparams.n_ctx_orig_yarn ? "/long" : "/short";
    }

    return res;
}

// "0" where no row is read in F16 besides, "64/16/4" otherwise
static std::string describe_window(const mixedkv::hot_window & window) {
    if (window.threshold == 0 && window.sink_tokens == 0) {
        return "0";
    }
    return std::to_string(window.threshold) + "/" + std::to_string(window.threshold > 0 ? window.group_size : 0) + "/" +
        std::to_string(window.sink_tokens);
}

struct layer_facts {
    std::map<int32_t, std::string> types;
    std::map<int32_t, std::string> rotations;
    std::map<int32_t, std::string> scales; // how those of quantised blocks are chosen
    std::map<int32_t, std::string> attention;
    std::map<int32_t, uint32_t>    equalization;
};

// the rule of llama_kv_node_store: ggml's, or where a window lies beside the rows that of least error
static bool has_least_error(const llama_kv_cache_mixed & kv, ggml_type type_k, ggml_type type_v) {
    const auto differs = [](ggml_type type) { return llama_kv_row_writer(type) != llama_kv_row_writer_of_least_error(type); };

    return kv.get_hot().has_rows() && (differs(type_k) || differs(type_v));
}

static void add_layers(layer_facts & facts, const llama_kv_cache & kv) {
    const auto * mixed = dynamic_cast<const llama_kv_cache_mixed *>(&kv);

    const auto rotation = pair_of(std::to_string(llama_kv_rows_rotation(kv, true)), std::to_string(llama_kv_rows_rotation(kv, false)));

    for (const auto & layer : kv_access::get_layers(kv)) {
        const int32_t   il     = layer.il;
        const ggml_type type_k = layer.k->type;
        const ggml_type type_v = layer.v ? layer.v->type : type_k; // MLA: keys only
        const bool      fused  = mixed && mixed->get_readers().is_fused(il);

        facts.types[il]        = pair_of(ggml_type_name(type_k), ggml_type_name(type_v));
        facts.rotations[il]    = layer.v ? rotation : std::to_string(llama_kv_rows_rotation(kv, true));
        facts.scales[il]       = fused && has_least_error(*mixed, type_k, type_v) ? "least-error" : "ggml";
        facts.attention[il]    = fused ? "fused" : mixed && mixed->get_readers().is_in_place(il) ? "in-place" :
                mixed && mixed->get_hot().has_rows() ? "merged" : "llama.cpp";
        facts.equalization[il] = mixed ? mixed->get_basis().get_scales_id(il) : 0;
    }
}

static std::string describe_equalization(const std::map<int32_t, uint32_t> & ids) {
    content_hash hash;
    bool         any = false;
    for (const auto & [il, id] : ids) {
        const uint32_t one[] = { uint32_t(il), id };
        hash.add(one, sizeof(one));
        any = any || id != 0;
    }
    return any ? " equalization=" + hash.text().substr(0, 16) : "";
}

static std::string describe_mixed(const llama_kv_cache_mixed & kv) {
    std::string res = " window=" + describe_window(kv.get_hot().get_slots().get_window());
    if (kv.get_config().sparse_error > 0.0f) {
        res += " sparse=" + number(kv.get_config().sparse_error);
    }
    if (kv.get_rounding() > 0) {
        res += " rounding=" + std::to_string(kv.get_rounding()); // forced, see mixed.cpp
    }
    return res;
}

static std::string describe_rows(const llama_context & ctx) {
    const auto caches = llama_kv_mixed_caches(ctx.get_memory());

    layer_facts facts;
    std::string own;

    for (const auto * kv : caches) {
        add_layers(facts, *kv);
        const auto * mixed = dynamic_cast<const llama_kv_cache_mixed *>(kv);
        if (mixed && mixed->is_mixed()) {
            own = describe_mixed(*mixed); // the caches of a context have one window
        }
    }
    if (facts.types.empty()) {
        return "";
    }

    return " types=" + by_layer(facts.types) + " rotation=" + by_layer(facts.rotations) + " scales=" + by_layer(facts.scales) +
        " attention=" + by_layer(facts.attention) + describe_equalization(facts.equalization) + own;
}

static std::string hash_of(const llama_adapter_lora & adapter) {
    std::map<std::string, llama_adapter_lora_weight> in_order(adapter.ab_map.begin(), adapter.ab_map.end());

    content_hash hash;
    hash.add(&adapter.alpha, sizeof(adapter.alpha));
    hash.add(adapter.alora_invocation_tokens.data(), adapter.alora_invocation_tokens.size()*sizeof(llama_token));
    for (const auto & [name, weight] : in_order) {
        hash.add(name);
        hash.add(weight.a);
        hash.add(weight.b);
    }

    return hash.text();
}

std::string llama_kv_setting::describe_adapters(const llama_context & ctx) {
    std::vector<std::string> adapters;
    for (const auto & [adapter, scale] : *ctx.loras) {
        adapters.push_back(hash_of(*adapter) + "*" + number(scale));
    }
    std::sort(adapters.begin(), adapters.end());

    std::string res;
    for (const auto & one : adapters) {
        res += (res.empty() ? " adapters=" : ",") + one;
    }

    content_hash control;
    bool         any = false;
    for (int32_t il = 0; il < int32_t(ctx.model.hparams.n_layer()); ++il) {
        if (const ggml_tensor * t = ctx.cvec->tensor_for(il)) {
            control.add(&il, sizeof(il));
            control.add(t);
            any = true;
        }
    }

    return any ? res + " control=" + control.text() : res;
}

std::string llama_kv_setting::describe(const llama_context & ctx, bool causal) {
    const auto & cparams = ctx.get_cparams();

    std::string res = "llama.cpp=" + std::string(MIXEDKV_LLAMA_COMMIT).substr(0, 12) + " flash=" + (cparams.flash_attn ? "on" : "off") +
        " rope=" + describe_rope(ctx) + describe_rows(ctx) + describe_adapters(ctx);

    if (*weights_choice()) {
        res += std::string(" products=") + weights_choice();
    }
    if (causal != ctx.get_model().hparams.causal_attn) {
        res += std::string(" causal=") + (causal ? "yes" : "no");
    }
    if (cparams.warmup) {
        res += " experts=all";
    }
    if (cparams.ctx_type != LLAMA_CONTEXT_TYPE_DEFAULT) {
        res += " graph=mtp";
    }

    return res;
}

//
// llama_kv_setting
//

uint32_t llama_kv_setting::add(const std::string & text) {
    const auto it = std::find(texts.begin(), texts.end(), text);
    if (it != texts.end()) {
        return it - texts.begin();
    }
    texts.push_back(text);
    return texts.size() - 1;
}

uint32_t llama_kv_setting::get(const llama_context & ctx, bool is_text) {
    const auto & cparams = ctx.get_cparams();
    // an image's tokens see each other where its model wants that, whatever text sees
    const bool now = is_text ? cparams.causal_attn : ctx.get_model().hparams.causal_attn;

    if (!is_known || causal != now || warmup != cparams.warmup) {
        const std::string text = describe(ctx, now);

        const std::lock_guard<std::mutex> lock(access);
        current  = add(text);
        causal   = now;
        warmup   = cparams.warmup;
        is_known = true;
    }

    return current;
}

// before what is kept of a text that does not begin with the model's name
static const std::string OTHER = "other:";

static bool begins_with(const std::string & text, const std::string & prefix) {
    return text.compare(0, prefix.size(), prefix) == 0;
}

std::string llama_kv_setting::whole(uint32_t number) const {
    const std::string & text = texts[number];
    if (begins_with(text, OTHER)) {
        return text.substr(OTHER.size());
    }
    return text.empty() || model.empty() ? text : model + " " + text;
}

std::string llama_kv_setting::get_text(uint32_t number) const {
    const std::lock_guard<std::mutex> lock(access);
    return whole(number);
}

std::string llama_kv_setting::get_latest() const {
    const std::lock_guard<std::mutex> lock(access);
    return whole(current);
}

uint32_t llama_kv_setting::find_or_add(const std::string & text) {
    if (text.empty() || text.size() > MAX_TEXT) {
        return 0;
    }
    const std::lock_guard<std::mutex> lock(access);
    const std::string prefix = model.empty() ? "" : model + " ";
    const std::string own    = begins_with(text, prefix) ? text.substr(prefix.size()) : OTHER + text;

    return texts.size() < MAX_TEXTS || std::find(texts.begin(), texts.end(), own) != texts.end() ? add(own) : 0;
}

void llama_kv_setting::name_model(const std::string & name) {
    const std::lock_guard<std::mutex> lock(access);
    model = name;
}
