#pragma once

#include "mixedkv/mixedkv.h"

#include "llama-context.h"

#include <string>

enum llama_kv_rows_mode {
    LLAMA_KV_ROWS_WHOLE,  // with all that the token after them reads
    LLAMA_KV_ROWS_PART,   // without: more rows follow, or their window does
    LLAMA_KV_ROWS_WINDOW, // what rows that are there lack: F16 copies, and rows of sliding windows
};

// empty, or why rows that come from outside cannot go into this sequence; their room is not looked at
std::string llama_kv_rows_check(
        llama_context & ctx, llama_seq_id seq_id, const mixedkv_row_group * groups, uint32_t n_groups, llama_pos shift,
        llama_pos drop_from, llama_kv_rows_mode mode);
