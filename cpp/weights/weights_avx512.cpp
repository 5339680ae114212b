// AVX-512 with VNNI: 32 rows by 6 columns. Bytes without a sign are multiplied with those that have one, and four
// products added to 32 bits, in one instruction. Single columns with rows in 16 bits are multiplied in F32.

#include "bodies.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
#include "panel.h"

#include <cmath>
#include <immintrin.h>

namespace mixedkv {

bool cpu_has_avx512(); // attention/cpu.cpp

namespace {

struct avx512 {
    using ints                         = uint32_t __attribute__((vector_size(64)));
    using floats                       = __m512;
    static constexpr int  lanes        = 16;
    static constexpr int  vectors      = 2;
    static constexpr int  columns      = 6; // 12 sums of integers and 12 of floats: 32 registers hold them
    static constexpr int  few          = 8; // columns, for which no panel is made
    static constexpr bool opens_many   = true;
    static constexpr int  panel_blocks = 16;

    static floats load(const float * p) { return _mm512_loadu_ps(p); }
    static void   store(float * p, floats x) { _mm512_storeu_ps(p, x); }
    static floats set(float x) { return _mm512_set1_ps(x); }
    static floats fma(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
    static floats to_floats(ints x) { return _mm512_cvtepi32_ps(__m512i(x)); }
    static floats as_floats(ints bits) { return _mm512_castsi512_ps(__m512i(bits)); }

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

    static floats halves_of_eights(const char * const * rows, size_t at) {
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

    static floats from_halves(ints x) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(__m512i(x))); }

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

// --- rows in 16 bits

struct f16 {
    static __m512 load(const uint16_t * p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    }
    static __m512 rounded(__m512 x) { return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
};

struct bf16 {
    static __m512 load(const uint16_t * p) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
    static __m512 rounded(__m512 x) { // to the nearest, ties to even; NaN is NaN, whatever its lower bits are
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i odd  = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i up   = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        const __m512  near = _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(int(0xffff0000))));
        return _mm512_mask_mov_ps(near, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_ps(NAN));
    }
};

template <class F>
void with_half_type(int type, F && f) {
    type == WEIGHTS_F16 ? f(f16()) : f(bf16());
}

size_t halves_bytes(int, int64_t n_elements, int64_t n_columns) {
    return size_t(n_elements * n_columns) * sizeof(float);
}

// To F32, one column after the other
void pack_halves(const weights_columns & columns, const float * x, int64_t column, int64_t first, int64_t n) {
    float * out = static_cast<float *>(columns.packed) + column * columns.n_elements + first * WEIGHTS_BLOCK;
    with_half_type(columns.type, [&](auto half) {
        for (int64_t i = 0; i < n * WEIGHTS_BLOCK; i += 16) {
            _mm512_storeu_ps(out + i, half.rounded(_mm512_loadu_ps(x + i)));
        }
    });
}

// A row is read once for all columns, and lines of the next ones are fetched meanwhile.
template <class Half>
void multiply_row(const weights_product & p, const uint16_t * row, int64_t r) {
    constexpr int ahead = 4096 / sizeof(uint16_t);
    for (int64_t c = 0; c < p.n_columns; c++) {
        const float * column  = static_cast<const float *>(p.columns) + c * p.n_elements;
        __m512        sums[2] = { _mm512_setzero_ps(), _mm512_setzero_ps() };
        for (int64_t i = 0; i < p.n_elements; i += 32) {
            __builtin_prefetch(row + i + ahead, 0, 2);
            sums[0] = _mm512_fmadd_ps(Half::load(row + i), _mm512_loadu_ps(column + i), sums[0]);
            sums[1] = _mm512_fmadd_ps(Half::load(row + i + 16), _mm512_loadu_ps(column + i + 16), sums[1]);
        }
        float * out = reinterpret_cast<float *>(reinterpret_cast<char *>(p.out) + c * p.out_bytes);
        out[r]      = _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1]));
    }
}

void run_halves(const weights_product & p, void *, int64_t row_0, int64_t row_1) {
    with_half_type(p.type, [&](auto half) {
        for (int64_t r = row_0; r < row_1; r++) {
            const char * row = static_cast<const char *>(p.rows) + r * p.row_bytes;
            multiply_row<decltype(half)>(p, reinterpret_cast<const uint16_t *>(row), r);
        }
    });
}

} // namespace

const weights_kernels * weights_avx512_halves() {
    static const weights_kernels kernels = { "avx512", cpu_has_avx512, 0, halves_bytes, pack_halves, run_halves };
    return &kernels;
}

const weights_kernels * weights_avx512() {
    static const weights_kernels kernels = { "avx512",        cpu_has_avx512, 0,
                                             quantised_bytes, pack_quantised, run_body<avx512> };
    return &kernels;
}

} // namespace mixedkv
#else
namespace mixedkv {

const weights_kernels * weights_avx512() {
    return nullptr;
}

const weights_kernels * weights_avx512_halves() {
    return nullptr;
}

} // namespace mixedkv
#endif
