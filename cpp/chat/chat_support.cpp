// What llama.cpp's chat layer calls of the rest of its `common`, without that rest: a log that says nothing, for its
// messages repeat prompts and answers, and four functions on strings.

#include "common.h"
#include "log.h"

#include <climits>

int common_log_get_verbosity_thold(void) {
    return INT_MIN;
}

common_log * common_log_main() {
    return nullptr;
}

void common_log_add(common_log *, ggml_log_level, const char *, ...) {}

// Of templates that are read from a model and of delimiters that are tokenized: `chat_module.cpp` has neither.
std::string common_token_to_piece(const llama_vocab *, llama_token, bool) {
    throw std::logic_error("common_token_to_piece: not part of this build");
}

std::vector<llama_token> common_tokenize(const llama_vocab *, const std::string &, bool, bool) {
    throw std::logic_error("common_tokenize: not part of this build");
}

void string_replace_all(std::string & text, const std::string & search, const std::string & replace) {
    for (size_t at = 0; !search.empty() && (at = text.find(search, at)) != std::string::npos; at += replace.size()) {
        text.replace(at, search.size(), replace);
    }
}

std::string string_join(const std::vector<std::string> & values, const std::string & separator) {
    std::string joined;
    for (size_t i = 0; i < values.size(); i++) {
        joined += (i ? separator : "") + values[i];
    }
    return joined;
}

std::vector<std::string> string_split(const std::string & text, const std::string & delimiter) {
    std::vector<std::string> parts;
    size_t                   begin = 0;
    for (size_t end; (end = text.find(delimiter, begin)) != std::string::npos; begin = end + delimiter.size()) {
        parts.push_back(text.substr(begin, end - begin));
    }
    parts.push_back(text.substr(begin));
    return parts;
}

std::string string_repeat(const std::string & text, size_t n) {
    std::string repeated;
    repeated.reserve(text.size() * n);
    while (n--) {
        repeated += text;
    }
    return repeated;
}
