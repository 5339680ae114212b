// The keys that are worked on together: blocks of a segment, what the queries of an item see of them, and what fetches
// the next one.

#pragma once

#include "row_types.h"

namespace mixedkv {
namespace {

constexpr int key_block = 64;
constexpr int most_keys = 128; // in a block of any body

enum mask_state : uint8_t { all_hidden, all_plain, mixed };

// Pages of the first segment that a query reads of a KV head, in order. The last one alone may be cut.
struct page_list {
    int     head;                                            // the KV head
    int64_t query;                                           // of the item
    int64_t key[key_block / attention_page];                 // the first of each
    float   inverse_probability[key_block / attention_page]; // log2 of how many such pages each stands for
    int     n_pages = 0;
    int     n       = 0; // keys

    int64_t at(int i) const { return key[i / attention_page] + i % attention_page; }
};

// The keys of a segment that are worked on together, and what the item's queries see of them.
struct key_span {
    const attention_segment * segment;
    int64_t                   first;  // key in the segment
    int64_t                   column; // key in the mask
    int                       n;
    const mask_state *        states; // [queries of the item]

    // The mask where its columns are not those of the keys: of pages, for the only query that sees them; of a list of
    // an order, for all queries of the stream.
    const uint16_t * mask     = nullptr;
    size_t           mask_row = 0; // bytes from query to query

    // of an order, whether a query of the stream may see the keys; nullptr: the mask alone tells
    const uint8_t * readers = nullptr;

    // Where pages are left out, those of the first segment that were put together here, and those that are read next;
    // nullptr: keys follow each other.
    const page_list * pages = nullptr;
    const page_list * ahead = nullptr;
    const float *     inverse_probability =
        nullptr; // what is added to the score of each key, in units of log2; nullptr: zeros

    // The columns of keys whose rows do not lie side by side, -1: no key. place_rows() puts them together.
    const int32_t * list = nullptr;

    // F16 rows that a query reads in a decode step and in a prompt: their products are summed up in one way
    bool is_hot = false;
};

// Where the i-th of keys that were put together lies in the first segment; 0 where there is none
inline int64_t key_at(const key_span & span, int i) {
    return span.pages ? span.pages->at(i) : span.list[i] > 0 ? span.list[i] : 0;
}

// What a query sees of the keys
inline const uint16_t * mask_of(const attention_item & w, const key_span & span, int64_t query) {
    return span.mask ? reinterpret_cast<const uint16_t *>(reinterpret_cast<const char *>(span.mask) +
                                                          (w.q0 + query) * span.mask_row)
                     : mask_row(*w.args, w.q0 + query) + span.column;
}

inline bool may_read(const attention_item & w, const key_span & span, int64_t query) {
    return !span.readers || span.readers[w.q0 + query];
}

inline mask_state state_of(const uint16_t * mask, int n) {
    uint16_t visible = 0, nonzero = 0;
    for (int i = 0; i < n; i++) {
        visible |= mask[i] ^ 0xfc00; // -inf
        nonzero |= mask[i] & 0x7fff;
    }
    return !visible ? all_hidden : !nonzero ? all_plain : mixed;
}

// What another layer of this step has found for the block, or will find there.
inline mask_state recall_state(const attention_item & w, int64_t block, const key_span & span, int64_t query) {
    const attention_seen & seen  = w.args->seen;
    uint32_t &             entry = seen.blocks[block * seen.row + w.q0 + query];
    const uint32_t         known = seen.step << 8 | uint32_t(span.n - 1) << 2;
    uint32_t               found = __atomic_load_n(&entry, __ATOMIC_RELAXED);
    if ((found & ~3u) != known) {
        found = known | state_of(mask_of(w, span, query), span.n);
        __atomic_store_n(&entry, found, __ATOMIC_RELAXED);
    }
    return mask_state(found & 3);
}

// Fills states[0, item.n_queries); false when no query sees any of the keys. `block` counts what is kept of the step,
// -1: nothing is.
inline bool scan_mask(const attention_item & w, int64_t block, const key_span & span, mask_state * states) {
    const bool has_mask = span.mask || w.args->mask;
    bool       any      = false;
    for (int64_t i = 0; i < w.n_queries; i++) {
        states[i] = !may_read(w, span, i) ? all_hidden
                    : !has_mask           ? all_plain
                    : block >= 0          ? recall_state(w, block, span, i)
                                          : state_of(mask_of(w, span, i), span.n);
        any |= states[i] != all_hidden;
    }
    return any;
}

// The keys up to the last one that some query sees: what an almost empty cache is asked for is a few rows of a block.
inline int count_visible(const attention_item & w, const key_span & span) {
    int n = span.n;
    for (; (span.mask || w.args->mask) && n > 1; n--) {
        for (int64_t i = 0; i < w.n_queries; i++) {
            if (mask_of(w, span, i)[n - 1] != 0xfc00) {
                return n;
            }
        }
    }
    return n;
}

// Does any of n rows from `row` on see any of the keys? Sequences in one batch see blocks of their own.
inline bool any_visible(const attention_item & w, const key_span & span, int row, int n) {
    const int     group = w.args->n_head / w.args->n_head_kv;
    const int64_t last  = (row + n - 1) / group;
    for (int64_t query = row / group; query <= last && query < w.n_queries; query++) {
        if (span.states[query] != all_hidden) {
            return true;
        }
    }
    return false;
}

// Fetches the next block's rows while this one is worked on, in order of addresses: each head of the item brings its
// share. (Following the slices of one head instead, the hardware's own prefetch into L2 loses the stream.) A core has
// 16 buffers for lines on their way, which is 15 GB/s when they are always in use, and too few for a burst: so the
// steps are spread over all the work on a block, not over its dequantising alone. Where pages are left out, what is
// fetched is the rows of a head that are read after the next block.
struct prefetcher {
    const char *           next  = nullptr;
    const char *           end   = nullptr;
    int64_t                share = 0;       // bytes of a key and head
    const page_list *      pages = nullptr; // that are fetched, of whichever head is next
    const attention_rows * rows;
    int                    key = 0; // of the pages

