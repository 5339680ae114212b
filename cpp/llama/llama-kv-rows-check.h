#pragma once

#include "mixedkv/mixedkv.h"

#include "llama-context.h"

#include <string>

// empty, or why rows that come from outside cannot go into this sequence; their room is not looked at
std::string llama_kv_rows_check(
        llama_context & ctx, llama_seq_id seq_id, const mixedkv_row_group * groups, uint32_t n_groups, llama_pos shift,
        llama_pos drop_from);
