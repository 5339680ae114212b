// AMX: quantised rows, in tiles of bytes with a sign.

#include "bodies.h"

#include "attention/x86/tile_session.h"
#include "tiles.h"

namespace mixedkv {

bool cpu_has_amx(); // attention/cpu.cpp

namespace {

// Not the intrinsics: GCC 12 wants a literal as the number of a tile, and does not know that tiles read memory.
struct amx_int8 {
    template <int Depth>
    struct session : tile_session {
        session() :
            tile_session({ {}, {}, {}, {}, { 16, Depth }, { 16, Depth }, { Depth / 4, 64 }, { Depth / 4, 64 } }) {}
    };

    template <int Tile>
    MIXEDKV_INLINE static void load(const void * p, int64_t stride) {
        __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(Tile) : "memory");
    }

    template <int Tile>
    MIXEDKV_INLINE static void zero() {
        __asm__ volatile("tilezero %%tmm%c0" : : "i"(Tile));
    }

    template <int To, int Columns, int Rows>
    MIXEDKV_INLINE static void add_products() {
        __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(To), "i"(Columns), "i"(Rows));
    }

    template <int Tile>
    MIXEDKV_INLINE static void store(void * p, int64_t stride) {
        __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(Tile) : "memory");
    }
};

} // namespace

const weights_kernels * weights_tiles() {
    static const weights_kernels kernels = {
        "amx", false, 8, cpu_has_amx, tile_work_bytes, tiled_bytes, pack_tiled, run_tile_body<avx512, amx_int8>
    };
    return &kernels;
}

} // namespace mixedkv
