// What K and V in integers share on AVX-512 and AMX: the rows' types, their scales, and weights as integers.

#pragma once

#include "attention/simd/vector_avx512.h"
#include "attention/tile.h"

namespace mixedkv {
namespace {

constexpr float int16_limit = 32512; // 127 * 256: both bytes stay within [-128, 127]

// Types whose values are a scale times a byte: F16 scale, then 32 bytes, or 16 bytes of nibbles that stand for them.
// A minimum would need the sum of Q as well.
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
struct integer_rows<row_type::iq4_nl> : iq4_nl_values {
    static constexpr bool nibbles = true;
    static constexpr bool even    = false;
    static constexpr int  offset  = 128;
};

// Calls f with the type as a constant if it is one of these
template <class F>
bool with_integers(row_type type, F f) {
    switch (type) {
    case row_type::q8_0:
        f(type_constant<row_type::q8_0>{});
        return true;
    case row_type::q4_0:
        f(type_constant<row_type::q4_0>{});
        return true;
    case row_type::iq4_nl:
        f(type_constant<row_type::iq4_nl>{});
        return true;
    default:
        return false;
    }
}

inline bool has_integers(row_type type) {
    return with_integers(type, [](auto) {});
}

constexpr int most_block_bytes = block_bytes(row_type::q8_0);

inline __m128i load_16(const char * p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
}

inline __m256i load_32(const char * p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
}

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

// The scales of 4 blocks as F16 in the lower 64 bits; b1, b2, b3: bytes from the first block to the others
template <row_type type>
static __m128i four_scales(const char * p, int n_blocks, int b1, int b2, int b3) {
    if (integer_rows<type>::nibbles && n_blocks == 4) { // all within the first 64 of 72 bytes
        const __m512i at = _mm512_castsi128_si512(_mm_setr_epi8(0, 1, 18, 19, 36, 37, 54, 55, 0, 0, 0, 0, 0, 0, 0, 0));
        return _mm512_castsi512_si128(_mm512_permutexvar_epi8(at, _mm512_loadu_si512(p)));
    }
    const auto at = [&](int i) {
        uint16_t h;
        std::memcpy(&h, p + i, 2);
        return uint64_t(h);
    };
    return _mm_cvtsi64_si128(int64_t(at(0) | at(b1) << 16 | at(b2) << 32 | at(b3) << 48));
}

// The scales of 2 blocks; the upper lanes are zero
inline __m128i two_scales(const char * p, int b1) {
    uint16_t h[2];
    std::memcpy(h, p, 2);
    std::memcpy(h + 1, p + b1, 2);
    return _mm_cvtsi32_si128(int32_t(h[0] | uint32_t(h[1]) << 16));
}

// The scales of a block of keys by up to 4 blocks of elements
struct key_scales {
    alignas(64) uint16_t half[4][key_block];

    // of 4 keys; absent blocks repeat the last one
    template <row_type type>
    void load(const char * p, int64_t row, int n_blocks, int key) {
        constexpr int bytes = block_bytes(type);
        const int     last  = (n_blocks - 1) * bytes;
        __m128i       four[4];
        for (int i = 0; i < 4; i++) {
            four[i] = four_scales<type>(p + i * row, n_blocks, bytes < last ? bytes : last,
                                        2 * bytes < last ? 2 * bytes : last, 3 * bytes < last ? 3 * bytes : last);
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
                std::memcpy(local + i * most, p + (j + i < n ? j + i : n - 1) * row, n_blocks * block_bytes(type));
            }
            load<type>(local, most, n_blocks, j);
        }
    }
};

// Which of a block's keys have a weight in some row, a bit each
inline uint64_t used_keys(const float * s, int rows) {
    uint64_t used = 0;
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < 4; i++) {
            const __m512 weights = _mm512_load_ps(s + r * key_block + 16 * i);
            used |= uint64_t(_mm512_cmp_ps_mask(weights, _mm512_setzero_ps(), _CMP_NEQ_UQ)) << 16 * i;
        }
    }
    return used;
}

// The unit in which weight * scale becomes an integer, when the weight is relative to the largest of its row. Keys that
// are not used have no say: what they hold is another sequence's, or left over.
struct weight_unit {
    alignas(64) float ratios[key_block]; // scale / unit
    float unit;

    // Rows that are worked on together share it, which is too coarse for one that does not see the key of the largest
    // scale if that is of another order than all others, as an overflow's is: values of models stay far below 8192.
    bool is_extreme() const { return unit > 1024.0f / int16_limit; }

    void find(const uint16_t * scales, uint64_t used) {
        __m512 d[4];
        __m512 largest = _mm512_setzero_ps();
        for (int i = 0; i < 4; i++) {
            d[i]    = _mm512_maskz_mov_ps(__mmask16(used >> 16 * i), avx512::load_half(scales + 16 * i));
            largest = _mm512_max_ps(largest, _mm512_abs_ps(d[i]));
        }
        const float top = _mm512_reduce_max_ps(largest);
        unit            = top / int16_limit;
        for (int i = 0; i < 4; i++) {
            _mm512_store_ps(ratios + 16 * i,
                            _mm512_mul_ps(d[i], _mm512_set1_ps(top > 0.0f ? int16_limit / top : 0.0f)));
        }
    }

    // 64 weights p times the scales as 16-bit integers: keys 0..31 and 32..63, each in the order that packing leaves,
    // by lanes of 0..3, 16..19
    void apply(const __m512 * p, __m512i & first, __m512i & second) const {
        __m512i n[4];
        for (int i = 0; i < 4; i++) {
            n[i] = _mm512_cvtps_epi32(_mm512_mul_ps(p[i], _mm512_load_ps(ratios + 16 * i)));
        }
        first  = _mm512_packs_epi32(n[0], n[1]);
        second = _mm512_packs_epi32(n[2], n[3]);
    }
};

// 64 weights of a row relative to the largest, which is returned
inline float relative_weights(const float * s, __m512 * p) {
    for (int i = 0; i < 4; i++) {
        p[i] = _mm512_load_ps(s + 16 * i);
    }
    const float  top     = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(p[0], p[1]), _mm512_max_ps(p[2], p[3])));
    const __m512 inverse = _mm512_set1_ps(top > 0x1p-100f ? 1.0f / top : 0.0f);
    for (int i = 0; i < 4; i++) {
        p[i] = _mm512_mul_ps(p[i], inverse);
    }
    return top;
}

// Weights from the last key to the end of the block
inline void clear_rest(const item_memory & m, int n, float * s) {
    for (int r = 0; r < m.rows; r++) {
        for (int64_t j = round_up(n, 16); j < key_block; j += 16) {
            _mm512_store_ps(s + r * key_block + j, _mm512_setzero_ps());
        }
    }
}

} // namespace
} // namespace mixedkv
