#pragma once

// How a context computes rows: all that shapes a row besides its tokens and the rows before it. Two rows of the same tokens are
// the same, but for rounding, where their settings are. It is text, so that a block can carry it and a reader can see what
// differs: docs/decisions/100-a-row-says-how-it-was-computed.md.
//
// Called under the context's lock: by llama_step and the C API, which tell llama_kv_validity what rows are computed under, and by
// functions of llama_context that change adapters (vendor/patches/24-live-settings.patch).

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

struct llama_context;

class llama_kv_setting {
public:
    // The number of the setting that the next tokens are computed under. Texts are compared by their numbers; 0 is that of rows
    // of which nobody said how they were computed, and never the present one.
    uint32_t get(const llama_context & ctx, bool is_text = true);

    std::string get_text(uint32_t number) const;

    // of the number that was asked for last, for any thread; "": none was
    std::string get_latest() const;

    // the number of a text that came from outside; 0: none
    uint32_t find_or_add(const std::string & text);

    // What the caller knows the model by: rows of other models have other settings. Without it they do not differ by the model.
    void name_model(const std::string & name);

    // adapters or windows may be other ones
    void touch() { is_known = false; }

private:
    mutable std::mutex access; // to the texts, the model and the present number

    std::vector<std::string> texts = { "" }; // by number; without the model's name, where it is this one's

    std::string model;

    bool     is_known = false;
    bool     causal   = true; // of what is known
    bool     warmup   = false;
    uint32_t current  = 0;

    uint32_t    add(const std::string & text);
    std::string whole(uint32_t number) const;

    static std::string describe(const llama_context & ctx, bool causal);
    static std::string describe_adapters(const llama_context & ctx);
};
