// Sixteen rows in the lanes of an AVX-512 vector

#pragma once

#include "panel.h"

#include <immintrin.h>

namespace mixedkv {
namespace {

struct avx512 : by_dwords {
    using ints                           = uint32_t __attribute__((vector_size(64)));
    using floats                         = __m512;
    static constexpr int  lanes          = 16;
    static constexpr int  vectors        = 2;
    static constexpr int  columns        = 6; // 12 sums of integers and 12 of floats: 32 registers hold them
    static constexpr int  decode_columns = 8; // for which no panel is made
    static constexpr bool unpacks_many   = true;
    static constexpr int  panel_blocks   = 16;

    static floats load(const float * p) { return _mm512_loadu_ps(p); }
    static ints   load_ints(const int32_t * p) { return ints(_mm512_loadu_si512(p)); }
    static void   store(float * p, floats x) { _mm512_storeu_ps(p, x); }
    static floats set(float x) { return _mm512_set1_ps(x); }
    static floats fma(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
    static floats to_floats(ints x) { return _mm512_cvtepi32_ps(__m512i(x)); }
    static floats as_floats(ints bits) { return _mm512_castsi512_ps(__m512i(bits)); }

    // Bytes less a bias
    static void store_bytes(void * p, ints x, int bias) {
        _mm512_storeu_si512(p, _mm512_sub_epi8(__m512i(x), _mm512_set1_epi8(char(bias))));
    }

    static __m128i load_line(const char * p) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p)); }

    // 16 bytes of rows i, i + 4, i + 8 and i + 12
    static __m512i load_four(const char * const * rows, int i, size_t at) {
        __m512i x = _mm512_castsi128_si512(load_line(rows[i] + at));
        x         = _mm512_inserti32x4(x, load_line(rows[i + 4] + at), 1);
        x         = _mm512_inserti32x4(x, load_line(rows[i + 8] + at), 2);
        return _mm512_inserti32x4(x, load_line(rows[i + 12] + at), 3);
    }

    // Dword i of 16 bytes of all rows into vector i
    static void lines(const char * const * rows, size_t at, ints out[4]) {
        const __m512i x0 = load_four(rows, 0, at), x1 = load_four(rows, 1, at);
        const __m512i x2 = load_four(rows, 2, at), x3 = load_four(rows, 3, at);
        const __m512i a = _mm512_unpacklo_epi32(x0, x1), b = _mm512_unpackhi_epi32(x0, x1);
        const __m512i c = _mm512_unpacklo_epi32(x2, x3), d = _mm512_unpackhi_epi32(x2, x3);
        out[0] = ints(_mm512_unpacklo_epi64(a, c));
        out[1] = ints(_mm512_unpackhi_epi64(a, c));
        out[2] = ints(_mm512_unpacklo_epi64(b, d));
        out[3] = ints(_mm512_unpackhi_epi64(b, d));
    }

    // As lines(), of two times eight rows that are interleaved by 8 bytes
    static void lines_of_eights(const char * const * rows, size_t at, ints out[4]) {
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i odd  = _mm512_or_si512(even, _mm512_set1_epi32(1));
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const __m512i first = _mm512_loadu_si512(rows[0] + at + 64 * i);
            const __m512i other = _mm512_loadu_si512(rows[8] + at + 64 * i);
            out[2 * i]          = ints(_mm512_permutex2var_epi32(first, even, other));
            out[2 * i + 1]      = ints(_mm512_permutex2var_epi32(first, odd, other));
        }
    }

    static floats f16_of_eights(const char * const * rows, size_t at) {
        return _mm512_cvtph_ps(_mm256_set_m128i(load_line(rows[8] + at), load_line(rows[0] + at)));
    }

    static ints bytes_of_eights(const uint64_t bytes[2]) {
        return ints(_mm512_cvtepu8_epi32(_mm_set_epi64x(int64_t(bytes[1]), int64_t(bytes[0]))));
    }

    static ints look_up(const uint8_t table[16], ints x) {
        const __m128i entries = load_line(reinterpret_cast<const char *>(table));
        return ints(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), __m512i(x)));
    }

    static ints dwords(const char * const * rows, size_t at) {
        return ints(_mm512_setr_epi32(
            dword_at(rows[0] + at), dword_at(rows[1] + at), dword_at(rows[2] + at), dword_at(rows[3] + at),
            dword_at(rows[4] + at), dword_at(rows[5] + at), dword_at(rows[6] + at), dword_at(rows[7] + at),
            dword_at(rows[8] + at), dword_at(rows[9] + at), dword_at(rows[10] + at), dword_at(rows[11] + at),
            dword_at(rows[12] + at), dword_at(rows[13] + at), dword_at(rows[14] + at), dword_at(rows[15] + at)));
    }

    static void two_dwords(const char * const * rows, size_t at, ints & first, ints & second) {
        first  = dwords(rows, at);
        second = dwords(rows, at + 4);
    }

    // Bits 4 g to 4 g + 3 of a lane, each as the fifth of a byte
    static ints fifths(ints bits, int g) { return ((bits >> 4 * g & 15) * 0x00204081 & 0x01010101) << 4; }

    static floats from_f16(ints x) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(__m512i(x))); }

    static ints signed_byte(ints x, int i) {
        return ints(_mm512_srai_epi32(_mm512_slli_epi32(__m512i(x), 24 - 8 * i), 24));
    }

    static ints whole_bytes(ints x) { return x ^ 0x80808080; } // with the bias

    template <class Row>
    struct sum {
        __m512i whole;

        void begin(int32_t start) { whole = _mm512_set1_epi32(start); }
        void add(int, ints values, int32_t elements) {
            whole = _mm512_dpbusd_epi32(whole, __m512i(values), _mm512_set1_epi32(elements));
        }
        ints end() const { return ints(whole); }
    };
};

} // namespace
} // namespace mixedkv
