// The split of F32 into pairs of BF16, for AMX.

#pragma once

#include "attention/simd/vector_avx512.h"
#include "attention/x86/tile_session.h"

namespace mixedkv {
namespace {

// a and b as BF16 high and low parts: dword i holds element i of a below element i of b. The sum of the parts is exact
// to 2^-17; for f16 and q4_0 rows (11 and 15 bits) it is exact.
inline void split_pair(__m512 a, __m512 b, void * high, void * low) {
    const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
    const __m512i half  = _mm512_set1_epi32(0x8000);
    const __m512i ah    = _mm512_and_si512(_mm512_castps_si512(a), upper);
    const __m512i bh    = _mm512_and_si512(_mm512_castps_si512(b), upper);
    const __m512  al    = _mm512_sub_ps(a, _mm512_castsi512_ps(ah));
    const __m512  bl    = _mm512_sub_ps(b, _mm512_castsi512_ps(bh));
    const __m512i ar    = _mm512_add_epi32(_mm512_castps_si512(al), half);
    const __m512i br    = _mm512_add_epi32(_mm512_castps_si512(bl), half);
    _mm512_store_si512(high, _mm512_or_si512(_mm512_srli_epi32(ah, 16), bh));
    _mm512_store_si512(low, _mm512_ternarylogic_epi32(_mm512_srli_epi32(ar, 16), br, upper, 0xf8)); // a | (b & c)
}

} // namespace
} // namespace mixedkv
