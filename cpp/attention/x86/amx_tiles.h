// AMX tile registers and the split of F32 into pairs of BF16.

#pragma once

#include "attention/simd/vector_avx512.h"

namespace mixedkv {
namespace {

// Configures the tiles, all with 16 rows of 64 bytes, and puts back the configuration that it found: others on this
// thread may rely on it. Configuring takes 330 cycles: once per item.
struct tile_session {
    struct alignas(64) config {
        uint8_t  palette = 0, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t  rows[16]      = {};

        // not the intrinsics: GCC 12 lets them touch 8 bytes only and drops the rest
        void load() const { __asm__ volatile("ldtilecfg %0" : : "m"(*this)); }
        void store() { __asm__ volatile("sttilecfg %0" : "=m"(*this)); }
    };

    tile_session() {
        before.store();
        config mine;
        mine.palette = 1;
        for (int i = 0; i < 8; i++) {
            mine.row_bytes[i] = 64;
            mine.rows[i]      = 16;
        }
        mine.load();
    }
    ~tile_session() {
        if (before.palette != 0) {
            before.load();
        } else {
            _tile_release();
        }
    }

  private:
    config before;
};

constexpr int tile_bytes = 1024;

// What vector instructions have written is read by tiles: GCC 12 does not know of it.
inline void memory_is_used() {
    __asm__ volatile("" : : : "memory");
}

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
