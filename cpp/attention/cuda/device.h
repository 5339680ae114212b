// What the kernels in this folder use of a GPU: threads, shared memory, warp operations, tensor cores. Compiled by nvcc
// these are CUDA's own. Any other compiler takes `emulated_device.h`, by which tests run the same kernels on a CPU.
//
// Two F16 numbers that lie in one word are a uint32_t here, the first in the low bits.

#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__

#include <cuda_fp16.h>

#define MIXEDKV_DEVICE                  static __device__ __forceinline__
#define MIXEDKV_DEVICE_MEMBER           __device__ __forceinline__
#define MIXEDKV_SHARED(T)               static __host__ __device__ constexpr T
#define MIXEDKV_SHARED_MEMBER           __host__ __device__ __forceinline__
#define MIXEDKV_KERNEL(threads, blocks) static __global__ void __launch_bounds__(threads, blocks)

namespace mixedkv {
namespace cuda {

MIXEDKV_DEVICE int thread() {
    return int(threadIdx.x);
}

MIXEDKV_DEVICE int block_x() {
    return int(blockIdx.x);
}

MIXEDKV_DEVICE int block_y() {
    return int(blockIdx.y);
}

MIXEDKV_DEVICE int block_z() {
    return int(blockIdx.z);
}

// The dynamic shared memory of the block, 16-byte aligned
MIXEDKV_DEVICE char * shared_memory() {
    extern __shared__ __align__(16) char memory[];
    return memory;
}

// A kernel starts while the one before it still runs, on devices that can: what that one has written is there after
// wait_for_previous, and the next may start from start_next on.
MIXEDKV_DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

MIXEDKV_DEVICE void start_next() {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

MIXEDKV_DEVICE void sync_block() {
    __syncthreads();
}

MIXEDKV_DEVICE void sync_warp() {
    __syncwarp();
}

// A barrier of the block that says whether x is true in any of its threads
MIXEDKV_DEVICE bool any_thread(bool x) {
    return __syncthreads_or(x) != 0;
}

MIXEDKV_DEVICE float shuffle_xor(float x, int mask) {
    return __shfl_xor_sync(0xffffffffu, x, mask);
}

MIXEDKV_DEVICE uint32_t shuffle_xor(uint32_t x, int mask) {
    return __shfl_xor_sync(0xffffffffu, x, mask);
}

// What the lane `from` gives
MIXEDKV_DEVICE float shuffle(float x, int from) {
    return __shfl_sync(0xffffffffu, x, from);
}

MIXEDKV_DEVICE uint32_t shuffle(uint32_t x, int from) {
    return __shfl_sync(0xffffffffu, x, from);
}

MIXEDKV_DEVICE bool any_lane(bool x) {
    return __any_sync(0xffffffffu, x);
}

// A bit of each lane
MIXEDKV_DEVICE uint32_t all_lanes(bool x) {
    return __ballot_sync(0xffffffffu, x);
}

MIXEDKV_DEVICE uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
    return __byte_perm(low, high, selector);
}

// The same, but that nibbles of the selector may have a high bit: the sign of a byte is then all its bits.
MIXEDKV_DEVICE uint32_t look_up_bytes(uint32_t low, uint32_t high, uint32_t selector) {
    uint32_t y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(low), "r"(high), "r"(selector));
    return y;
}

// As a CPU rounds them: each by itself, subnormal numbers among them, whatever flags the compiler has
MIXEDKV_DEVICE float exact_sum(float a, float b) {
    float y;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

MIXEDKV_DEVICE float exact_product(float a, float b) {
    float y;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

MIXEDKV_DEVICE float exact_quotient(float a, float b) {
    float y;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

MIXEDKV_DEVICE float exact_root(float x) {
    float y;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

MIXEDKV_DEVICE float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

MIXEDKV_DEVICE float tanh_of(float x) {
    return tanhf(x);
}

// NaN if one of them is: a comparison takes two instructions
MIXEDKV_DEVICE float max_of(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

MIXEDKV_DEVICE float half_bits_to_float(uint16_t x) {
    return __half2float(__ushort_as_half(x));
}

MIXEDKV_DEVICE uint32_t float_bits(float x) {
    return __float_as_uint(x);
}

MIXEDKV_DEVICE uint16_t float_to_half_bits(float x) {
    return __half_as_ushort(__float2half_rn(x));
}

MIXEDKV_DEVICE uint32_t pack_f16x2(float low, float high) {
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

MIXEDKV_DEVICE uint32_t subtract_f16x2(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

MIXEDKV_DEVICE uint32_t multiply_f16x2(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// a * b + c, rounded once
MIXEDKV_DEVICE uint32_t multiply_add_f16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t y;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}

// (a & mask) | bits
MIXEDKV_DEVICE uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
    uint32_t y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(a), "r"(mask), "r"(bits));
    return y;
}

MIXEDKV_DEVICE uint32_t shared_address(const void * p) {
    return uint32_t(__cvta_generic_to_shared(p));
}

// c[16, 8] += a[16, 16] b[16, 8] by one warp. Lane 4 g + t holds, two columns or rows in a word:
//   a: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8);  b: (2t, g), (2t + 8, g);  c: (g, 2t), (g, 2t + 1), (g + 8,
//   2t), ...
MIXEDKV_DEVICE void multiply_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Transposes an 8 x 8 matrix of F16 values: lane 4 g + t has (g, 2t) and (g, 2t + 1), and gets (2t, g) and (2t + 1, g).
MIXEDKV_DEVICE uint32_t transpose_8x8(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// Four 8 x 8 matrices of F16 values in shared memory: lane l says where row l % 8 of matrix l / 8 begins, 16-byte
// aligned. Lane 4 g + t gets (g, 2t) and (g, 2t + 1) of each, transposed (2t, g) and (2t + 1, g).
MIXEDKV_DEVICE void load_matrices(uint32_t (&y)[4], const void * row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3])
                 : "r"(shared_address(row))
                 : "memory");
}

MIXEDKV_DEVICE void load_matrices_transposed(uint32_t (&y)[4], const void * row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Copies to shared memory that run while the thread goes on: what it has committed is there when wait_copies<n> returns
// and at most the n newest commits are under way. Both addresses are multiples of `bytes`: 4, 8 or 16. Of 2 bytes there
// are no such copies: they are made at once.
template <int bytes>
MIXEDKV_DEVICE void copy_async(void * to, const void * from) {
    if constexpr (bytes == 2) {
        *static_cast<uint16_t *>(to) = *static_cast<const uint16_t *>(from);
    } else if constexpr (bytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(bytes)
                     : "memory");
    }
}

MIXEDKV_DEVICE void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int n>
MIXEDKV_DEVICE void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}

} // namespace cuda
} // namespace mixedkv

#else
#include "emulated_device.h"
#endif

namespace mixedkv {
namespace cuda {

constexpr int warp_size = 32;

MIXEDKV_DEVICE int lane() {
    return thread() % warp_size;
}

MIXEDKV_DEVICE uint32_t load_u16(const char * p) {
    return *reinterpret_cast<const uint16_t *>(p);
}

// Of one load: n words from a multiple of as many
template <int n>
struct alignas(4 * n) words {
    uint32_t at[n];
};

template <int n>
MIXEDKV_DEVICE words<n> load_words(const char * p) {
    return *reinterpret_cast<const words<n> *>(p);
}

MIXEDKV_DEVICE float load_half(const char * p) {
    return half_bits_to_float(*reinterpret_cast<const uint16_t *>(p));
}

// The same half twice
MIXEDKV_DEVICE uint32_t twice_f16x2(uint32_t x) {
    return permute_bytes(x, x, 0x1010);
}

MIXEDKV_DEVICE int min_of(int a, int b) {
    return a < b ? a : b;
}

} // namespace cuda
} // namespace mixedkv
