// Eight rows in the lanes of an AVX2 vector

#pragma once

#include "panel.h"

#include <immintrin.h>

namespace mixedkv {
namespace {

struct avx2 : by_dwords {
    using ints                           = uint32_t __attribute__((vector_size(32)));
    using floats                         = __m256;
    static constexpr int  lanes          = 8;
    static constexpr int  vectors        = 2;
    static constexpr int  columns        = 4;
    static constexpr int  decode_columns = 4; // for which no panel is made
    static constexpr bool unpacks_many   = false;
    static constexpr int  panel_blocks   = 16; // 10 KB, which stay in the nearest cache

    static floats load(const float * p) { return _mm256_loadu_ps(p); }
    static void   store(float * p, floats x) { _mm256_storeu_ps(p, x); }
    static floats set(float x) { return _mm256_set1_ps(x); }
    static floats fma(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }
    static floats to_floats(ints x) { return _mm256_cvtepi32_ps(__m256i(x)); }
    static floats as_floats(ints bits) { return _mm256_castsi256_ps(__m256i(bits)); }

    // 16 bytes of rows i and i + 4
    static __m256i load_pair(const char * const * rows, int i, size_t at) {
        const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i *>(rows[i] + at));
        return _mm256_inserti128_si256(_mm256_castsi128_si256(low),
                                       _mm_loadu_si128(reinterpret_cast<const __m128i *>(rows[i + 4] + at)), 1);
    }

    // Dword i of 16 bytes of all rows into vector i
    static void lines(const char * const * rows, size_t at, ints out[4]) {
        const __m256i x0 = load_pair(rows, 0, at), x1 = load_pair(rows, 1, at);
        const __m256i x2 = load_pair(rows, 2, at), x3 = load_pair(rows, 3, at);
        const __m256i a = _mm256_unpacklo_epi32(x0, x1), b = _mm256_unpackhi_epi32(x0, x1);
        const __m256i c = _mm256_unpacklo_epi32(x2, x3), d = _mm256_unpackhi_epi32(x2, x3);
        out[0] = ints(_mm256_unpacklo_epi64(a, c));
        out[1] = ints(_mm256_unpackhi_epi64(a, c));
        out[2] = ints(_mm256_unpacklo_epi64(b, d));
        out[3] = ints(_mm256_unpackhi_epi64(b, d));
    }

    // As lines(), of eight rows that are interleaved by 8 bytes
    static void lines_of_eights(const char * const * rows, size_t at, ints out[4]) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const auto *  p     = reinterpret_cast<const __m256i *>(rows[0] + at + 64 * i);
            const __m256  first = _mm256_castsi256_ps(_mm256_loadu_si256(p));
            const __m256  other = _mm256_castsi256_ps(_mm256_loadu_si256(p + 1));
            const __m256i even  = _mm256_castps_si256(_mm256_shuffle_ps(first, other, _MM_SHUFFLE(2, 0, 2, 0)));
            const __m256i odd   = _mm256_castps_si256(_mm256_shuffle_ps(first, other, _MM_SHUFFLE(3, 1, 3, 1)));
            out[2 * i]          = ints(_mm256_permute4x64_epi64(even, _MM_SHUFFLE(3, 1, 2, 0)));
            out[2 * i + 1]      = ints(_mm256_permute4x64_epi64(odd, _MM_SHUFFLE(3, 1, 2, 0)));
        }
    }

    static floats f16_of_eights(const char * const * rows, size_t at) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(rows[0] + at)));
    }

    static ints bytes_of_eights(const uint64_t bytes[1]) {
        return ints(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(bytes[0]))));
    }

    // Each byte of x, from 0 to 15, as the entry of a table
    static ints look_up(const uint8_t table[16], ints x) {
        const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
        return ints(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), __m256i(x)));
    }

    static ints dwords(const char * const * rows, size_t at) {
        return ints(_mm256_setr_epi32(dword_at(rows[0] + at), dword_at(rows[1] + at), dword_at(rows[2] + at),
                                      dword_at(rows[3] + at), dword_at(rows[4] + at), dword_at(rows[5] + at),
                                      dword_at(rows[6] + at), dword_at(rows[7] + at)));
    }

    // The first and the second of 16 bytes, of which fewer may be needed
    static void two_dwords(const char * const * rows, size_t at, ints & first, ints & second) {
        const __m256i a = _mm256_unpacklo_epi32(load_pair(rows, 0, at), load_pair(rows, 1, at));
        const __m256i b = _mm256_unpacklo_epi32(load_pair(rows, 2, at), load_pair(rows, 3, at));
        first           = ints(_mm256_unpacklo_epi64(a, b));
        second          = ints(_mm256_unpackhi_epi64(a, b));
    }

    // Bits 4 g to 4 g + 3 of a lane, each as the fifth of a byte. An odd group's lie in the upper half of a byte.
    static ints fifths(ints bits, int g) {
        const int     byte  = g / 2 * 0x01010101;
        const __m256i order = _mm256_setr_epi32(byte, byte + 0x04040404, byte + 0x08080808, byte + 0x0c0c0c0c, byte,
                                                byte + 0x04040404, byte + 0x08080808, byte + 0x0c0c0c0c);
        const __m256i four  = _mm256_shuffle_epi8(__m256i(g % 2 ? bits : bits << 4), order);
        const __m256i one   = _mm256_and_si256(four, _mm256_set1_epi32(int(0x80402010)));
        return ints(_mm256_min_epu8(one, _mm256_set1_epi8(0x10)));
    }

    // Of lanes below 2^16
    static floats from_f16(ints x) {
        const __m256i packed = _mm256_packus_epi32(__m256i(x), __m256i(x));
        return _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0))));
    }

    static ints signed_byte(ints x, int i) {
        return ints(_mm256_srai_epi32(_mm256_slli_epi32(__m256i(x), 24 - 8 * i), 24));
    }

    static ints whole_bytes(ints x) { return x; } // keep their sign

    // 16 bits hold the products of 15 (31, 63) and 127 and their neighbours in 8 (4, 2) groups: 30,480 (31,496,
    // 32,004). Of whole bytes the sign goes to the elements, and a group's sum is 32,512 at most.
    template <class Row>
    struct sum {
        static constexpr int together = traits<Row>.bits == 4   ? 8
                                        : traits<Row>.bits == 5 ? 4
                                        : traits<Row>.bits == 6 ? 2
                                                                : 1;

        __m256i part, whole;

        void begin(int32_t start) { whole = traits<Row>.bits == 8 ? _mm256_setzero_si256() : _mm256_set1_epi32(start); }

        void add(int group, ints values, int32_t elements) {
            const __m256i w = __m256i(values), x = _mm256_set1_epi32(elements);
            const __m256i products = traits<Row>.bits == 8
                                         ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
                                         : _mm256_maddubs_epi16(w, x);
            part                   = group % together == 0 ? products : _mm256_add_epi16(part, products);
            // GCC 12 else forms all products of a block before it adds them, and has to store them.
            __asm__ volatile("" : "+x"(part));
            if (group % together == together - 1) {
                whole = _mm256_add_epi32(whole, _mm256_madd_epi16(part, _mm256_set1_epi16(1)));
            }
        }

        ints end() const { return ints(whole); }
    };
};

} // namespace
} // namespace mixedkv
