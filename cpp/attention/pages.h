// Pages: attention_page keys of the first segment, of which decode may leave some out for a query and a KV head.

#pragma once

#include "key_span.h"

namespace mixedkv {

// Of one stream; the choice for each query and KV head is made by one thread.
void choose_pages(const attention_args & args, const attention_kernels & kernels, block_panels * panels, int ith,
                  int nth);

namespace {

inline int64_t count_pages(const attention_args & a) {
    return (a.segments[0].n + attention_page - 1) / attention_page;
}

inline uint8_t * taken_pages(const attention_args & a, int64_t query, int head_kv) {
    return a.pages.taken + query * a.pages.row + head_kv * count_pages(a);
}

// The queries of the item, by bits, that read a page of the span
inline uint32_t readers_of(const attention_item & w, int head_kv, const key_span & span, int64_t page) {
    uint32_t readers = 0;
    for (int64_t i = 0; i < w.n_queries; i++) {
        const bool taken = span.states[i] != all_hidden && taken_pages(*w.args, w.q0 + i, head_kv)[page];
        readers |= uint32_t(taken) << i;
    }
    return readers;
}

// The first page from `page` on that some query of the item reads; n_pages: none of them
inline int64_t next_page(const attention_item & w, int head_kv, int64_t page, int64_t n_pages) {
    int64_t first = n_pages;
    for (int64_t i = 0; i < w.n_queries && page < first; i++) {
        const uint8_t * taken = taken_pages(*w.args, w.q0 + i, head_kv);
        const void *    found = std::memchr(taken + page, 1, first - page);
        first                 = found ? static_cast<const uint8_t *>(found) - taken : first;
    }
    return first;
}

// Calls block(part) for what of a block is read of a KV head: all of it where no pages are left out, else pages that
// follow each other and that the same queries read. To the others their keys are hidden.
template <class Block>
void for_each_part(const attention_item & w, int head_kv, const key_span & span, Block block) {
    if (!w.args->pages.taken || span.segment != w.args->segments) {
        block(span);
        return;
    }
    mask_state    states[few_rows];
    uint32_t      readers[key_block / attention_page];
    const int     n_pages = (span.n + attention_page - 1) / attention_page;
    const int64_t last    = (w.k1 < span.segment->n ? w.k1 : span.segment->n) / attention_page; // whole ones
    for (int i = 0; i < n_pages; i++) {
        readers[i] = readers_of(w, head_kv, span, span.first / attention_page + i);
    }
    for (int i = 0, next; i < n_pages; i = next) {
        for (next = i + 1; next < n_pages && readers[next] == readers[i]; next++) {
        }
        if (!readers[i]) {
            continue;
        }
        for (int64_t q = 0; q < w.n_queries; q++) {
            states[q] = readers[i] >> q & 1 ? span.states[q] : all_hidden;
        }
        const int     first = i * attention_page;
        const int     end   = next * attention_page < span.n ? next * attention_page : span.n;
        const int64_t ahead = next_page(w, head_kv, span.first / attention_page + next, last);
        int           more  = 0;
        for (; more < n_pages && ahead + more < last &&
               next_page(w, head_kv, ahead + more, ahead + more + 1) == ahead + more;
             more++) {
        }
        block(key_span{ span.segment, span.first + first, span.column + first, end - first, states,
                        ahead * attention_page, more * attention_page });
    }
}

} // namespace
} // namespace mixedkv
