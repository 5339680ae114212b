// Products of weights with activations: docs/decisions/062-own-products-with-weights.md.
// In C, for ggml: it is compiled into ggml-base, and ggml_mul_mat.h calls it from ggml's product of matrices.
//
// A sum has one order, whatever the number of columns and threads: with quantised rows a column has the same bits in
// any batch, with rows in 16 bits in any of 16 columns and more. MIXEDKV_WEIGHTS=bf16 gives that up.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define WEIGHTS_BLOCK        32 // elements that share a scale, of rows and of columns
#define WEIGHTS_ROWS         32 // that a thread draws at once: 192 are few enough to share between several
#define WEIGHTS_ALIGNMENT    64 // of packed columns and of a thread's memory, in bytes
#define WEIGHTS_F16_COLUMNS  16 // fewer with rows in 16 bits, but for single ones, are left to llama.cpp
#define WEIGHTS_TILE_COLUMNS 16 // and more are multiplied with quantised rows by tiles, where there are any
#define WEIGHTS_BF16_COLUMNS 64 // and more with rows dequantised to BF16, with MIXEDKV_WEIGHTS=bf16

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__) && !defined(_WIN32)
#define WEIGHTS_API __attribute__((visibility("default")))
#else
#define WEIGHTS_API
#endif

// Layouts of rows as in ggml's files, and ggml's numbers. _X8 are eight rows together, as llama.cpp repacks them on
// x86.
enum weights_type {
    WEIGHTS_F16   = 1,
    WEIGHTS_Q4_0  = 2,
    WEIGHTS_Q4_1  = 3,
    WEIGHTS_Q5_0  = 6,
    WEIGHTS_Q5_1  = 7,
    WEIGHTS_Q8_0  = 8,
    WEIGHTS_Q4_K  = 12,
    WEIGHTS_Q5_K  = 13,
    WEIGHTS_Q6_K  = 14,
    WEIGHTS_BF16  = 30,
    WEIGHTS_MXFP4 = 39,

    WEIGHTS_X8       = 256,
    WEIGHTS_Q4_0_X8  = WEIGHTS_X8 + WEIGHTS_Q4_0,
    WEIGHTS_Q4_K_X8  = WEIGHTS_X8 + WEIGHTS_Q4_K,
    WEIGHTS_MXFP4_X8 = WEIGHTS_X8 + WEIGHTS_MXFP4,
};

// out[column][row] = rows[row] . columns[column]
struct weights_product {
    int          type;       // of rows
    int64_t      n_elements; // of a row and of a column, a multiple of WEIGHTS_BLOCK
    int64_t      n_rows;
    int64_t      n_columns;
    const void * rows;
    size_t       row_bytes; // from a row to the next, or an eighth of eight rows
    const void * columns;   // packed by weights_pack
    float *      out;
    size_t       out_bytes; // from a column of out to the next

    // A bit for each row, null: all are wanted. Blocks of WEIGHTS_ROWS rows without one need not be computed, and are
    // minus infinity then.
    const uint32_t * wanted;

    // Null: all columns in order. Otherwise, with quantised rows alone, n_columns pairs: which of the n_packed columns
    // is multiplied, and to which column of out it goes
    const int32_t * chosen;
    int64_t         n_packed;
};

// A node of ggml's that is a product has the address of `wanted` from here on in its op_params, or zeros.
#define WEIGHTS_WANTED_PARAM 14

// The type of rows that llama.cpp has repacked, or -1 where such rows have another layout
static inline int weights_repacked(int type) {
#if defined(__x86_64__) || defined(_M_X64)
    return WEIGHTS_X8 + type;
#else
    (void)type;
    return -1;
#endif
}

// Whether llama.cpp must leave rows of this type as they lie in a file, for products to be made here
WEIGHTS_API bool weights_keep_layout(int type);

// Whether products of rows of this type with so many columns are made here, on this processor; all functions below need
// that. llama.cpp keeps some columns of rows in 16 bits. MIXEDKV_WEIGHTS=llama.cpp leaves all products to it, and with
// MIXEDKV_WEIGHTS=bf16 many columns are multiplied in BF16. MIXEDKV_ISA forces a body as it does for attention.
WEIGHTS_API bool weights_supported(int type, int64_t n_columns);

// Columns as products with this type of rows read them, at an address that is a multiple of WEIGHTS_ALIGNMENT
struct weights_columns {
    int     type;       // of rows
    bool    are_chosen; // each product takes some of them
    int64_t n_elements;
    int64_t n_columns;
    void *  packed;

    // llama.cpp's, to its Q8_0
    void (*quantise)(const float * x, void * blocks, int64_t n_elements);
};

// Bytes that they take
WEIGHTS_API size_t weights_columns_bytes(const struct weights_columns * columns);

// Blocks first to first + n - 1 of a column. x has their elements.
WEIGHTS_API void weights_pack(const struct weights_columns * columns, const float * x, int64_t column, int64_t first,
                              int64_t n);

// Whether rows of these types read so many columns packed alike, if none are chosen
WEIGHTS_API bool weights_packed_alike(int a, int b, int64_t n_columns);

// The body that makes products of few columns with quantised rows, "llama.cpp" if it is none
WEIGHTS_API const char * weights_isa(void);

// What MIXEDKV_WEIGHTS says: "bf16", "llama.cpp" or nothing
WEIGHTS_API const char * weights_choice(void);

// Null, or says why it cannot be followed
WEIGHTS_API const char * weights_error(void);

// Whether a column has the same bits alone, in any batch and with any number of threads: all its products are made
// here, of quantised rows, in integers
WEIGHTS_API bool weights_same_bits(int type);

// Memory that each thread needs, a multiple of WEIGHTS_ALIGNMENT
WEIGHTS_API size_t weights_work_bytes(const struct weights_columns * columns);

// Rows row_0 to row_1 - 1 of all columns; row_0 is a multiple of WEIGHTS_ROWS.
WEIGHTS_API void weights_run(const struct weights_product * product, void * work, int64_t row_0, int64_t row_1);

#ifdef __cplusplus
}
#endif