    prefetcher(const attention_item & w, const attention_rows & r, const key_span & span, int head, int step) :
        pages(span.ahead), rows(&r) {
        if (pages) {
            const attention_segment & s = w.args->segments[0];
            rows                        = &r == &span.segment->v ? &s.v : &s.k;
            share                       = int64_t(rows->row) / w.args->n_head_kv;
            return;
        }
        share = int64_t(r.row) / w.n_head;
        next  = key_row(r, span.first + step, 0) + (head - w.head0) * step * share;
        next += w.n_head == 1 ? w.head0 * int64_t(r.head) : 0;
        end = next + step * share;
    }
    // What is left, where the hardware does not see what comes next
    ~prefetcher() {
        if (pages) {
            step(pages->n);
        }
    }
    void step(int keys = 1) { // past the end of an array nothing happens
        if (pages) {
            for (int to = key + keys; key < to && key < pages->n; key++) {
                const char * p = key_row(*rows, pages->at(key), pages->head);
                for (const char * to = p + share; p < to; p += 64 - reinterpret_cast<uintptr_t>(p) % 64) { // by lines
                    __builtin_prefetch(p, 0, 2);
                }
            }
            return;
        }
        const char * to = next + keys * share;
        for (to = to < end ? to : end; next < to; next += 64) {
            __builtin_prefetch(next, 0, 2); // into L2: 8% faster than into L1 on Sapphire Rapids
        }
    }
};

// Where the rows of a column lie
struct placed_key {
    const attention_segment * segment;
    int64_t                   key;

