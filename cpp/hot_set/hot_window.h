// The hot-set rule: which positions of a sequence attention reads in F16.
//
// A rule on positions alone, so a result does not depend on how a prompt was cut into batches. Tokens are hot
// until `threshold` of them are, then the oldest `group_size` leave together; the first `sink_tokens` never leave
// (attention sinks, Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks").
//
// Rows are held a little longer than they are read: `n_draft` tokens may be taken back as if they had never come.

#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

namespace mixedkv {

struct hot_window {
    uint32_t threshold   = 0; // 0: no recent window
    uint32_t group_size  = 1;
    uint32_t sink_tokens = 0;
    uint32_t n_draft     = 0;

    // First position of the recent window of a query at position q. Monotone in q; more than q when nothing is hot.
    int32_t begin(int32_t q) const {
        const int64_t n = int64_t(q) + 1; // tokens the query sees, itself included
        if (threshold == 0) {
            return q < INT32_MAX ? q + 1 : q;
        }
        if (n <= threshold) {
            return 0;
        }
        return int32_t((n - threshold + group_size - 1) / group_size * group_size);
    }

    bool is_sink(int32_t p) const { return p < int32_t(sink_tokens); }

    // Is the key at position p hot for a query whose window begins at `begin`?
    bool contains(int32_t p, int32_t begin) const { return p >= begin || is_sink(p); }

    // First position of the recent rows that a sequence holds whose last token is at position q.
    int32_t held_begin(int32_t q) const {
        return threshold == 0 ? begin(q) : begin(int32_t(std::max(int64_t(q) - n_draft, int64_t(-1))));
    }

    // Can a sequence that was evaluated to n tokens, then cut or copied at `at`, go on as if it had never been longer?
    // That is: does it hold every F16 row that the query at `at` reads, if none has made room for another sequence's?
    bool cut_is_exact(int32_t n, int32_t at) const {
        const int32_t first = std::max(begin(at), int32_t(sink_tokens));
        return n == at || first >= at || held_begin(n - 1) <= first;
    }

    // Rows that one sequence can hold at a time: the sinks and, by turns, the recent ones.
    uint64_t rows() const { return uint64_t(sink_tokens) + recent_rows(); }
    uint64_t recent_rows() const { return threshold == 0 ? 0 : uint64_t(threshold) + n_draft; }

    // Empty, or the reason why the settings make no sense.
    std::string problem() const {
        if (group_size == 0) {
            return "group_size must be at least 1";
        }
        if (group_size > INT32_MAX || threshold > INT32_MAX || sink_tokens > INT32_MAX || n_draft > INT32_MAX) {
            return "quantization_threshold, group_size, sink_tokens and n_draft must be positions, at most 2147483647";
        }
        if (threshold != 0 && threshold < group_size) {
            return "quantization_threshold " + std::to_string(threshold) + " is smaller than group_size " +
                   std::to_string(group_size) +
                   ": raise the threshold, lower the group, or use threshold 0 for no window";
        }
        return "";
    }
};

} // namespace mixedkv
