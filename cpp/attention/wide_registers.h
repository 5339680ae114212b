// Code that is compiled for each x86-64 processor, and once more for those with AVX2, where no body is chosen at run
// time: the encoders in ggml's own library, and what looks at attention's weights.

#pragma once

#include <cstdint>
#include <type_traits>

namespace mixedkv {
namespace {

// Vectors of as many lanes as a register has: wider ones GCC takes apart, lane by lane
template <int lanes>
struct vectors;

template <>
struct vectors<4> {
    using numbers = float __attribute__((vector_size(16)));
    using truths  = int32_t __attribute__((vector_size(16)));
};

template <>
struct vectors<8> {
    using numbers = float __attribute__((vector_size(32)));
    using truths  = int32_t __attribute__((vector_size(32)));
};

template <int lanes>
using numbers = typename vectors<lanes>::numbers;
template <int lanes>
using truths = typename vectors<lanes>::truths;

// Windows aligns no stack for vectors of 32 bytes.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(_WIN32)
const bool has_avx2 = __builtin_cpu_supports("avx2");

template <class F>
__attribute__((target("avx2"))) void call_by_avx2(const F & f) {
    f(std::integral_constant<int, 8>{});
}
#endif

// Calls f with the number of floats that a register has. Whatever has such vectors in f has to be inlined. Sums and
// products are the same ones either way, and so are the bits: AVX2 alone fuses none.
template <class F>
[[gnu::always_inline]] inline void with_widest_registers(const F & f) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(_WIN32)
    if (has_avx2) {
        call_by_avx2(f);
        return;
    }
#endif
    f(std::integral_constant<int, 4>{});
}

} // namespace
} // namespace mixedkv
