#pragma once

#include "mixedkv/mixedkv.h"

#include <string>

// What a thread has asked for and been told: the configuration of its next context, and its last error.

// one message for each thread: mixedkv_last_error()
void                llama_kv_mixed_set_error(const std::string & message);
const std::string & llama_kv_mixed_get_error();

// for the next context that this thread makes, nullptr: none; its layers are copied
void llama_kv_mixed_set_next(const mixedkv_config * config);

// the context is being made: its configuration, nullptr: none; there is no next one from here on
const mixedkv_config * llama_kv_mixed_take_next();

// of the context that this thread is making, nullptr: none
const mixedkv_config * llama_kv_mixed_config();

// it was made, or could not be
void llama_kv_mixed_drop_config();
