// What the instruction-set bodies share: the cut of a call into items, and the memory of one item.
// What is compiled here has internal linkage, and bodies use no std:: template: the linker keeps one copy of an inline
// function, and that could be the one compiled for an instruction set which this machine lacks.

#pragma once

#include "attention.h"

#include <cstring>

namespace mixedkv {

// K and V of a block of keys, dequantised: a thread's own, and not on its stack, for which musl gives it 128 KiB.
struct block_panels {
    static constexpr int floats = 64 * 256;

    alignas(64) float k[floats];
    alignas(64) float v[floats];

    // rows that were put together, of up to four bytes an element
    alignas(64) char rows_k[4 * floats];
    alignas(64) char rows_v[4 * floats];
};

// Work for one thread: some queries of one stream, against some keys, for some KV heads.
// Rows are the (query, head) pairs that share a KV head: row = query * group + head in group.
struct attention_item {
    const attention_args * args;
    bool                   decode; // at most decode_rows rows, all KV heads in one item
    int                    head0;
    int                    n_head; // KV heads
    int64_t                q0;
    int64_t                n_queries;
    int64_t                split0; // splits [split0, split1) of the keys: one in decode, all in prefill
    int64_t                split1;
    int64_t                k0; // of the split at hand: keys [k0, k1), counted over all segments that have no order
    int64_t                k1;
    int64_t                block0; // and blocks [block0, block1) of those that have
    int64_t                block1;
    void *                 memory; // n_head times item_memory
    block_panels *         panels;
};

constexpr int decode_rows = attention_decode_rows; // rows per KV head up to which K and V rows are used as they lie
constexpr int tile_rows   = 512; // rows per KV head and item in prefill: dequantising costs 1/8 of the products
constexpr int row_pad     = 16;
constexpr int max_blocks  = attention_max_head_size / 32;

constexpr int64_t round_up(int64_t n, int64_t m) {
    return (n + m - 1) / m * m;
}

// Keys are cut into splits whose bounds follow from the key's place alone: 16 of 256 keys, then 8 of 512, 8 of 1,024
// and so on, so that each time the keys double there are 8 more. A row's weights and values are summed up split by
// split, whoever works on them and however many rows at once: so it has the same bits when its query comes alone as in
// a batch.
constexpr int64_t split_begin(int64_t i) {
    return i < 16 ? 256 * i : (512 * (i % 8) + 4096) << (i / 8 - 2);
}

constexpr int64_t count_splits(int64_t n_keys) {
    int64_t n = 0;
    while (split_begin(n) < n_keys) {
        n++;
    }
    return n;
}

inline int64_t count_keys(const attention_args & a) {
    int64_t n = 0;
    for (int i = 0; i < a.n_segments; i++) {
        n += a.segments[i].n;
    }
    return n;
}

// Keys that are read as they lie
inline int64_t count_plain_keys(const attention_args & a) {
    return a.order.n_splits > 0 ? a.order.n_plain : count_keys(a);
}

inline int64_t count_splits(const attention_args & a) {
    const int64_t n = count_splits(count_plain_keys(a)) + a.order.n_splits;
    return n > 0 ? n : 1;
}

// The keys of a split become those at hand.
static inline void go_to_split(attention_item & w, int64_t split) {
    const attention_order & order   = w.args->order;
    const int64_t           n_keys  = count_plain_keys(*w.args);
    const int64_t           ordered = split - count_splits(n_keys);
    w.k0 = w.k1 = n_keys;
    w.block0 = w.block1 = 0;
    if (ordered < 0) {
        w.k0 = split_begin(split);
        w.k1 = split_begin(split + 1) < n_keys ? split_begin(split + 1) : n_keys;
    } else if (order.blocks) {
        w.block0 = order.splits[ordered];
        w.block1 = order.splits[ordered + 1];
    }
}

// ALiBi slope of a head, the rule of ggml_soft_max_ext; 1 without ALiBi.
float alibi_slope(const attention_args & a, int head);

// Writes n elements as a row in scales of least error (least_error.h). All bodies have the same bits.
struct least_error_writers {
    using write_fn = void (*)(const float * x, void * row, int64_t n);

