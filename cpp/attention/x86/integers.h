// What K and V in integers share on AVX2 and AVX-512: the rows' types, their scales, and weights as integers. L is
// a vector layer.

#pragma once

#include "attention/tile.h"

#include <immintrin.h>

namespace mixedkv {
namespace {

constexpr float int16_limit = 32512; // 127 * 256: both bytes stay within [-128, 127]

// Types whose values are a scale times a byte: F16 scale, then 32 bytes, or nibbles or other bits that stand for them.
template <row_type type>
struct integer_rows;

template <>
struct integer_rows<row_type::q8_0> {
    static constexpr bool nibbles = false;
    static constexpr int  offset  = 128; // makes integers unsigned
};

template <>
struct integer_rows<row_type::q4_0> : q4_0_values {
    static constexpr bool nibbles = true;
    static constexpr bool even    = true; // a nibble less the offset is its value
    static constexpr int  offset  = 8;
};

template <>
struct integer_rows<row_type::lm4> : lm4_values {
    static constexpr bool nibbles = true;
    static constexpr bool even    = false;
    static constexpr int  offset  = 128;
};

template <>
struct integer_rows<row_type::tc3> {
    static constexpr bool nibbles = false; // until they are unpacked
};

template <>
struct integer_rows<row_type::q5_0> {
    static constexpr bool nibbles = false;
};

template <>
struct integer_rows<unpacked_q5_0> : integer_rows<row_type::q8_0> {};

template <>
struct integer_rows<unpacked_tc3> : tc3_values {
    static constexpr bool nibbles = true;
    static constexpr bool even    = false;
    static constexpr int  offset  = 128;
};

// Those of tc3 and q5_0 are unpacked first: see integer_decode.h
constexpr bool has_integers(row_type type) {
    return type == row_type::q8_0 || type == row_type::q4_0 || type == row_type::lm4;
}

// Calls f with the type as a constant if it has integers
template <class F>
bool with_integers(row_type type, F f) {
    return has_integers(type) && with_block_type(type, [&](auto constant) {
               if constexpr (has_integers(decltype(constant)::value)) {
                   f(constant);
               }
           });
}

// Decode of an item: Q of each head is packed when it is needed, then each head attends to block after block of keys.
//   pack(m, row)               packs four rows of Q from `row` on
//   attend(head, m, span)      attends to the keys of a span, all in one segment
template <class Base, class Pack, class Attend>
void decode_blocks(const attention_item & w, Pack pack, Attend attend) {
    const attention_args & a = *w.args;
    for (int i = 0; i < w.n_head; i++) {
        Base::begin(item_memory(a, w.decode, w.n_queries, w.memory, i));
    }
    uint32_t   ready   = 0;
    const auto prepare = [&](const key_span & span) {
        Base::prepare_rows(w, span, ready, [&](const item_memory & m, int row) {
            if (a.d_k % 32 == 0) {
                pack(m, row);
            }
        });
    };
    for_each_block_read(w, key_block, prepare, [&](int i, const key_span & span) {
        attend(w.head0 + i, item_memory(a, w.decode, w.n_queries, w.memory, i), span);
    });
}

constexpr int most_block_bytes = block_bytes(row_type::q8_0);

inline __m128i load_16(const char * p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
}

inline __m256i load_32(const char * p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
}

#ifdef __AVX512F__
// 16 bytes of each of 4 rows, one to a lane
inline __m512i load_lanes(const char * p, int64_t row) {
    __m512i x = _mm512_castsi128_si512(load_16(p));
    x         = _mm512_mask_broadcast_i32x4(x, 0x00f0, load_16(p + row));
    x         = _mm512_mask_broadcast_i32x4(x, 0x0f00, load_16(p + 2 * row));
    return _mm512_mask_broadcast_i32x4(x, 0xf000, load_16(p + 3 * row));
}

// Bytes of a table in every 128-bit lane, and what nibbles stand for there
inline __m512i in_lanes(const int8_t * table, int plus = 0) {
    const __m128i x = _mm_add_epi8(load_16(reinterpret_cast<const char *>(table)), _mm_set1_epi8(char(plus)));
    return _mm512_broadcast_i32x4(x);
}
#endif

// The scales of up to 4 blocks of 32 elements as F16 in the lower 64 bits; absent blocks repeat the last one
template <row_type type>
static __m128i four_scales(const char * p, int n_blocks) {
    constexpr int b1 = scale_at(type, 1), b2 = scale_at(type, 2), b3 = scale_at(type, 3);
#ifdef __AVX512VBMI__
    constexpr bool is_tc3 = type == row_type::tc3;
    if ((is_tc3 || integer_rows<type>::nibbles) && n_blocks == 4) { // within 52 bytes, or the first 64 of 68 or 72
        const __m512i at =
            _mm512_castsi128_si512(_mm_setr_epi8(0, 1, b1, b1 + 1, b2, b2 + 1, b3, b3 + 1, 0, 0, 0, 0, 0, 0, 0, 0));
        const __mmask64 there = is_tc3 ? (uint64_t(1) << 2 * TC3_BYTES) - 1 : ~uint64_t(0);
        return _mm512_castsi512_si128(_mm512_permutexvar_epi8(at, _mm512_maskz_loadu_epi8(there, p)));
    }
#endif
    const auto at = [&](int i) {
        const int last = scale_at(type, n_blocks - 1);
        uint16_t  h;
        std::memcpy(&h, p + (i < last ? i : last), 2);
        return uint64_t(h);
    };
    return _mm_cvtsi64_si128(int64_t(at(0) | at(b1) << 16 | at(b2) << 32 | at(b3) << 48));
}

// The scales of up to 2 blocks; the upper lanes are zero
template <row_type type>
static __m128i two_scales(const char * p, int n_blocks) {
    uint16_t h[2];
    std::memcpy(h, p, 2);
    std::memcpy(h + 1, p + scale_at(type, n_blocks - 1), 2);
    return _mm_cvtsi32_si128(int32_t(h[0] | uint32_t(h[1]) << 16));
}

// The scales of a block of keys by up to 4 blocks of elements
struct key_scales {
    alignas(64) uint16_t half[4][key_block];

