// What K and V in integers share on AMX: the rows' types and the unpacking of nibbles.

#pragma once

#include "amx_tiles.h"
#include "tile.h"

namespace mixedkv {
namespace {

constexpr float int16_limit = 32512; // 127 * 256: both bytes stay within [-128, 127]

inline bool is_quantised(row_type t) {
    return t == row_type::q8_0 || t == row_type::q4_0;
}

constexpr int block_bytes(row_type t) {
    return t == row_type::q8_0 ? q8_0_bytes : q4_0_bytes;
}

inline __m128i load_16(const char * p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
}

inline __m256i load_32(const char * p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
}

// Turns nibble n of a byte into the signed byte n - 8: bits 0..2 stay, bits 3..7 become the inverse of bit 3.
// Byte 7 - i of the matrix selects the source of bit i.
constexpr int64_t low_nibble  = 0x0102040808080808;
constexpr int64_t high_nibble = 0x1020408080808080;

inline __m512i nibbles(__m512i x, __m512i which) {
    return _mm512_gf2p8affine_epi64_epi8(x, which, 0xf8);
}

template <class T, T v>
struct constant {
    static constexpr T value = v;
};

template <class F>
void with_type(row_type type, F f) {
    type == row_type::q4_0 ? f(constant<row_type, row_type::q4_0>{}) : f(constant<row_type, row_type::q8_0>{});
}

using tile_sums = int32_t[2][tile_bytes / 4]; // two result tiles

// The scales of 4 blocks as F16 in the lower 64 bits; b1, b2, b3: bytes from the first block to the others
template <row_type type>
static __m128i four_scales(const char * p, int n_blocks, int b1, int b2, int b3) {
    if (type == row_type::q4_0 && n_blocks == 4) { // all within the first 64 of 72 bytes
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

} // namespace
} // namespace mixedkv
