// The registers of AMX, set up for a while.

#pragma once

#include <cstdint>
#include <immintrin.h>
#include <initializer_list>

namespace mixedkv {
namespace {

// Configures the tiles, as they are given or all eight with 16 rows of 64 bytes, and puts back the configuration that
// it found: others on this thread may rely on it. Configuring takes 330 cycles: once per item.
struct tile_session {
    struct alignas(64) config {
        uint8_t  palette = 0, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t  rows[16]      = {};

        // not the intrinsics: GCC 12 lets them touch 8 bytes only and drops the rest
        void load() const { __asm__ volatile("ldtilecfg %0" : : "m"(*this)); }
        void store() { __asm__ volatile("sttilecfg %0" : "=m"(*this)); }
    };

    struct shape {
        int rows = 16, row_bytes = 64;
    };

    tile_session() : tile_session({ {}, {}, {}, {}, {}, {}, {}, {} }) {}

    explicit tile_session(std::initializer_list<shape> tiles) {
        before.store();
        config mine;
        mine.palette = 1;
        int i        = 0;
        for (const shape & tile : tiles) {
            mine.rows[i]        = uint8_t(tile.rows);
            mine.row_bytes[i++] = uint16_t(tile.row_bytes);
        }
        mine.load();
    }
    ~tile_session() {
        if (before.palette != 0) {
            before.load();
        } else {
            _tile_release();
        }
    }

  private:
    config before;
};

constexpr int tile_bytes = 1024;

// What vector instructions have written is read by tiles: GCC 12 does not know of it.
inline void memory_is_used() {
    __asm__ volatile("" : : : "memory");
}

} // namespace
} // namespace mixedkv
