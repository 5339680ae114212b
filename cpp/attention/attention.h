// Attention over key and value rows of several types, for CPUs. No ggml or llama header.
//
//   out[i, h] = softmax_j( cap(scale * q[i, h] . k[j, g(h)]) + slope(h) * mask[i, j] ) v[j, g(h)],   g(h) = h /
//   (n_head/n_head_kv)
//
// as ggml_flash_attn_ext defines it: mask values are added after the soft-cap (-inf hides a key), sinks add
// exp(sink[h]) to the denominator only, ALiBi slopes follow max_alibi_bias. A query that sees no key gives zeros.
// All accumulation is in F32. Keys are cut at fixed places, so a result does not depend on the number of threads.
// docs/kernels.md says where it does not depend either on which queries come in one call.

#pragma once

#include <cstddef>
#include <cstdint>

namespace mixedkv {

// Blocks of 32 elements, of lm4 and tc3 64, as ggml lays them out: F16 scale d, integers or nibbles q, low ones first.
enum class row_type : uint8_t {
    f16,
    q8_0,  // value = d * q
    q4_0,  // d * (q - 8)
    q5_0,  // d * (q - 16), the fifth bits in 4 bytes
    lm4,   // d * level[q], see lm4.h
    tc3,   // d * level[q], q from bits of several elements, see tc3.h
    other, // any type with a to-float conversion
};

using to_float_fn = void (*)(const void * row, float * out, int64_t n);

// Consecutive rows of one type: K or V of one stream.
struct attention_rows {
    const void * data     = nullptr;
    row_type     type     = row_type::f16;
    size_t       row      = 0;       // bytes from one key to the next
    size_t       head     = 0;       // bytes from one KV head to the next
    to_float_fn  to_float = nullptr; // for row_type::other
};

// The bias that is subtracted from rows of K: two elements of each head, which RoPE rotates with the key, k[first] + c
// x - s y and k[second] + s x + c y, where (x, y) is the head's `subtracted_bias` and c and s are the key's cosine and
// sine. In the basis of the queries as they come. One element alone: first and second are the same, y and the sines are
// zero.
struct attention_pair {
    int           first           = 0;
    int           second          = 0;
    const float * subtracted_bias = nullptr; // [n_head_kv, 2]
    const float * cosines         = nullptr; // [keys], readable up to a multiple of 16 keys, as the sines
    const float * sines           = nullptr;
};

struct attention_segment {
    attention_rows k;
    attention_rows v;
    int64_t        n = 0; // keys

    const attention_pair * pairs       = nullptr; // whose bias is subtracted from K
    int                    n_pairs     = 0;
    int64_t                first_angle = 0; // of the pairs' cosines and sines: that of the first key
};

// Keys of a sequence that are worked on together. Which keys they are, and at which place each of them stands,
// follows from their positions in the sequence, and not from where their rows lie.
struct attention_block {
    static constexpr int places = 64;

    int32_t n   = 0;  // places up to that of the last key
    int32_t key = -1; // the column of the first key
    int32_t list =
        -1; // of the order's lists, with a place's column each; -1: n keys of one segment that lie side by side
    int32_t readers = 0; // of the order's sets, counted from 1, which queries may see the keys; 0: the mask alone tells
};

// The order in which keys are read whose rows may lie anywhere. A query sees each of its keys in one block. Keys of the
// first segment have blocks of their own, or none: then they are read as they lie. All the others are F16.
struct attention_order {
    const attention_block * blocks   = nullptr;
    const int64_t *         splits   = nullptr; // [n_splits + 1] blocks where a run begins that one thread may work on
    int64_t                 n_splits = 0; // 0: there is no order. The most there will be, when bytes are asked for
    int64_t                 n_plain  = 0; // columns before all others that are read as they lie

    const int32_t *  lists      = nullptr; // [places] columns each, -1: no key
    const uint16_t * mask       = nullptr; // F16 [n_queries, lists, places], -inf where there is no key
    size_t           mask_row   = 0;       // bytes from query to query
    const uint8_t *  readers    = nullptr; // [sets, n_queries]
    int64_t          reader_row = 0;       // queries of a set
};

constexpr int attention_max_segments = 3; // cold rows, hot ring, running micro-batch
constexpr int attention_decode_rows = 32; // a call with up to so many queries, times query heads per KV head, is decode
constexpr int attention_max_head_size = 1024; // of d_k and d_v; a multiple of their elements for rows in blocks

// Pages of keys, by KV head and query, of which decode chose those to read, and those that it read: added to by all
// threads.
struct attention_page_counts {
    uint64_t pages      = 0;
    uint64_t pages_read = 0;
};

constexpr int attention_page  = 4; // keys of the first segment that follow each other, which decode reads or leaves out
constexpr int attention_strip = 16; // of which it has a sketch; both begin at multiples of them

// Two bits of each element of K (see sparse/sketch.h), and which pages queries read: attention_choose_pages() says so,
// attention_run() obeys. Decode only, keys of the first segment. The scalar body reads all.
struct attention_pages {
    const uint8_t *  bits   = nullptr; // of a strip attention_sketch_bytes()
    const uint16_t * steps  = nullptr; // F16 [16] of a strip, half the step of each key
    int64_t          strips = 0;       // of one KV head, those of the next follow
    const uint8_t *  known  = nullptr; // [strips] 0: the sketch is of other rows, so the strip is read