    placed_key(const attention_args & a, int64_t column) : segment(a.segments), key(column) {
        for (; key >= segment->n; segment++) {
            key -= segment->n;
        }
    }
};

// A block of an order from one of its places on
inline key_span span_of(const attention_args & a, const attention_block & b, int place, int n,
                        const mask_state * states) {
    const attention_order & order = a.order;
    const placed_key        first(a, b.list < 0 ? b.key + place : b.key);
    key_span                span{ first.segment, first.key, b.key + place, n, states };
    span.is_hot = first.segment != a.segments;
    if (b.readers > 0) {
        span.readers = order.readers + (b.readers - 1) * order.reader_row;
    }
    if (b.list >= 0) {
        const int64_t at = int64_t(b.list) * key_block + place;
        span.list        = order.lists + at;
        span.mask        = order.mask + at;
        span.mask_row    = order.mask_row;
    }
    return span;
}

// Calls block(span) for each block of `step` keys of the item's split that some query sees. Rows of a list come where
// they lie: place_rows() puts them together.
template <class Block>
void for_each_block(const attention_item & w, int step, Block block) {
    static_assert(attention_block::places == key_block);
    const attention_order & order  = w.args->order;
    const bool              recall = w.decode && w.args->seen.blocks && step == key_block;
    const int64_t           most   = recall ? attention_seen_blocks(count_keys(*w.args)) : 0;
    const auto              kept   = [&](int64_t i) { return i < most ? i : -1; };
    mask_state              states[tile_rows];
    int64_t                 column = 0;
    for (int i = 0; i < w.args->n_segments; i++) {
        const attention_segment & s     = w.args->segments[i];
        const int64_t             begin = w.k0 > column ? w.k0 - column : 0;
        const int64_t             end   = w.k1 - column < s.n ? w.k1 - column : s.n;
        for (int64_t key = begin; key < end; key += step) {
            key_span span{ &s, key, column + key, int(end - key < step ? end - key : step), states };
            if (scan_mask(w, kept(span.column / key_block * attention_max_segments + i), span, states)) {
                span.n = count_visible(w, span);
                block(span);
            }
        }
        column += s.n;
    }
    const int64_t n_plain = order.n_plain > 0 ? attention_seen_blocks(order.n_plain) : 0;
    for (int64_t i = w.block0; i < w.block1; i++) {
        attention_block b = order.blocks[i];
        for (; step > key_block && i + 1 < w.block1 && b.n + key_block <= step; i++) { // what goes on is read on
            const attention_block & next = order.blocks[i + 1];
            const placed_key        last(*w.args, b.key + b.n - 1);
            if (b.n % key_block != 0 || b.list >= 0 || next.list >= 0 || next.key != b.key + b.n ||
                next.readers != b.readers || last.key + 1 == last.segment->n) {
                break;
            }
            b.n += next.n;
        }
        for (int place = 0; place < b.n; place += step) {
            key_span span = span_of(*w.args, b, place, b.n - place < step ? b.n - place : step, states);
            if (scan_mask(w, kept(n_plain + i), span, states)) {
                span.n = count_visible(w, span);
                block(span);
            }
        }
    }
}

// A span whose rows lie side by side, for one KV head: as they are, or copied to `copied` and the thread's panels, with
// zeros where there is no key.
inline key_span place_rows(const attention_item & w, int head, const key_span & span, attention_segment & copied) {
    if (!span.list) {
        return span;
    }
    key_span      res     = span;
    const int64_t bytes_k = bytes_of_row(span.segment->k, w.args->d_k);
    const int64_t bytes_v = bytes_of_row(span.segment->v, w.args->d_v);
    copied                = *span.segment;
    copied.n              = span.n;
    copied.k.data         = w.panels->rows_k;
    copied.v.data         = w.panels->rows_v;
    copied.k.row          = bytes_k;
    copied.v.row          = bytes_v;
    copied.k.head = copied.v.head = 0;
    res.segment                   = &copied;
    res.first                     = 0;
    for (int i = 0; i < span.n; i++) {
        char * k = w.panels->rows_k + i * bytes_k;
        char * v = w.panels->rows_v + i * bytes_v;
        if (span.list[i] < 0) {
            std::memset(k, 0, bytes_k);
            std::memset(v, 0, bytes_v);
            continue;
        }
        const placed_key from(*w.args, span.list[i]);
        std::memcpy(k, key_row(from.segment->k, from.key, head), bytes_k);
        std::memcpy(v, key_row(from.segment->v, from.key, head), bytes_v);
    }
    return res;
}

// What a row needs to turn dot products into weights. Scores are in units of log2.
struct row_rule {
    float            softcap; // in units of log2; 0: none
    float            slope;
    const uint16_t * mask;                          // of the block; nullptr: all plain
    const float *    inverse_probability = nullptr; // of the block, see key_span
};

// Scores of packed queries come out as log2(e) * scale * q.k, or q.k * scale / softcap when there is a soft-cap.
inline float query_factor(const attention_args & a) {
    return a.logit_softcap != 0.0f ? a.scale / a.logit_softcap : a.scale * log2e;
}

inline float slope_of(const attention_args & a, int head_kv, int row) { // in units of log2
    const int group = a.n_head / a.n_head_kv;
    return a.max_alibi_bias > 0.0f ? alibi_slope(a, head_kv * group + row % group) * log2e : log2e;
}

inline row_rule rule_of(const attention_item & w, const key_span & span, int head_kv, int row) {
    const attention_args & a     = *w.args;
    const int64_t          query = row / (a.n_head / a.n_head_kv);
    return { a.logit_softcap * log2e, slope_of(a, head_kv, row),
             span.states[query] != mixed ? nullptr : mask_of(w, span, query), span.inverse_probability };
}

// Which of the first n keys of a block have a weight in some row, a bit each
template <class L>
uint64_t used_keys(const float * s, int rows, int n) {
    uint64_t used = 0;
    for (int r = 0; r < rows; r++) {
        for (int j = 0; j < n; j += L::width) {
            used |= uint64_t(L::nonzero(L::load(s + r * key_block + j))) << j;
        }
    }
    return used;
}

// Which of the keys a query sees, a bit each
inline uint64_t visible_keys(const attention_item & w, const key_span & span, int64_t query) {
    if (span.states[query] == all_plain) {
        return ~uint64_t(0) >> (key_block - span.n);
    }
    uint64_t bits = 0;
    for (int i = 0; i < span.n && span.states[query] != all_hidden; i++) {
        bits |= uint64_t(mask_of(w, span, query)[i] != 0xfc00) << i;
    }
    return bits;
}

} // namespace
} // namespace mixedkv
