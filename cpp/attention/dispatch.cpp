// The cut of a call into items, their distribution over threads, and the choice of the instruction set.

#include "least_error.h"
#include "sparse/pages.h"
#include "thread_memory.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

namespace mixedkv {
namespace {

constexpr int64_t tile_items     = 16; // while prefill has fewer, an item has fewer rows
constexpr int     max_counters   = 1024;
constexpr size_t  scratch_header = 64 + max_counters * sizeof(std::atomic<uint32_t>);

// Zero between calls, whatever the shape of the next one.
struct scratch_counters {
    alignas(64) std::atomic<uint32_t> ticket;
    alignas(64) std::atomic<uint32_t> chunks_done[max_counters];
};
static_assert(sizeof(scratch_counters) == scratch_header);

// A group is the set of items that differ in their keys alone and are merged into the same output.
struct stream_plan {
    bool    decode;
    int64_t q_block; // queries per group
    int64_t n_q_blocks;
    int     heads; // KV heads per group
    int64_t n_groups;
    int64_t n_splits;
    int64_t n_chunks; // items of a group
    size_t  item_bytes;

    stream_plan(const attention_args & a, int64_t n_queries, int64_t counters_left) {
        const int group = a.n_head / a.n_head_kv;
        decode          = n_queries * group <= decode_rows && counters_left > 0;
        q_block         = decode ? n_queries : tile_queries(a, n_queries);
        n_q_blocks      = n_queries == 0 ? 0 : (n_queries + q_block - 1) / q_block;
        heads           = decode ? a.n_head_kv : 1;
        n_groups        = n_q_blocks * (a.n_head_kv / heads);
        n_splits        = count_splits(a);
        n_chunks        = decode ? n_splits : 1;
        item_bytes      = heads * item_memory(a, decode, q_block, nullptr, 0).bytes;
    }

    // Few enough that threads have items to share, and enough that rows of K and V are worth dequantising.
    static int64_t tile_queries(const attention_args & a, int64_t n_queries) {
        const int group = a.n_head / a.n_head_kv;
        int       rows  = tile_rows;
        while (rows > 4 * decode_rows && n_queries * group * a.n_head_kv < tile_items * rows) {
            rows /= 2;
        }
        return std::min<int64_t>(n_queries, std::max(1, rows / group));
    }

    int64_t n_items() const { return n_groups * n_chunks; }
    int64_t n_counters() const { return n_chunks > 1 ? n_groups : 0; }
    size_t  bytes() const { return n_groups * n_chunks * item_bytes; }
};

// Walks over the streams; positions only move forward, as tickets do.
struct plan_cursor {
    const attention_args * streams;
    int                    stream  = 0;
    int64_t                item    = 0; // first item of the stream
    int64_t                counter = 0;
    size_t                 offset  = 0;
    stream_plan            plan;

    explicit plan_cursor(const attention_args * s) : streams(s), plan(s[0], s[0].n_queries, max_counters) {}

    void next() {
        item += plan.n_items();
        counter += plan.n_counters();
        offset += plan.bytes();
        stream++;
    }
    void load() { plan = stream_plan(streams[stream], streams[stream].n_queries, max_counters - counter); }

