// Pages: attention_page keys of the first segment, of which decode may leave some out for a query and a KV head.

#pragma once

#include "key_span.h"
#include "row_types.h"

namespace mixedkv {

// Of one stream; the choice for each query and KV head is made by one thread.
void choose_pages(const attention_args & args, const attention_kernels & kernels, block_panels * panels, int ith,
                  int nth);

namespace {

constexpr int     pages_of_strip = attention_strip / attention_page;
constexpr uint8_t all_pages      = (1 << pages_of_strip) - 1;

inline int64_t count_strips(const attention_args & a) {
    return (a.segments[0].n + attention_strip - 1) / attention_strip;
}

struct seen_strip {
    int32_t    index;
    mask_state state; // not all_hidden
};

// Behind the memory of a query's item, what the choice of its pages needs: a list of strips, and weights of pages
inline size_t choice_bytes(int64_t n_strips, int rows) {
    return size_t(n_strips + 16) * (sizeof(seen_strip) + rows * pages_of_strip * sizeof(float));
}

inline uint8_t * taken_pages(const attention_args & a, int64_t query, int head_kv) {
    return a.pages.taken + query * a.pages.row + head_kv * (count_strips(a) + 1);
}

// Behind those of the strips: whether the query reads everything, and as without pages
inline uint8_t & reads_all(const attention_args & a, int64_t query, int head_kv) {
    return taken_pages(a, query, head_kv)[count_strips(a)];
}

// Goes over the pages that are read of an item, by KV head and query. Those that read everything are left out.
struct page_walk {
    const attention_item & w;
    const int64_t          n; // keys of the segment
    const int64_t          end;
    const uint8_t *        taken = nullptr;
    int                    head;
    int64_t                query = -1;
    int64_t                strip;
    uint32_t               left = 0; // of the strip before

    explicit page_walk(const attention_item & item) :
        w(item), n(item.args->segments[0].n), end(((w.k1 < n ? w.k1 : n) + attention_strip - 1) / attention_strip),
        head(item.head0), strip(end) {}

    // Goes on to a query that has pages
    bool next_query() {
        do {
            if (++query == w.n_queries) {
                query = 0;
                head++;
            }
            if (head == w.head0 + w.n_head) {
                query--;
                return false;
            }
        } while (reads_all(*w.args, w.q0 + query, head));
        taken = taken_pages(*w.args, w.q0 + query, head);
        strip = w.k0 / attention_strip;
        return true;
    }

    void skip() {
        for (uint64_t eight = 0; strip + 8 <= end && !eight; strip += eight ? 0 : 8) {
            std::memcpy(&eight, taken + strip, 8);
        }
        for (; strip < end && !taken[strip]; strip++) {
        }
    }

