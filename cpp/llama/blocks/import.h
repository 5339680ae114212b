#pragma once

#include "mixedkv/mixedkv.h"

#include "llama-context.h"

#include <string>

// Rows of a token range into a cache, for the C API. Any attention cache, mixed or upstream's uniform one.

// empty, or why nothing was changed; `whole`: with all that the next token reads
std::string llama_kv_rows_import(
        llama_context & ctx, llama_seq_id seq_id, const mixedkv_row_group * groups, uint32_t n_groups, llama_pos shift,
        llama_pos drop_from, bool whole);

// F16 copies of rows that the sequence has, and its rows of sliding windows; empty, or why it does not have all of them
std::string llama_kv_rows_restore_window(
        llama_context & ctx, llama_seq_id seq_id, const mixedkv_row_group * groups, uint32_t n_groups);
