// What K and V in integers share on AMX: the unpacking of nibbles.

#pragma once

#include "amx_tiles.h"
#include "attention/simd/vector_avx512.h"
#include "integers.h"

namespace mixedkv {
namespace {

// Turns nibble n of a byte into the signed byte n - 8: bits 0..2 stay, bits 3..7 become the inverse of bit 3.
// Byte 7 - i of the matrix selects the source of bit i.
constexpr int64_t low_nibble  = 0x0102040808080808;
constexpr int64_t high_nibble = 0x1020408080808080;

inline __m512i nibbles(__m512i x, __m512i which) {
    return _mm512_gf2p8affine_epi64_epi8(x, which, 0xf8);
}

// What the nibbles of x stand for: the low ones in lanes of `low_nibble`, the high ones in the others
template <row_type type>
__m512i values_of(__m512i x, __m512i which) {
    if constexpr (integer_rows<type>::even) {
        return nibbles(x, which);
    } else {
        const __m512i  low_lanes = _mm512_set1_epi64(low_nibble);
        const __mmask8 low       = _mm512_cmpeq_epi64_mask(which, low_lanes);
        const __m512i  n         = _mm512_mask_mov_epi64(_mm512_srli_epi16(x, 4), low, x);
        return _mm512_shuffle_epi8(in_lanes(integer_rows<type>::at), _mm512_and_si512(n, _mm512_set1_epi8(15)));
    }
}

using tile_sums = int32_t[2][tile_bytes / 4]; // two result tiles

} // namespace
} // namespace mixedkv
