// Pages: attention_page keys of the first segment, of which decode may leave some out for a query and a KV head. Those
// that are read may stand for others like them, by the inverse of the probability that they had to be read.

#pragma once

#include "attention/key_span.h"
#include "attention/row_types.h"

namespace mixedkv {

// Of one stream; the choice for each query and KV head is made by one thread.
void choose_pages(const attention_args & args, const attention_kernels & kernels, block_panels * panels, int ith,
                  int nth);

// [n_draws + 64] numbers, at least 0 and below 1: a page is read whose probability is greater than its number.
constexpr int n_draws = 4096;
const float * page_draws();

namespace {

constexpr int pages_of_strip = attention_strip / attention_page;

// Of a page a byte says whether it is read: 0, or 1 more than eight times the binary logarithm of the number of pages
// that it stands for, where a power of two is cut into eight equal parts, as floats are.
using page_code = uint8_t;

constexpr page_code left_out  = 0;
constexpr page_code read_once = 1; // stands for itself alone

// The probability to be read, `least` at least, as the next greater one that there is a code for
inline page_code code_of(float probability) {
    constexpr float least = 1.0f / 256.0f;
    if (!(probability < 1.0f)) { // or NaN
        return read_once;
    }
    const float p = probability > least ? probability : least;
    uint32_t    bits;
    std::memcpy(&bits, &p, 4);
    return page_code(1 + (127 << 3) - ((bits + (1 << 20) - 1) >> 20));
}

inline float probability_of(page_code code) {
    const uint32_t bits = uint32_t((127 << 3) + 1 - code) << 20;
    float          p;
    std::memcpy(&p, &bits, 4);
    return p;
}

// log2 of what it stands for
inline float log2_of(page_code code) {
    constexpr float log2_of_eighths[8] = { 0.0f,        0.16992500f, 0.32192809f, 0.45943162f,
                                           0.58496250f, 0.70043972f, 0.80735492f, 0.90689060f };
    const int       eighths            = code - 1; // below 1
    const int       whole              = (eighths + 7) / 8;
    return float(whole) - log2_of_eighths[8 * whole - eighths];
}

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
    return a.pages.taken + query * a.pages.row + head_kv * (count_strips(a) * pages_of_strip + 1);
}

// Behind the codes of the pages: whether the query reads everything, and as without pages
inline uint8_t & reads_all(const attention_args & a, int64_t query, int head_kv) {
    return taken_pages(a, query, head_kv)[count_strips(a) * pages_of_strip];
}

// Goes over the pages that are read of an item, by KV head and query. Those that read everything are left out.
struct page_walk {
    const attention_item & w;
    const int64_t          n; // keys of the segment
    const int64_t          end;
    const page_code *      taken = nullptr;
    int                    head;
    int64_t                query = -1;
    int64_t                page;

    explicit page_walk(const attention_item & item) :
        w(item), n(item.args->segments[0].n), end(((w.k1 < n ? w.k1 : n) + attention_page - 1) / attention_page),
        head(item.head0), page(end) {}

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
        page  = w.k0 < w.k1 ? w.k0 / attention_page : end; // none in a split of keys that have an order
        return true;
    }

    void skip() {
        for (; page + 8 <= end; page += 8) {
            uint64_t eight;
            std::memcpy(&eight, taken + page, 8);
            if (eight) {
                page += __builtin_ctzll(eight) / 8;
                return;
            }
        }
        for (; page < end && !taken[page]; page++) {
        }
    }

    // The next pages, up to `most` keys; together: only such as follow each other. None: there are no more.
    void next(page_list & list, int most, bool together) {
        list.n_pages = list.n = 0;
        while (list.n < most) {
            skip();
            if (page >= end) {
                if (list.n > 0 || !next_query()) {
                    return;
                }
                continue;
            }
            const int64_t key = page * attention_page;
            if (together && list.n > 0 && key != list.key[0] + list.n) {
                return;
            }
            list.head                              = head;
            list.query                             = query;
            list.key[list.n_pages]                 = key;
            list.inverse_probability[list.n_pages] = log2_of(taken[page++]);
            list.n_pages++;
            list.n += int(n - key < attention_page ? n - key : attention_page);
        }
    }
};

inline bool is_contiguous(const page_list & list) {
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

// What is added to the scores of the keys of pages; false: nothing is
inline bool copy_inverse_probabilities(const page_list & list, float * inverse_probability) {
    bool any = false;
    for (int i = 0; i < list.n_pages; i++) {
        any |= list.inverse_probability[i] != 0.0f;
        for (int j = 0; j < attention_page; j++) {
            inverse_probability[i * attention_page + j] = list.inverse_probability[i];
        }
    }
    return any;
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
    const bool                together = s.k.type == row_type::other || s.v.type == row_type::other;
    page_walk                 walk(w);
    page_list                 lists[3]; // now, next, and what is fetched meanwhile
    mask_state                states[decode_rows] = {};
    uint16_t                  mask[key_block];
    float                     inverse_probability[key_block];
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
        key_span span = { &s, list.key[0], list.key[0], list.n, states };
        span.mask     = mask;
        span.pages    = &list;
        span.ahead    = &ahead;
        span.inverse_probability =
            copy_inverse_probabilities(list, inverse_probability) ? inverse_probability : nullptr;
        if (!is_contiguous(list)) {
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
            attention_segment copied;
            mask_state        states[decode_rows];
            key_span          part = place_rows(w, w.head0 + i, span, copied);
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
