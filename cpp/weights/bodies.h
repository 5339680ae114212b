// What the bodies share: the layouts of rows and packed columns. What is compiled here has internal linkage: the linker
// keeps one copy of an inline function, and that could be the one for an instruction set which this machine lacks.

#pragma once

#include "weights.h"

#include "attention/simd/half.h"

#include <cstring>

namespace mixedkv {
namespace {

constexpr int     panel_rows    = 16; // whose products a body forms at once
constexpr int64_t panel_blocks  = 16; // of a row, opened at once: 10 KB of 16 rows, which stay in the nearest cache
constexpr int     panel_columns = 4;
static_assert(WEIGHTS_ROWS % panel_rows == 0);

struct row_q4_1 {
    uint16_t scale;
    uint16_t least;
    uint8_t  nibbles[WEIGHTS_BLOCK / 2]; // element i and i + 16
};
static_assert(sizeof(row_q4_1) == 20);

struct column_q8_1 { // as ggml has it
    uint16_t scale;
    uint16_t sum;
    int8_t   values[WEIGHTS_BLOCK];
};
static_assert(sizeof(column_q8_1) == 36);

struct column_block {
    float  scale;
    float  sum; // of the elements, so with the scale in it
    int8_t values[WEIGHTS_BLOCK];
};
static_assert(sizeof(column_block) == 40);

} // namespace

// A body's functions; null where the compiler does not know the instruction set
struct weights_kernels {
    const char * name;
    bool (*supported)();
    void (*run)(const weights_product & product, int64_t row_0, int64_t row_1);
};

const weights_kernels * weights_avx2();
const weights_kernels * weights_scalar();

} // namespace mixedkv