    write_fn q4_0;
    write_fn q5_0;
};

const least_error_writers * least_error_any();
const least_error_writers * least_error_avx512();

struct attention_kernels {
    const char * name;
    bool (*supported)(); // by processor and operating system
    bool same_bits;      // attention_same_bits()
    void (*run)(const attention_item & item);
    // Writes the output of one item's rows from the partial results of n chunks of keys, in order.
    void (*merge)(const attention_item & first, int n_chunks, size_t chunk_stride);
    void (*rotate)(float * x, int64_t n, int edge);
    const least_error_writers * (*least_error)();
    // Fills taken of the item's only query and KV head. nullptr: it reads all pages.
    void (*choose)(const attention_item & item);
    // attention_sketch(); nullptr where `choose` is
    void (*sketch)(const attention_rows & k, int64_t key, int n_head_kv, int d_k, uint8_t * bits, uint16_t * steps,
                   int64_t strips);
};

bool cpu_has_avx2(); // with FMA and F16C
bool cpu_has_avxvnni();
bool cpu_has_avx512(); // with F, VL, BW, DQ, VBMI and VNNI
bool cpu_has_amx();    // with tiles of BF16 and of bytes, and AVX512_BF16; asks Linux for the permission
bool cpu_has_neon();
bool cpu_has_dotprod();
bool cpu_has_i8mm(); // with dotprod

// Those that the compiler has instructions for are there; CMakeLists.txt has them in order.
const attention_kernels * attention_scalar();
const attention_kernels * attention_avx2();
const attention_kernels * attention_avxvnni();
const attention_kernels * attention_avx512();
const attention_kernels * attention_amx();
const attention_kernels * attention_neon();
const attention_kernels * attention_dotprod();
const attention_kernels * attention_i8mm();

namespace {

// What rows make of some keys
struct row_sums {
    float * max; // [rows_padded] running maximum of the scores in units of log2
    float * sum; // [rows_padded] sum of 2^(score - max)
    float * acc; // [rows_padded, d_v_padded] sum of 2^(score - max) * v, anything where max is -inf
};

// Memory of one (item, KV head). Partial results stay here until they are merged.
struct item_memory : row_sums {
    int      rows;
    int64_t  rows_padded;
    int64_t  d_v_padded;
    row_sums all;    // of the splits that are done; decode has one, so it is that
    void *   q;      // packed queries: the body's own business
    size_t   q_size; // per row, 13 bytes an element

    // of KV head `head0 + i`; `base` may be nullptr when only `bytes` is wanted
    item_memory(const attention_args & a, bool decode, int64_t n_queries, void * base, int i) {
        rows              = int(n_queries * (a.n_head / a.n_head_kv));
        rows_padded       = round_up(rows, row_pad);
        d_v_padded        = round_up(a.d_v, 32);
        q_size            = size_t(round_up(a.d_k, 128)) * 13;
        const size_t accs = size_t(rows_padded) * d_v_padded * sizeof(float);
        const size_t stat = size_t(rows_padded) * sizeof(float);
        const size_t sums = 2 * stat + accs;
        bytes             = (decode ? 1 : 2) * sums + rows_padded * q_size;
        char *     p      = static_cast<char *>(base) + size_t(i) * bytes;
        const auto at     = [&](char * from) {
            return row_sums{ reinterpret_cast<float *>(from), reinterpret_cast<float *>(from + stat),
                             reinterpret_cast<float *>(from + 2 * stat) };
        };
        all                            = at(p);
        static_cast<row_sums &>(*this) = at(decode ? p : p + sums);
        q                              = p + (decode ? 1 : 2) * sums;
    }

    size_t bytes; // a multiple of 64
};

// The same array in the memory of another chunk of keys.
inline float * chunk_of(float * p, int chunk, size_t chunk_stride) {
    return reinterpret_cast<float *>(reinterpret_cast<char *>(p) + chunk * chunk_stride);
}

constexpr float log2e = 1.44269504088896341f;

inline const float * query_row(const attention_args & a, int64_t query, int head) {
    return reinterpret_cast<const float *>(reinterpret_cast<const char *>(a.q) + query * a.q_row + head * a.q_head);
}

// What the subtracted bias of a pair adds to q . k of a query: times the cosine and the sine of the key's RoPE angle.
struct pair_score {
    float by_cosine;
    float by_sine;
};

inline pair_score score_of(const attention_args & a, const attention_pair & pair, int64_t query, int head) {
    const float * q = query_row(a, query, head);
    const float * b = pair.subtracted_bias + 2 * (head / (a.n_head / a.n_head_kv));
    const float   x = q[pair.first];
    const float   y = q[pair.second];
    return { x * b[0] + y * b[1], y * b[0] - x * b[1] };
}

// The scores of all pairs whose bias is subtracted from K of a key
inline float score_pairs(const attention_args & a, const attention_segment & s, int64_t key, int64_t query, int head) {
    float sum = 0.0f;
    for (int i = 0; i < s.n_pairs; i++) {
        const pair_score x = score_of(a, s.pairs[i], query, head);
        sum +=
            x.by_cosine * s.pairs[i].cosines[s.first_angle + key] + x.by_sine * s.pairs[i].sines[s.first_angle + key];
    }
    return sum;
}

inline float * output_row(const attention_args & a, int64_t query, int head) {
    return reinterpret_cast<float *>(reinterpret_cast<char *>(a.out) + query * a.out_row + head * a.out_head);
}

inline const char * key_row(const attention_rows & r, int64_t key, int head) {
    return static_cast<const char *>(r.data) + key * r.row + head * r.head;
}

inline const uint16_t * mask_row(const attention_args & a, int64_t query) {
    return reinterpret_cast<const uint16_t *>(reinterpret_cast<const char *>(a.mask) + query * a.mask_row);
}

} // namespace
} // namespace mixedkv