    // The next pages, up to `most` keys; together: only such as follow each other. None: there are no more.
    void next(page_list & list, int most, bool together) {
        list.n_pages = list.n = 0;
        while (list.n < most) {
            if (!left) {
                if (strip < end) {
                    skip();
                }
                if (strip >= end) {
                    if (list.n > 0 || !next_query()) {
                        return;
                    }
                    continue;
                }
                left = taken[strip++];
            }
            const int64_t key = (strip - 1) * attention_strip + __builtin_ctz(left) * attention_page;
            if (together && list.n > 0 && key != list.key[0] + list.n) {
                return;
            }
            left &= left - 1;
            if (key < n) { // the last strip may be cut anywhere
                list.head                = head;
                list.query               = query;
                list.key[list.n_pages++] = key;
                list.n += int(n - key < attention_page ? n - key : attention_page);
            }
        }
    }
};

inline bool follow_each_other(const page_list & list) {
    return list.key[list.n_pages - 1] - list.key[0] == (list.n_pages - 1) * attention_page;
}

// What a query sees of pages
inline mask_state copy_mask(const attention_args & a, int64_t query, const page_list & list, uint16_t * mask) {
    if (!a.mask) {
        return all_plain;
    }
    for (int i = 0; i < list.n; i += attention_page) {
        const uint16_t * from = mask_row(a, query) + list.key[i / attention_page];
        std::memcpy(mask + i, from, (list.n - i < attention_page ? list.n - i : attention_page) * sizeof(uint16_t));
    }
    return state_of(mask, list.n);
}

// Bytes of a head's row; 0: it is not known
inline int64_t bytes_of_row(const attention_rows & rows, int d) {
    int64_t bytes = rows.type == row_type::f16 ? 2 * d : 0;
    with_block_type(rows.type,
                    [&](auto type) { bytes = d / block_elements(type.value) * int64_t(block_bytes(type.value)); });
    return bytes;
}

// Rows of pages, one after the other
inline attention_rows copy_pages(const attention_rows & from, int head, int64_t bytes, const page_list & list,
                                 char * to) {
    attention_rows rows = from;
    rows.data           = to;
    rows.row            = bytes;
    rows.head           = 0;
    for (int i = 0; i < list.n; i++, to += bytes) {
        const char * p = key_row(from, list.at(i), head);
        int64_t      k = 0;
        for (; k + 32 <= bytes; k += 32) {
            std::memcpy(to + k, p + k, 32);
        }
        if (bytes >= 32) { // once more, up to the last
            std::memcpy(to + bytes - 32, p + bytes - 32, 32);
        } else {
            std::memcpy(to, p, bytes);
        }
    }
    return rows;
}

// Calls block(i, span) for the pages that queries read of the i-th KV head of the item, up to `step` keys of a query at
// a time. What it reads is put together in the same way whoever shares the batch.
template <class Block>
void for_each_page_block(const attention_item & w, int step, Block block) {
    const attention_segment & s        = w.args->segments[0];
    const int64_t             bytes_k  = bytes_of_row(s.k, w.args->d_k);
    const int64_t             bytes_v  = bytes_of_row(s.v, w.args->d_v);
    const bool                together = bytes_k == 0 || bytes_v == 0;
    page_walk                 walk(w);
    page_list                 lists[3]; // now, next, and what is fetched meanwhile
    mask_state                states[few_rows] = {};
    uint16_t                  mask[key_block];
    attention_segment         copied = s;
    static_assert(all_hidden == 0);
    walk.next(lists[0], step, together);
    walk.next(lists[1], step, together);
    for (int now = 0; lists[now].n > 0; now = (now + 1) % 3) {
        const page_list & list  = lists[now];
        page_list &       ahead = lists[(now + 2) % 3];
        walk.next(ahead, step, together);
        states[list.query] = copy_mask(*w.args, w.q0 + list.query, list, mask);
        if (states[list.query] == all_hidden) {
            continue;
        }
        key_span span = { &s, list.key[0], list.key[0], list.n, states, mask, &list, &ahead };
        if (!follow_each_other(list)) {
            copied.k     = copy_pages(s.k, list.head, bytes_k, list, w.panels->rows_k);
            copied.v     = copy_pages(s.v, list.head, bytes_v, list, w.panels->rows_v);
            span.segment = &copied;
            span.first   = 0;
        }
        block(list.head - w.head0, span);
        states[list.query] = all_hidden;
    }
}

// What the queries see of a span of the first segment that read everything of a KV head; false: none sees any of it
inline bool without_pages(const attention_item & w, int head, const key_span & span, mask_state * states) {
    bool any = false;
    for (int64_t i = 0; i < w.n_queries; i++) {
        states[i] = reads_all(*w.args, w.q0 + i, head) ? span.states[i] : all_hidden;
        any |= states[i] != all_hidden;
    }
    return any;
}

// Decode: calls prepare(span), and block(i, span) for the i-th KV head of the item, for all that is read of it in
// blocks of up to `step` keys.
template <class Prepare, class Block>
void for_each_block_read(const attention_item & w, int step, Prepare prepare, Block block) {
    const attention_args & a     = *w.args;
    attention_item         rest  = w;
    bool                   dense = !a.pages.taken; // some query and KV head reads everything
    if (a.pages.taken) {
        for (int64_t i = 0; i < w.n_queries * w.n_head; i++) {
            dense |= reads_all(a, w.q0 + i % w.n_queries, w.head0 + int(i / w.n_queries));
        }
        for_each_page_block(w, step, [&](int i, const key_span & span) {
            prepare(span);
            block(i, span);
        });
    }
    if (!dense && w.k0 < a.segments[0].n) {
        rest.k0 = a.segments[0].n < w.k1 ? a.segments[0].n : w.k1;
    }
    for_each_block(rest, step, [&](const key_span & span) {
        prepare(span);
        const bool leaves_out = a.pages.taken && span.segment == a.segments;
        for (int i = 0; i < w.n_head; i++) {
            mask_state states[few_rows];
            key_span   part = span;
            if (leaves_out) {
                part.states = states;
            }
            if (!leaves_out || without_pages(w, w.head0 + i, span, states)) {
                block(i, part);
            }
        }
    });
}

} // namespace
} // namespace mixedkv
