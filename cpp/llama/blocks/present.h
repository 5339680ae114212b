#pragma once

#include "mixedkv/mixedkv.h"

#include "llama-context.h"

// What a sequence has in its caches and states. Cells are looked at: no setting says which rows a sliding window has let go of.
mixedkv_cut llama_kv_find_cut(llama_context & ctx, llama_seq_id seq_id, llama_pos n);
