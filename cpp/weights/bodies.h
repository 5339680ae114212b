// What the bodies share: the layouts of rows and packed columns. What is compiled here has internal linkage: the linker
// keeps one copy of an inline function, and that could be the one for an instruction set which this machine lacks.

#pragma once

#include "weights.h"

#include "attention/simd/half.h"

#include <cstring>
#include <type_traits>

#define MIXEDKV_INLINE        inline __attribute__((always_inline))
#define MIXEDKV_INLINE_LAMBDA __attribute__((always_inline))

namespace mixedkv {
namespace {

// A block of a column, as packed. Either half has two zeros on each side: where a dword of a row ends in a scale, the
// scale is multiplied with zeros.
struct column_block {
    float   scale;
    float   sum;      // of the elements, so with the scale in it
    int32_t start[2]; // of the sums of products with rows whose values have a bias, for each of the scales of a block
    int8_t  halves[2][WEIGHTS_BLOCK / 2 + 4];

    const int8_t * group(int g) const { return halves[g / 4] + 2 + g % 4 * 4; } // of four elements
};
static_assert(sizeof(column_block) == 56);

struct column_q8_0 { // as ggml has it
    uint16_t scale;
    int8_t   values[WEIGHTS_BLOCK];
};
static_assert(sizeof(column_q8_0) == 34);

// The types of rows, as ggml lays them out. An element is scale * (value - bias) + least. What kernels ask of a type is
// in `traits` below.
struct row_q4_0 {
    uint16_t scale;
    uint8_t  nibbles[16]; // element i and i + 16
};
static_assert(sizeof(row_q4_0) == 18);

struct row_q4_1 {
    uint16_t scale;
    uint16_t least;
    uint8_t  nibbles[16];
};
static_assert(sizeof(row_q4_1) == 20);

struct row_q5_0 {
    uint16_t scale;
    uint8_t  fifth[4]; // bit i of element i
    uint8_t  nibbles[16];
};
static_assert(sizeof(row_q5_0) == 22);

struct row_q5_1 {
    uint16_t scale;
    uint16_t least;
    uint8_t  fifth[4];
    uint8_t  nibbles[16];
};
static_assert(sizeof(row_q5_1) == 24);

struct row_q8_0 {
    uint16_t scale;
    int8_t   values[WEIGHTS_BLOCK];
};
static_assert(sizeof(row_q8_0) == 34);

struct row_q4_k {
    uint16_t scale;       // of the scales of blocks
    uint16_t least;       // of their least values, which are subtracted
    uint8_t  factors[12]; // 8 of each, in 6 bits
    uint8_t  nibbles[128];
};
static_assert(sizeof(row_q4_k) == 144);

struct row_q5_k {
    uint16_t scale;
    uint16_t least;
    uint8_t  factors[12];
    uint8_t  fifth[32]; // bit b of element i of block b
    uint8_t  nibbles[128];
};
static_assert(sizeof(row_q5_k) == 176);

struct row_q6_k {
    uint8_t  nibbles[128];
    uint8_t  upper[64];
    int8_t   factors[16];
    uint16_t scale;
};
static_assert(sizeof(row_q6_k) == 210);

// A scale is a power of two, by its exponent; value is a place in the table mxfp4_values.
struct row_mxfp4 {
    uint8_t exponent;
    uint8_t nibbles[16];
};
static_assert(sizeof(row_mxfp4) == 17);

// Twice the numbers of E2M1, with the bias
constexpr uint8_t mxfp4_values[16] = { 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0 };

// Eight rows of Q4_0, interleaved by 8 bytes of each; values have a sign in 4 bits
struct rows_q4_0_x8 {
    uint16_t scale[8];
    uint8_t  nibbles[8 * 16];
};
static_assert(sizeof(rows_q4_0_x8) == 8 * sizeof(row_q4_0));

// Eight rows of Q4_K, interleaved by 8 bytes of each
struct rows_q4_k_x8 {
    uint16_t scale[8];
    uint16_t least[8];
    uint8_t  factors[8][12]; // of each block: those of eight rows, packed as row_q4_k packs eight blocks
    uint8_t  nibbles[8 * 128];
};
static_assert(sizeof(rows_q4_k_x8) == 8 * sizeof(row_q4_k));

// Eight rows of MXFP4, interleaved by 8 bytes of each
struct rows_mxfp4_x8 {
    uint8_t exponent[8];
    uint8_t nibbles[8 * 16];
};
static_assert(sizeof(rows_mxfp4_x8) == 8 * sizeof(row_mxfp4));

template <class... Rows>
struct row_list {};

// All types: a new one is a struct above, a name here, its traits below, and how it is unpacked (unpack.h, and
// weights_scalar.cpp for the twin).
using row_types = row_list<row_q4_0, row_q4_1, row_q5_0, row_q5_1, row_q8_0, row_q4_k, row_q5_k, row_q6_k, row_mxfp4,
                           rows_q4_0_x8, rows_q4_k_x8, rows_mxfp4_x8>;

struct row_traits {
    int  type;      // WEIGHTS_...
    int  bits;      // of a value, which has no sign
    int  bias;      // of a value
    int  scales;    // of a block of 32 elements
    bool has_least; // of a block
    int  blocks;    // of one struct
    int  together;  // rows in one struct
};

template <class Row>
constexpr row_traits traits = Row::is_not_in_the_table;

// clang-format off
//                                                         type            bits  bias scales least blocks together
template <> constexpr row_traits traits<row_q4_0>      = { WEIGHTS_Q4_0,     4,    8, 1,     false, 1,     1 };
template <> constexpr row_traits traits<row_q4_1>      = { WEIGHTS_Q4_1,     4,    0, 1,     true,  1,     1 };
template <> constexpr row_traits traits<row_q5_0>      = { WEIGHTS_Q5_0,     5,   16, 1,     false, 1,     1 };
template <> constexpr row_traits traits<row_q5_1>      = { WEIGHTS_Q5_1,     5,    0, 1,     true,  1,     1 };
template <> constexpr row_traits traits<row_q8_0>      = { WEIGHTS_Q8_0,     8,  128, 1,     false, 1,     1 };
template <> constexpr row_traits traits<row_q4_k>      = { WEIGHTS_Q4_K,     4,    0, 1,     true,  8,     1 };
template <> constexpr row_traits traits<row_q5_k>      = { WEIGHTS_Q5_K,     5,    0, 1,     true,  8,     1 };
template <> constexpr row_traits traits<row_q6_k>      = { WEIGHTS_Q6_K,     6,   32, 2,     false, 8,     1 };
template <> constexpr row_traits traits<row_mxfp4>     = { WEIGHTS_MXFP4,    5,   12, 1,     false, 1,     1 };
template <> constexpr row_traits traits<rows_q4_0_x8>  = { WEIGHTS_Q4_0_X8,  4,    8, 1,     false, 1,     8 };
template <> constexpr row_traits traits<rows_q4_k_x8>  = { WEIGHTS_Q4_K_X8,  4,    0, 1,     true,  8,     8 };
template <> constexpr row_traits traits<rows_mxfp4_x8> = { WEIGHTS_MXFP4_X8, 5,   12, 1,     false, 1,     8 };
// clang-format on

template <class F, class... Rows>
bool with_row_type(row_list<Rows...>, int type, F && f) {
    return ((traits<Rows>.type == type && (f(static_cast<const Rows *>(nullptr)), true)) || ...);
}

// The struct that with_row_type() hands on
template <class Pointer>
using row_of = std::remove_cv_t<std::remove_pointer_t<Pointer>>;

// Calls f with a null pointer to the struct of the type; returns false for a type that is none of these.
template <class F>
bool with_row_type(int type, F && f) {
    return with_row_type(row_types(), type, f);
}

} // namespace

// A body's functions, for quantised rows or for those in 16 bits; null where the compiler does not know the instruction
// set
struct weights_kernels {
    const char * name;
    bool         of_halves; // rows in 16 bits; others are of quantised rows
    int          together;  // largest number of rows interleaved in a struct that it reads
    bool (*supported)();
    size_t (*work_bytes)(int64_t n_elements, int64_t n_chosen); // that a thread needs, with columns that are chosen
    size_t (*columns_bytes)(int type, int64_t n_elements, int64_t n_columns);
    void (*pack)(const weights_columns & columns, const float * x, int64_t column, int64_t first, int64_t n);
    void (*run)(const weights_product & product, void * work, int64_t row_0, int64_t row_1);
};

// Those that the compiler has instructions for are there: CMakeLists.txt.
const weights_kernels * weights_amx();        // rows in 16 bits, many columns
const weights_kernels * weights_tiles();      // quantised rows, many columns
const weights_kernels * weights_bf16();       // quantised rows, many columns, with other bits than all of these
const weights_kernels * weights_avx512_f16(); // rows in 16 bits, a single column
const weights_kernels * weights_avx512();
const weights_kernels * weights_avxvnni();
const weights_kernels * weights_avx2();
const weights_kernels * weights_i8mm();
const weights_kernels * weights_dotprod();
const weights_kernels * weights_neon();
const weights_kernels * weights_scalar();

// Of that name and for such rows; nullptr: the compiler or the processor does not have it.
const weights_kernels * find_weights(const char * name, bool of_halves);

} // namespace mixedkv
