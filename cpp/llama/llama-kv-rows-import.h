#pragma once

#include "mixedkv/mixedkv.h"

#include "llama-context.h"

#include <string>

// Rows of a token range into a cache, for the C API. Any attention cache, mixed or upstream's uniform one.

// empty, or why nothing was changed
std::string llama_kv_rows_import(
        llama_context & ctx, llama_seq_id seq_id, const mixedkv_row_group * groups, uint32_t n_groups, llama_pos shift,
        llama_pos drop_from);
