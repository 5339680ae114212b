// What ggml has of the row types of this folder: entries of its tables, which vendor/patches puts there. In C, for
// ggml.

#pragma once

#include "lm4.h"
#include "tc3.h"

// ggml.c, table of types
#define MIXEDKV_ROW_TYPES \
    [TC3_TYPE] = { \
        .type_name      = "tc3", \
        .blck_size      = TC3_ELEMENTS, \
        .type_size      = TC3_BYTES, \
        .is_quantized   = true, \
        .to_float       = tc3_to_float, \
        .from_float_ref = tc3_from_float, \
    }, \
    [LM4_TYPE] = { \
        .type_name      = "lm4", \
        .blck_size      = LM4_ELEMENTS, \
        .type_size      = LM4_BYTES, \
        .is_quantized   = true, \
        .to_float       = lm4_to_float, \
        .from_float_ref = lm4_from_float, \
    },

// ggml-cpu.c, table of what the CPU does with types
#define MIXEDKV_ROW_TYPES_CPU \
    [TC3_TYPE] = { \
        .from_float   = tc3_from_float, \
        .vec_dot      = tc3_dot, \
        .vec_dot_type = GGML_TYPE_F32, \
        .nrows        = 1, \
    }, \
    [LM4_TYPE] = { \
        .from_float   = lm4_from_float, \
        .vec_dot      = lm4_dot, \
        .vec_dot_type = GGML_TYPE_F32, \
        .nrows        = 1, \
    },

// ops.cpp, the types whose rows it gets
#define MIXEDKV_ROW_TYPES_CASES \
    case TC3_TYPE:              \
    case LM4_TYPE:
