#include "least_error_body.h"

#include <immintrin.h>

namespace mixedkv {
namespace {

// Lanes 4 i to 4 i + 3 have the four scales of element i.
struct four_elements {
    using floats = __m512;

    static constexpr int together = 4;

    static floats four_times(const float * x) {
        const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
        return _mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(_mm_loadu_ps(x)));
    }
    static floats of_all(const four & x) { return _mm512_broadcast_f32x4(__m128(x)); }

    static four add_all(const floats & x) {
        const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
        return four(_mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
    }

    template <class Integers>
    static floats to_integers(const floats & x) {
        const __m512 high = _mm512_set1_ps(Integers::high), whole = _mm512_set1_ps(0x1.8p23f);
        return _mm512_sub_ps(_mm512_add_ps(_mm512_min_ps(x, high), whole), whole); // NaN becomes the highest
    }

    template <class Integers>
    static uint32_t store_integers(const float * x, float inverse, uint8_t * nibbles) {
        const auto half = [&](int at) {
            const __m512 y = to_integers<Integers>(_mm512_mul_ps(_mm512_loadu_ps(x + at), _mm512_set1_ps(inverse)));
            return _mm512_sub_epi32(_mm512_cvtps_epi32(y), _mm512_set1_epi32(Integers::low));
        };
        const __m512i low = half(0), high = half(16), fifth = _mm512_set1_epi32(16);
        const __m512i nibble = _mm512_set1_epi32(15);
        const __m512i both =
            _mm512_or_si512(_mm512_and_si512(low, nibble), _mm512_slli_epi32(_mm512_and_si512(high, nibble), 4));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(nibbles), _mm512_cvtepi32_epi8(both));
        return uint32_t(_mm512_test_epi32_mask(low, fifth)) | uint32_t(_mm512_test_epi32_mask(high, fifth)) << 16;
    }
};

} // namespace

const least_error_writers * least_error_avx512() {
    static constexpr least_error_writers writers = writers_of<four_elements>();
    return &writers;
}

} // namespace mixedkv