    // of 4 keys; absent blocks repeat the last one
    template <row_type type>
    void load(const char * p, int64_t row, int n_blocks, int key) {
        __m128i four[4];
        for (int i = 0; i < 4; i++) {
            four[i] = four_scales<type>(p + i * row, n_blocks);
        }
        const __m128i ab = _mm_unpacklo_epi16(four[0], four[1]);
        const __m128i cd = _mm_unpacklo_epi16(four[2], four[3]);
        const __m128i lo = _mm_unpacklo_epi32(ab, cd); // 4 keys of block 0, of block 1
        const __m128i hi = _mm_unpackhi_epi32(ab, cd);
        _mm_storel_epi64(reinterpret_cast<__m128i *>(half[0] + key), lo);
        _mm_storeh_pd(reinterpret_cast<double *>(half[1] + key), _mm_castsi128_pd(lo));
        _mm_storel_epi64(reinterpret_cast<__m128i *>(half[2] + key), hi);
        _mm_storeh_pd(reinterpret_cast<double *>(half[3] + key), _mm_castsi128_pd(hi));
    }

    // of n keys; past the last key it is repeated up to a whole block
    template <row_type type>
    void load_all(const char * p, int64_t row, int n, int n_blocks) {
        constexpr int64_t most = 4 * most_block_bytes;
        for (int j = 0; j < key_block; j += 4) {
            if (j + 4 <= n) {
                load<type>(p + j * row, row, n_blocks, j);
                continue;
            }
            char local[4 * most];
            for (int i = 0; i < 4; i++) {
                std::memcpy(local + i * most, p + (j + i < n ? j + i : n - 1) * row, scale_at(type, n_blocks));
            }
            load<type>(local, most, n_blocks, j);
        }
    }
};

// The weights of a block of keys
template <class L>
using block_weights = typename L::V[key_block / L::width];

// The unit in which weight * scale becomes an integer, when the weight is relative to the largest of its row. Keys that
// are not used have no say: what they hold is another sequence's, or left over.
template <class L>
struct weight_unit {
    using V = typename L::V;

    alignas(64) float ratios[key_block]; // scale / unit
    float unit;

    // Rows that are worked on together share it, which is too coarse for one that does not see the key of the largest
    // scale if that is of another order than all others, as an overflow's is: values of models stay far below 8192.
    bool is_extreme() const { return unit > 1024.0f / int16_limit; }

    void find(const uint16_t * scales, uint64_t used) {
        block_weights<L> d;
        V                largest = L::zero();
        for (int i = 0; i < key_block / L::width; i++) {
            d[i]    = L::where(uint32_t(used >> L::width * i), L::load_half(scales + L::width * i));
            largest = L::max(largest, L::abs(d[i]));
        }
        const float top = L::highest(largest);
        unit            = top / int16_limit;
        for (int i = 0; i < key_block / L::width; i++) {
            L::store(ratios + L::width * i, L::mul(d[i], L::set(top > 0.0f ? int16_limit / top : 0.0f)));
        }
    }

    // 64 weights p times the scales as 16-bit integers, in the order that L::to_int16 leaves
    template <class I>
    void apply(const block_weights<L> & p, I * out) const {
        for (int i = 0; i < key_block / L::width; i += 2) {
            const float * ratio = ratios + L::width * i;
            out[i / 2] = L::to_int16(L::mul(p[i], L::load(ratio)), L::mul(p[i + 1], L::load(ratio + L::width)));
        }
    }
};

// 64 weights of a row relative to the largest, which is returned
template <class L>
float relative_weights(const float * s, block_weights<L> & p) {
    for (int i = 0; i < key_block / L::width; i++) {
        p[i] = L::load(s + L::width * i);
    }
    typename L::V most = L::max(L::max(p[0], p[1]), L::max(p[2], p[3]));
    for (int i = 4; i < key_block / L::width; i++) {
        most = L::max(most, p[i]);
    }
    const float         top     = L::highest(most);
    const typename L::V inverse = L::set(top > 0x1p-100f ? 1.0f / top : 0.0f);
    for (auto & x : p) {
        x = L::mul(x, inverse);
    }
    return top;
}

// Weights from the last key to the end of the block
inline void clear_rest(const item_memory & m, int n, float * s) {
    for (int r = 0; n < key_block && r < m.rows; r++) {
        std::memset(s + r * key_block + n, 0, (key_block - n) * sizeof(float));
    }
}

} // namespace
} // namespace mixedkv
