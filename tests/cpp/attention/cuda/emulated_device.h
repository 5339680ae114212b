// A GPU on a CPU, for tests: the functions of cpp/attention/cuda/device.h, and `launch`, which runs a kernel. Each
// thread of a block is a fibre. A fibre runs until it meets the others of its warp or block, at a barrier or an
// exchange.
//
// Blocks run one after the other. Copies to shared memory are made when they are waited for, the latest time at which a
// GPU may make them, so a kernel that reads too early reads what was there before.

#pragma once

#include "attention/simd/half.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define MIXEDKV_DEVICE                  static inline
#define MIXEDKV_DEVICE_MEMBER           inline
#define MIXEDKV_SHARED(T)               static constexpr T
#define MIXEDKV_SHARED_MEMBER           inline
#define MIXEDKV_KERNEL(threads, blocks) static void

namespace mixedkv {
namespace cuda {

struct grid_size {
    int x = 1, y = 1, z = 1;
};

// Runs `kernel` in each block of the grid, by `threads` threads, a multiple of 32, with so many bytes of shared memory.
void launch(grid_size grid, int threads, size_t shared_bytes, const std::function<void()> & kernel);

int    thread();
int    block_x();
int    block_y();
int    block_z();
char * shared_memory();
void   sync_block();
void   sync_warp();
bool   any_thread(bool x);

// What each lane of the warp gives: all lanes call it together. Valid until the lane's next call.
const uint32_t (*exchange(const uint32_t * words, int n))[8];

void copy_async_bytes(void * to, const void * from, int bytes);
void commit_copies();
void wait_for_copies(int n);

template <int bytes>
inline void copy_async(void * to, const void * from) {
    static_assert(bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16, "no copy of such a size");
    copy_async_bytes(to, from, bytes);
}

template <int n>
inline void wait_copies() {
    wait_for_copies(n);
}

inline void wait_for_previous() {}
inline void start_next() {}

inline uint32_t float_bits(float x) {
    uint32_t y;
    std::memcpy(&y, &x, 4);
    return y;
}

inline float float_of(uint32_t x) {
    float y;
    std::memcpy(&y, &x, 4);
    return y;
}

inline uint32_t shuffle_xor(uint32_t x, int mask) {
    return exchange(&x, 1)[(thread() % 32) ^ mask][0];
}

inline float shuffle_xor(float x, int mask) {
    return float_of(shuffle_xor(float_bits(x), mask));
}

inline uint32_t shuffle(uint32_t x, int from) {
    return exchange(&x, 1)[from][0];
}

inline float shuffle(float x, int from) {
    return float_of(shuffle(float_bits(x), from));
}

inline uint32_t all_lanes(bool x) {
    const uint32_t word = x;
    const auto *   all  = exchange(&word, 1);
    uint32_t       res  = 0;
    for (int lane = 0; lane < 32; lane++) {
        res |= all[lane][0] << lane;
    }
    return res;
}

inline bool any_lane(bool x) {
    return all_lanes(x) != 0;
}

inline uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t from = uint64_t(high) << 32 | low;
    uint32_t       res  = 0;
    for (int i = 0; i < 4; i++) {
        res |= uint32_t(from >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    }
    return res;
}

inline uint32_t look_up_bytes(uint32_t low, uint32_t high, uint32_t selector) {
    const uint32_t bytes = permute_bytes(low, high, selector), signs = (bytes >> 7 & 0x01010101) * 0xff;
    uint32_t       res = 0;
    for (int i = 0; i < 4; i++) {
        res |= ((selector >> 4 * i & 8) ? signs : bytes) & 0xffu << 8 * i;
    }
    return res;
}

inline float exact_sum(float a, float b) {
    return a + b;
}

inline float exact_product(float a, float b) {
    return a * b;
}

inline float exact_quotient(float a, float b) {
    return a / b;
}

inline float exact_root(float x) {
    return std::sqrt(x);
}

inline float exp2_of(float x) {
    return std::exp2(x);
}

inline float tanh_of(float x) {
    return std::tanh(x);
}

inline float max_of(float a, float b) {
    return a > b || a != a ? a : b;
}

inline float half_bits_to_float(uint16_t x) {
    return half_to_float(x);
}

inline uint16_t float_to_half_bits(float x) {
    return float_to_half(x);
}

inline uint32_t pack_f16x2(float low, float high) {
    return float_to_half(low) | uint32_t(float_to_half(high)) << 16;
}

inline float low_half(uint32_t x) {
    return half_to_float(uint16_t(x));
}

inline float high_half(uint32_t x) {
    return half_to_float(uint16_t(x >> 16));
}

inline uint32_t subtract_f16x2(uint32_t a, uint32_t b) {
    return pack_f16x2(low_half(a) - low_half(b), high_half(a) - high_half(b));
}

inline uint32_t multiply_f16x2(uint32_t a, uint32_t b) {
    return pack_f16x2(low_half(a) * low_half(b), high_half(a) * high_half(b));
}

// Products of F16 values are exact in F32; their sum is rounded twice, which kernels that add small integers do not
// see.
inline uint32_t multiply_add_f16x2(uint32_t a, uint32_t b, uint32_t c) {
    return pack_f16x2(low_half(a) * low_half(b) + low_half(c), high_half(a) * high_half(b) + high_half(c));
}

inline uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
    return (a & mask) | bits;
}

inline void multiply_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint32_t words[6] = { a[0], a[1], a[2], a[3], b0, b1 };
    const auto *   all      = exchange(words, 6);
    const int      g = thread() % 32 / 4, t = thread() % 4;
    for (int i = 0; i < 4; i++) {
        const int row = i / 2, column = 2 * t + i % 2; // row: which of g and g + 8
        double    sum = 0.0;
        for (int k = 0; k < 16; k += 2) {
            const uint32_t x = all[4 * g + k % 8 / 2][row + k / 8 * 2];
            const uint32_t y = all[4 * column + k % 8 / 2][4 + k / 8];
            sum += double(low_half(x)) * low_half(y) + double(high_half(x)) * high_half(y);
        }
        c[i] += float(sum);
    }
}

inline uint32_t transpose_8x8(uint32_t x) {
    const auto * all = exchange(&x, 1);
    const int    g = thread() % 32 / 4, t = thread() % 4;
    const auto   at = [&](int row, int column) { return all[4 * row + column / 2][0] >> 16 * (column % 2) & 0xffff; };
    return at(2 * t, g) | at(2 * t + 1, g) << 16;
}

inline void load_rows_of_matrices(uint32_t (&y)[4], const void * row, bool transposed) {
    uint32_t words[4];
    std::memcpy(words, row, 16);
    const auto * all = exchange(words, 4);
    const int    g = thread() % 32 / 4, t = thread() % 4;
    for (int matrix = 0; matrix < 4; matrix++) {
        const auto at = [&](int i, int j) { return all[8 * matrix + i][j / 2] >> 16 * (j % 2) & 0xffff; };
        y[matrix]     = transposed ? at(2 * t, g) | at(2 * t + 1, g) << 16 : at(g, 2 * t) | at(g, 2 * t + 1) << 16;
    }
}

inline void load_matrices(uint32_t (&y)[4], const void * row) {
    load_rows_of_matrices(y, row, false);
}

inline void load_matrices_transposed(uint32_t (&y)[4], const void * row) {
    load_rows_of_matrices(y, row, true);
}

} // namespace cuda
} // namespace mixedkv
