// What every rule for hot rows has to keep, or rows are read that are not there. `held` says what a sequence holds in
// F16, `reads` what one layer reads of it; for the rule as it is these are one. Each promise is checked by trying it
// out.

#pragma once

#include "hot_set/hot_layout.h"
#include "hot_set/hot_ring.h"
#include "hot_set/hot_window.h"

#include "check.h"

#include <set>

namespace mixedkv {

// A query at q may read only what the sequence holds when q is its last token.
inline void reads_what_is_held(const hot_window & held, const hot_window & reads, int32_t n) {
    for (int32_t q = 0; q < n; q++) {
        for (int32_t p = 0; p <= q; p++) {
            CHECK(!reads.contains(p, reads.begin(q)) || held.contains(p, held.held_begin(q)));
        }
    }
}

// What has left is gone: its slot belongs to another token, and cold rows are not made F16 again.
inline void nothing_comes_back(const hot_window & reads, int32_t n) {
    for (int32_t q = 1; q < n; q++) {
        CHECK(reads.begin(q) >= reads.begin(q - 1));
        for (int32_t p = 0; p < q; p++) {
            CHECK(reads.contains(p, reads.begin(q - 1)) || !reads.contains(p, reads.begin(q)));
        }
    }
}

// The ring of one sequence has a slot for whatever is held at a time.
inline void slots_suffice(const hot_window & held, int32_t n) {
    const hot_layout layout = hot_layout::make(held, 1, uint32_t(n), UINT64_MAX);
    hot_ring         ring(layout.n_slots, uint32_t(n));
    for (int32_t q = 0; q < n; q++) {
        for (uint32_t slot = 0; slot < ring.n_slots(); slot++) {
            const int32_t p = ring.cell_of(slot);
            if (p >= 0 && !held.contains(p, held.held_begin(q))) {
                ring.release(slot);
            }
        }
        if (held.contains(q, held.held_begin(q))) {
            CHECK(ring.assign(uint32_t(q)) != hot_ring::none);
        }
    }
}

// `cut_is_exact` says of a sequence that was evaluated to n tokens and then cut at `at`: are the rows still there that
// the query at `at` reads? Tried out on a set of positions that lets go of rows as the sequence grows.
inline void cuts_tell_the_truth(const hot_window & held, const hot_window & reads, int32_t n) {
    std::set<int32_t> there;
    for (int32_t end = 1; end <= n; end++) {
        there.insert(end - 1);
        for (auto it = there.begin(); it != there.end();) {
            it = held.contains(*it, held.held_begin(end - 1)) ? std::next(it) : there.erase(it);
        }
        for (int32_t at = 1; at <= end; at++) {
            bool all = true;
            for (int32_t p = 0; p < at && all; p++) {
                all = !reads.contains(p, reads.begin(at)) || there.count(p) == 1;
            }
            CHECK(!held.cut_is_exact(end, at) || all);
        }
    }
}

inline void keeps_the_contract(const hot_window & held, const hot_window & reads, int32_t n) {
    reads_what_is_held(held, reads, n);
    nothing_comes_back(reads, n);
    slots_suffice(held, n);
    cuts_tell_the_truth(held, reads, n);
}

} // namespace mixedkv