    float     error = 0.0f;    // standard error of a row's sum of weights, relative to it; 0: all pages are read
    int64_t   depth = 0;       // keys on strips of which a query sees some, below which it reads all
    uint8_t * taken = nullptr; // of each query attention_taken_bytes(), the body's own business; nullptr: all are read
    size_t    row   = 0;       // bytes from query to query
};

// What queries see of blocks of keys: found in the mask by the first layer of a step, read by the others. Decode only.
struct attention_seen {
    uint32_t * blocks = nullptr; // [attention_seen_blocks() of the keys, queries], whatever is there of other steps
    int64_t    row    = 0;       // queries of the mask
    uint32_t   step   = 0;       // counts masks: 1 .. 2^24 - 1
};

// One stream. Mask columns are the segments' keys in order.
struct attention_args {
    int     n_head    = 0;
    int     n_head_kv = 0;
    int     d_k       = 0; // head size of Q and K
    int     d_v       = 0; // head size of V and the output
    int64_t n_queries = 0;

    const float * q      = nullptr;
    size_t        q_row  = 0; // bytes from query to query
    size_t        q_head = 0; // bytes from head to head

    attention_segment segments[attention_max_segments];
    int               n_segments = 0;

    const uint16_t * mask     = nullptr; // F16 [n_queries, n_keys], nullptr: every key is visible
    size_t           mask_row = 0;       // bytes from query to query
    attention_order  order;
    attention_seen   seen; // no blocks: each call looks for itself

    const float * scale_q = nullptr; // [n_head_kv, d_k], Q times it before it is rotated; nullptr: 1

    // Edge of the Hadamard blocks by which Q is rotated before use and the output after, 0: none. Divides the head
    // size.
    int rotation_q   = 0;
    int rotation_out = 0;

    float         scale          = 1.0f;
    float         max_alibi_bias = 0.0f;
    float         logit_softcap  = 0.0f;
    const float * sinks          = nullptr; // [n_head]

    // Bits that Q and the weights are rounded to where rows of integers are multiplied, 16 or 8. avx512, amx, dotprod
    // and i8mm obey 8, avx2 and avxvnni where the integers are those of q4_0
    int rounding = 16;

    attention_pages         pages;
    attention_page_counts * page_counts = nullptr;

    float * out      = nullptr;
    size_t  out_row  = 0; // bytes from query to query
    size_t  out_head = 0; // bytes from head to head
};

constexpr int64_t attention_seen_blocks(int64_t n_keys) {
    return (n_keys / 64 + 1) * attention_max_segments;
}

// Bytes that attention_run needs for these shapes, whatever the number of threads: no pointer is looked at.
// Enough as well for fewer streams, queries or keys with the same heads, so the largest shape may be asked once.
size_t attention_scratch_bytes(const attention_args * streams, int n_streams);

// Bytes that a call with exactly these shapes uses, at most what attention_scratch_bytes() says of them.
size_t attention_run_bytes(const attention_args * streams, int n_streams);

// Called by every thread 0 <= ith < nth with the same arguments; returns when this thread's share is done.
// `scratch` is shared by the threads, attention_scratch_bytes() long, 64-byte aligned, and zeroed before its
// first use ever; each call leaves it ready for the next. The output is complete when all threads have returned.
// True for one thread, the last: the others have read all they will read.
bool attention_run(const attention_args * streams, int n_streams, void * scratch, int ith, int nth);

// Says for each query which pages it reads: all heavy ones, and a random sample of the others, which stands for those
// that are left out. Called by every thread with the same arguments, and to be complete before attention_run(). The
// sample depends on the query's Q and the order of the pages. The heads of a KV head read what any of them does. Strips
// that are not known, the keys after the last whole strip and those of the other segments are always read.
void attention_choose_pages(const attention_args * streams, int n_streams, int ith, int nth);

// Bytes of what a query reads of n_keys keys of the first segment.
size_t attention_taken_bytes(int64_t n_keys, int n_head_kv);

// Bytes of a strip and KV head.
size_t attention_sketch_bytes(int d_k);

// The sketch of the strip whose first key is `key`. `bits` and `steps` are those of the first KV head, `strips` the
// number of strips to the next. The scalar body makes none, since it reads all.
void attention_sketch(const attention_rows & k, int64_t key, int n_head_kv, int d_k, uint8_t * bits, uint16_t * steps,
                      int64_t strips);

// Rotates the row x[n] by Hadamard blocks of `edge` elements, a power of two up to attention_max_head_size.
void rotate_row(float * x, int64_t n, int edge);

// Whether a query has the same bits in any step, any cut of its prompt and any cells, where the cold rows have these
// types and no pages are left out: prefill sums up as decode does. Not with F16, of which prefill has more to gain.
bool attention_same_bits(row_type k, row_type v, int d_k, int d_v);

// Instruction set in use: "scalar", "avx2", "avxvnni", "avx512", "amx", "neon". MIXEDKV_ISA forces one;
// attention_isa_error() is nullptr, or says why the forced one cannot be used here.
const char * attention_isa();
const char * attention_isa_error();

} // namespace mixedkv