    attention_item make_item(int64_t group, int64_t chunk, char * data, block_panels * panels) const {
        const attention_args & a = streams[stream];
        attention_item         w;
        w.args      = &a;
        w.decode    = plan.decode;
        w.n_head    = plan.heads;
        w.head0     = int(group / plan.n_q_blocks) * plan.heads;
        w.q0        = group % plan.n_q_blocks * plan.q_block;
        w.n_queries = std::min(plan.q_block, a.n_queries - w.q0);
        w.split0    = chunk;
        w.split1    = plan.decode ? chunk + 1 : plan.n_splits;
        w.memory    = data + offset + (group * plan.n_chunks + chunk) * plan.item_bytes;
        w.panels    = panels;
        go_to_split(w, w.split0);
        return w;
    }
};

// Behind the last stream: items and bytes of all
plan_cursor walk(const attention_args * streams, int n_streams) {
    plan_cursor c(streams);
    while (true) {
        c.next();
        if (c.stream == n_streams) {
            return c;
        }
        c.load();
    }
}

// A query with NaN has no weights; a body may find none above minus infinity and answer with zeros, or round NaN to an
// integer. It must not go unnoticed.
void spread_nan(const attention_item & w) {
    const attention_args & a      = *w.args;
    const int              group  = a.n_head / a.n_head_kv;
    const int              head_0 = w.head0 * group;
    for (int64_t query = w.q0; query < w.q0 + w.n_queries; query++) {
        for (int head = head_0; head < head_0 + w.n_head * group; head++) {
            const float * x   = query_row(a, query, head);
            int           nan = 0;
            for (int i = 0; i < a.d_k; i++) {
                nan |= x[i] != x[i];
            }
            if (nan) {
                std::fill_n(output_row(a, query, head), a.d_v, NAN);
            }
        }
    }
}

block_panels * own_panels() {
    auto & panels = thread_memory<std::unique_ptr<block_panels>, struct own_panels_tag>();
    if (!panels) {
        panels.reset(new block_panels);
    }
    return panels.get();
}

struct isa_choice {
    const attention_kernels * kernels = nullptr;
    std::string               error;
};

isa_choice choose_isa() {
    const char * const name  = std::getenv("MIXEDKV_ISA");
    const bool         force = name && *name;
    isa_choice         choice;
    bool               found = false;
    std::string        available;
    for (const auto body : { MIXEDKV_BODIES }) { // CMakeLists.txt has them, the fastest first
        const attention_kernels * k = body();
        if (!k->supported()) {
            continue;
        }
        available += (available.empty() ? "" : ", ") + std::string(k->name);
        if (force ? std::string(name) == k->name && !found : !choice.kernels) {
            choice.kernels = k;
            found          = true;
        }
    }
    if (force && !found) {
        choice.kernels = attention_scalar();
        choice.error = "MIXEDKV_ISA=" + std::string(name) + " cannot be used on this machine; available: " + available +
                       "; unset it to use the fastest";
    }
    return choice;
}

const isa_choice & isa() {
    static const isa_choice choice = choose_isa();
    return choice;
}

} // namespace

float alibi_slope(const attention_args & a, int head) {
    if (a.max_alibi_bias <= 0.0f) {
        return 1.0f;
    }
    int n = 1; // the largest power of two not above n_head
    while (2 * n <= a.n_head) {
        n *= 2;
    }
    const double exponent = head < n ? a.max_alibi_bias * (head + 1) : a.max_alibi_bias / 2 * (2 * (head - n) + 1);
    return float(std::exp2(-exponent / n));
}

size_t attention_scratch_bytes(const attention_args * streams, int n_streams) {
    size_t bytes = scratch_header;
    for (int i = 0; i < n_streams; i++) {
        size_t most = 0;
        for (int64_t n = 1; n <= streams[i].n_queries; n++) {
            most = std::max(
                { most, stream_plan(streams[i], n, max_counters).bytes(), stream_plan(streams[i], n, 0).bytes() });
        }
        bytes += most;
    }
    return bytes;
}

size_t attention_run_bytes(const attention_args * streams, int n_streams) {
    return scratch_header + (n_streams > 0 ? walk(streams, n_streams).offset : 0);
}

bool attention_run(const attention_args * streams, int n_streams, void * scratch, int ith, int nth) {
    if (n_streams <= 0) {
        return ith == 0;
    }
    auto *                    counters = static_cast<scratch_counters *>(scratch);
    char *                    data     = static_cast<char *>(scratch) + scratch_header;
    const attention_kernels * kernels  = isa().kernels;
    const int64_t             n_items  = walk(streams, n_streams).item;
    block_panels *            panels   = own_panels();
    plan_cursor               cursor(streams);

    int64_t ticket;
    while ((ticket = counters->ticket.fetch_add(1, std::memory_order_acq_rel)) < n_items) {
        while (ticket >= cursor.item + cursor.plan.n_items()) {
            cursor.next();
            cursor.load();
        }
        const int64_t        n_chunks = cursor.plan.n_chunks;
        const int64_t        group    = (ticket - cursor.item) / n_chunks;
        // the last keys first: F16 rows take the longest, and should not be what the other threads wait for; the rest
        // in order, so that a thread finds its next rows prefetched
        const int64_t        chunk    = (ticket - cursor.item + n_chunks - 1) % n_chunks;
        const attention_item item     = cursor.make_item(group, chunk, data, panels);
        kernels->run(item);

        bool last = true;
        if (n_chunks > 1) {
            std::atomic<uint32_t> & done = counters->chunks_done[cursor.counter + group];
            last                         = done.fetch_add(1, std::memory_order_acq_rel) == n_chunks - 1;
            if (last) {
                done.store(0, std::memory_order_relaxed);
            }
        }
        if (last) {
            const attention_item first = cursor.make_item(group, 0, data, panels);
            kernels->merge(first, int(n_chunks), cursor.plan.item_bytes);
            spread_nan(first);
        }
    }
    // Every thread draws one ticket past the end, so this one is the last of the call.
    const bool last_thread = ticket == n_items + nth - 1;
    if (last_thread) {
        counters->ticket.store(0, std::memory_order_relaxed);
    }
    return last_thread;
}

void attention_sketch(const attention_rows & k, int64_t key, int n_head_kv, int d_k, uint8_t * bits, uint16_t * steps,
                      int64_t strips) {
    if (isa().kernels->sketch) {
        isa().kernels->sketch(k, key, n_head_kv, d_k, bits, steps, strips);
    }
}

void attention_choose_pages(const attention_args * streams, int n_streams, int ith, int nth) {
    for (int i = 0; i < n_streams; i++) {
        if (streams[i].pages.taken) {
            choose_pages(streams[i], *isa().kernels, own_panels(), ith, nth);
        }
    }
}

void rotate_row(float * x, int64_t n, int edge) {
    isa().kernels->rotate(x, n, edge);
}

void q4_0_from_float(const float * x, void * row, int64_t n) {
    isa().kernels->least_error()->q4_0(x, row, n);
}

void q5_0_from_float(const float * x, void * row, int64_t n) {
    isa().kernels->least_error()->q5_0(x, row, n);
}

bool attention_same_bits(row_type k, row_type v, int d_k, int d_v) {
    const auto suits = [](row_type type, int d) { return type != row_type::f16 && d % 32 == 0 && d <= 256; };
    return isa().kernels->same_bits && suits(k, d_k) && suits(v, d_v);
}

const char * attention_isa() {
    return isa().kernels->name;
}

const char * attention_isa_error() {
    return isa().error.empty() ? nullptr : isa().error.c_str();
}

} // namespace mixedkv
