// What K and V in integers share on AMX: the unpacking of nibbles.

#pragma once

#include "amx_tiles.h"
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

using tile_sums = int32_t[2][tile_bytes / 4]; // two result tiles

} // namespace
} // namespace mixedkv
