// The body of tiles with tiles in memory: what it computes is tested where no processor has AMX.

#include "weights/bodies.h"

#include "weights/tiles.h"

namespace mixedkv {
bool cpu_has_avx512(); // attention/cpu.cpp
}

namespace test {
namespace {

using namespace mixedkv;

// As Intel describes them: a product needs rows of four bytes each, as many as a line of the other tile has.
struct emulated {
    struct tile {
        int    rows = 0, row_bytes = 0;
        int8_t bytes[16][64];
    };
    static tile tiles[8];

    template <int Depth>
    struct session {
        session() {
            for (int t = 0; t < 8; t++) {
                std::memset(tiles[t].bytes, 0x55, sizeof(tiles[t].bytes));
                tiles[t].rows      = t < 6 ? 16 : Depth / 4;
                tiles[t].row_bytes = t == 4 || t == 5 ? Depth : 64;
            }
        }
    };

    template <int Tile>
    static void load(const void * p, int64_t stride) {
        for (int r = 0; r < tiles[Tile].rows; r++) {
            std::memcpy(tiles[Tile].bytes[r], static_cast<const char *>(p) + r * stride, tiles[Tile].row_bytes);
        }
    }

    template <int Tile>
    static void zero() {
        std::memset(tiles[Tile].bytes, 0, sizeof(tiles[Tile].bytes));
    }

    template <int To, int Columns, int Rows>
    static void add_products() {
        const tile &columns = tiles[Columns], &rows = tiles[Rows];
        for (int c = 0; c < tiles[To].rows; c++) {
            int32_t sums[16];
            std::memcpy(sums, tiles[To].bytes[c], sizeof(sums));
            for (int i = 0; i < columns.row_bytes; i++) {
                for (int r = 0; r < 16; r++) {
                    sums[r] += columns.bytes[c][i] * rows.bytes[i / 4][r * 4 + i % 4];
                }
            }
            std::memcpy(tiles[To].bytes[c], sums, sizeof(sums));
        }
    }

    template <int Tile>
    static void store(void * p, int64_t stride) {
        for (int r = 0; r < tiles[Tile].rows; r++) {
            std::memcpy(static_cast<char *>(p) + r * stride, tiles[Tile].bytes[r], tiles[Tile].row_bytes);
        }
    }
};

emulated::tile emulated::tiles[8];

} // namespace

const weights_kernels * weights_emulated_tiles() {
    static const weights_kernels kernels = {
        "emulated", false, 8, cpu_has_avx512, tile_work_bytes, tiled_bytes, pack_tiled, run_tile_body<avx512, emulated>
    };
    return &kernels;
}

} // namespace test
