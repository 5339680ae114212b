// What ggml's products on AMX call before the first one of a thread: docs/decisions/004-amx-tile-config.md.

#pragma once

#if defined(__AMX_INT8__)
#include <immintrin.h>

// config: 64 bytes. All of them are written before: GCC before 13 declares eight as read, and may drop stores to the
// rest.
static inline void amx_load_tile_config(const void * config) {
#if defined(__GNUC__)
    __asm__ volatile("" : : "r"(config) : "memory");
#endif
    _tile_loadconfig(config);
}
#endif
