// Where in the F16 ring of a stream the rows of which sequence lie.
//
// Sinks come first: every sequence has slots of its own for them. Behind them lie the recent windows. Where there is
// room for all, each sequence has one of its own; else they share pages of 8 to 64 rows.

#pragma once

#include "hot_set/hot_window.h"

#include <cstdint>

namespace mixedkv {

struct hot_layout {
    static constexpr uint32_t largest_page = 64; // keys that attention reads at a time: no page lies in two such blocks
    static constexpr uint32_t usual_page   = 16; // of the default budget
    static constexpr uint32_t smallest_page = 8;

    uint32_t n_slots = 0;
    uint32_t n_sinks = 0; // slots for sinks, where the windows begin
    uint32_t page    = 0; // rows of a page, 0: every sequence has a window of its own

    bool     is_shared() const { return page > 0; }
    uint32_t n_pages() const { return is_shared() ? (n_slots - n_sinks) / page : 0; }
    bool     is_in_page(uint32_t slot) const { return is_shared() && slot >= n_sinks; }
    uint32_t page_of(uint32_t slot) const { return (slot - n_sinks) / page; }
    uint32_t first_of(uint32_t i_page) const { return n_sinks + i_page * page; }

    // The slots that n_seq sequences share, `budget` at most: the sinks of all, and one whole window at least. A stream
    // of n_cells has no use for more than these. Without slots when the budget is less than `least`.
    static hot_layout make(const hot_window & capacity, uint32_t n_seq, uint32_t n_cells, uint64_t budget);

    // The least budget, and the one with which every sequence has a window of its own.
    static uint64_t least(const hot_window & capacity, uint32_t n_seq, uint32_t n_cells);
    static uint64_t all(const hot_window & capacity, uint32_t n_seq, uint32_t n_cells);

    // Of one token in all layers
    struct token_bytes {
        uint64_t cold;
        uint64_t f16;
    };

    // The default: windows for half of the sequences, in a fifth over the bytes of a cache for one sequence at most,
    // but the least in any case.
    static uint64_t automatic(const hot_window & capacity, uint32_t n_seq, uint32_t n_cells, const token_bytes & bytes);

    // Rows that are allocated: the slots, one row that nobody reads, padding.
    static uint32_t rows(uint32_t n_slots) { return n_slots == 0 ? 0 : (n_slots + 1 + 7) / 8 * 8; }
};

} // namespace mixedkv
