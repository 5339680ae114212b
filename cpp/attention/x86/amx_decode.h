// Decode on AMX over q4_0 and q8_0 rows: their integers are multiplied as they are, Q and the weights as 16-bit
// integers in two signed bytes (high * 256 + low). Sums are exact in 32 bits; scales are applied to them in F32.
//
// Scores: the left operand is K, 16 keys by 64 bytes, two blocks of 32 elements. Their scales differ from key to key,
// so each block has its own columns of the right operand: (block 0 high, block 0 low, block 1 high, block 1 low) by 4
// rows, zero where the block is the other one. Summing the four 128-bit lanes of a scaled result ends the score of a
// key. Output: the weights times the scales of V are the left operand, 4 rows by (high, low), so each block of V has
// its own.
//
// Cycles per key and KV head, 4 rows of size 128 over q4_0, data in L1, Sapphire Rapids: K unpacking 6, tile products 4
// (half of it tile stores), scaling and summing 6; softmax 4; V unpacking 9, weights to integers, products and F32 sums
// 11. In all 41, which is what decode over 32k keys takes: memory is hidden by the prefetch into L2.

#pragma once

#include "amx_output.h"
#include "amx_scores.h"

namespace mixedkv {
namespace {

struct amx_decode {
    using base = tile<avx512>;

    static bool fits(const attention_args & a) { return a.d_k <= 256 && a.d_v <= 256; }

    static constexpr unsigned half_tiles = 1u << 3 | 1u << 6 | 1u << 7;

    static void block(const attention_item & w, int head, const item_memory & m, const key_span & span) {
        alignas(64) float s[few_rows * key_block];
        prefetcher        keys(w, span.segment->k, span, head, key_block);
        prefetcher        values(w, span.segment->v, span, head, key_block);
        if (has_integers(span.segment->k.type)) {
            amx_scores::run(w, head, m, span, keys, s);
        } else {
            base::score_rows(w, head, m, span, s);
        }
        if (!base::weigh_rows(w, head, m, span, s, [&] { keys.step(3); })) {
            return;
        }
        if (has_integers(span.segment->v.type)) {
            amx_output::run(w, head, m, span, values, s);
        } else {
            base::add_values(w, head, m, span, s);
        }
    }

    static void run(const attention_item & w) {
        const tile_session session(half_tiles);
        decode_blocks<base>(
            w, [&](const item_memory & m, int row) { amx_scores::pack_quad(*w.args, m, row); },
            [&](int head, const item_memory & m, const key_span & span) { block(w, head, m, span); });
    }
};

} // namespace
} // namespace mixedkv
