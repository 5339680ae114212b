// Quantised rows with many columns by tiles: the sums of a block, whole numbers, are made by tiles, and scaled and
// added up as every other body does it, in the same order, so that they have the same bits.
//
// A tile of columns holds 16 of them, one a line; one of rows holds 16, whose elements lie in fours. Their products are
// stored, and read by vectors that have a lane for each row, while tiles multiply the next blocks.
//
// T are the tiles, which a test emulates: T::session configures them for products of `depth` elements, then there are
// T::load<t>(), T::zero<t>(), T::add_products<to, columns, rows>() and T::store<t>().

#pragma once

#include "columns.h"
#include "lanes_avx512.h"

#include <algorithm>
#include <utility>

namespace mixedkv {
namespace {

constexpr int tile_lanes = 16; // rows or columns of a tile

// A block of 16 columns
struct alignas(64) column_tile {
    int8_t values[tile_lanes][WEIGHTS_BLOCK];
    float  scale[tile_lanes];
    float  sum[tile_lanes]; // of the elements, so with the scale in it
};
static_assert(sizeof(column_tile) == 640);

// A block of 16 rows
struct alignas(64) row_tile {
    int8_t values[groups][tile_lanes][4];
    float  scale[2][tile_lanes];
    float  least[tile_lanes];
};

// Block `block` of 16 columns, of which `column` is one
inline column_tile * tile_of(void * packed, int64_t n_elements, int64_t column, int64_t block) {
    return static_cast<column_tile *>(packed) + column / tile_lanes * (n_elements / WEIGHTS_BLOCK) + block;
}

inline int64_t tiles_of(int64_t n_columns) {
    return (n_columns + tile_lanes - 1) / tile_lanes;
}

inline size_t tiled_bytes(int, int64_t n_elements, int64_t n_columns) {
    return size_t(tiles_of(n_columns) * (n_elements / WEIGHTS_BLOCK)) * sizeof(column_tile);
}

inline void pack_tiled(const weights_columns & columns, const float * x, int64_t column, int64_t first, int64_t n) {
    for_each_rounded(columns, x, n, [&](int64_t b, const column_q8_0 & in) {
        column_tile & out = *tile_of(columns.packed, columns.n_elements, column, first + b);
        const int64_t at  = column % tile_lanes;
        int           sum = 0;
        for (const int8_t value : in.values) {
            sum += value;
        }
        std::memcpy(out.values[at], in.values, WEIGHTS_BLOCK);
        out.scale[at] = half_to_float(in.scale);
        out.sum[at]   = out.scale[at] * float(sum);
    });
}

// What is unpacked goes to the tiles of 16 rows, without a bias.
template <class V, class Row>
struct to_tiles {
    row_tile * blocks;

    MIXEDKV_INLINE void scale(int block, int half, typename V::floats x) { V::store(blocks[block].scale[half], x); }
    MIXEDKV_INLINE void least(int block, typename V::floats x) { V::store(blocks[block].least, x); }
    MIXEDKV_INLINE void values(int block, int group, typename V::ints x) {
        V::store_bytes(blocks[block].values[group], x, traits<Row>.bias);
    }
    MIXEDKV_INLINE void done(int) {}
};

// Calls f with 0 to N - 1 as constants: what it indexes by them stays in registers.
template <class F, int... I>
MIXEDKV_INLINE void unrolled(std::integer_sequence<int, I...>, F && f) {
    (f(std::integral_constant<int, I>()), ...);
}

template <int N, class F>
MIXEDKV_INLINE void unrolled(F && f) {
    unrolled(std::make_integer_sequence<int, N>(), f);
}

// Where the sums of 16 columns with tiles of rows are kept, tile after tile, and where the last blocks put them at
// last: written then, they go to memory while other products are made.
struct tile_sums {
    float (*kept)[tile_lanes][tile_lanes];
    bool    begins, ends;
    int64_t n_columns, n_rows;
    float * out[tile_lanes];
};

// Products of 16 columns with tiles of 16 rows, one tile after the other. A unit is what has one scale: a block, or
// half of one. While vectors scale a unit, tiles make the products of the next ones: those of unit u are begun at step
// u, stored two steps later and scaled another two later.
template <class V, class T, int Scales, bool Has_least>
struct tile_products {
    static constexpr int depth = WEIGHTS_BLOCK / Scales; // of a unit
    static constexpr int ways  = 4;                      // units at once

    alignas(64) int32_t whole[ways][tile_lanes][tile_lanes];

    template <int Way>
    MIXEDKV_INLINE void multiply(const column_tile * columns, const row_tile * rows) {
        constexpr int of_columns = ways + Way % 2, of_rows = ways + 2 + Way % 2;
        constexpr int part = Way % Scales;
        T::template load<of_columns>(columns->values[0] + part * depth, WEIGHTS_BLOCK);
        T::template load<of_rows>(rows->values[part * depth / 4], sizeof(row_tile::values[0]));
        T::template zero<Way>();
        T::template add_products<Way, of_columns, of_rows>();
    }

    // Adds a unit to some columns.
    template <int Way, int Columns>
    MIXEDKV_INLINE void scale(const column_tile * columns, const row_tile * rows,
                              typename V::floats (&sums)[Columns]) const {
        const typename V::floats of_rows = V::load(rows->scale[Way % Scales]);
        unrolled<Columns>([&](auto c) MIXEDKV_INLINE_LAMBDA {
            const typename V::floats x = V::to_floats(V::load_ints(whole[Way][c]));
            sums[c]                    = V::fma(x, of_rows * V::set(columns->scale[c]), sums[c]);
        });
        if constexpr (Has_least) {
            const typename V::floats least = V::load(rows->least);
            unrolled<Columns>([&](auto c)
                                  MIXEDKV_INLINE_LAMBDA { sums[c] = V::fma(least, V::set(columns->sum[c]), sums[c]); });
        }
    }

    // Puts the sums of tile t where they belong.
    template <int Columns>
    MIXEDKV_INLINE static void put(const tile_sums & to, int64_t t, const typename V::floats (&sums)[Columns]) {
        const int64_t row = t * tile_lanes, n_rows = to.ends ? to.n_rows - row : 0;
        unrolled<Columns>([&](auto c) MIXEDKV_INLINE_LAMBDA {
            if (n_rows < tile_lanes) {
                V::store(to.kept[t][c], sums[c]);
            }
            if (n_rows > 0 && c < to.n_columns) {
                if (n_rows < tile_lanes) {
                    std::memcpy(to.out[c] + row, to.kept[t][c], n_rows * sizeof(float));
                } else {
                    V::store(to.out[c] + row, sums[c]);
                }
            }
        });
    }

    // Adds the products with n tiles of rows, each of so many blocks, to the first columns.
    template <int Columns>
    void add(const column_tile * const columns, const row_tile * rows, int64_t n_blocks, int64_t n,
             const tile_sums & to) {
        const column_tile *begun = columns, *scaled = columns, *const end = columns + n_blocks;
        const row_tile *   begun_rows = rows, *scaled_rows = rows;
        const int64_t      n_units = n * n_blocks * Scales;
        int64_t            tile    = 0; // that is scaled
        typename V::floats sums[Columns];
        for (int64_t first = 0; first < n_units + ways; first += ways) {
            unrolled<ways>([&](auto way) MIXEDKV_INLINE_LAMBDA {
                constexpr int  way_2   = (way + 2) % ways;
                constexpr bool is_last = way % Scales == Scales - 1; // of a block
                const int64_t  left    = n_units - first;
                if (way < left) {
                    multiply<way>(begun, begun_rows);
                    if (is_last) {
                        begun_rows++;
                        begun = begun + 1 == end ? columns : begun + 1;
                    }
                }
                if (first + way >= 2 && way - 2 < left) {
                    T::template store<way_2>(whole[way_2], sizeof(whole[0][0]));
                }
                if (first && way - ways < left) {
                    if (way % Scales == 0 && scaled == columns) {
                        unrolled<Columns>([&](auto c) MIXEDKV_INLINE_LAMBDA {
                            sums[c] = to.begins ? V::set(0.0f) : V::load(to.kept[tile][c]);
                            // stores are made in order, and one that waits for memory would hold up those of tiles
                            __builtin_prefetch(to.ends ? to.out[c] + tile * tile_lanes : to.kept[tile][c], 1);
                        });
                    }
                    scale<way>(scaled, scaled_rows, sums);
                    if (is_last) {
                        scaled_rows++;
                        if (++scaled == end) {
                            put(to, tile++, sums);
                            scaled = columns;
                        }
                    }
                }
            });
        }
    }

    void add(const column_tile * columns, const row_tile * rows, int64_t n_blocks, int64_t n, const tile_sums & to) {
        to.n_columns > 8 ? add<16>(columns, rows, n_blocks, n, to) : add<8>(columns, rows, n_blocks, n, to);
    }
};

// Unpacks so many blocks of 16 rows.
template <class V, class Row>
void unpack_tiles(const weights_product & p, int64_t row, int64_t row_1, int64_t block, int64_t n, row_tile * out) {
    const panel_rows<V, 1> rows(p, row, row_1, traits<Row>.together);
    const char * next = rows.next(p) + block / traits<Row>.blocks * (tile_lanes * sizeof(Row) / traits<Row>.together);
    for (int64_t b = 0; b < n; b += traits<Row>.blocks) {
        constexpr size_t bytes = tile_lanes * sizeof(Row) / traits<Row>.together;
        fetch(next, bytes);
        next += bytes;
        to_tiles<V, Row> to = { out + b };
        unpack<V>(static_cast<const Row *>(nullptr), rows.rows, (block + b) / traits<Row>.blocks * sizeof(Row), to);
    }
}

// What a thread works on: some rows, unpacked for some blocks, which stay in the first cache, and their sums with some
// columns, in the second. Columns that are chosen follow it.
struct tile_work {
    static constexpr int n_rows    = 8; // tiles
    static constexpr int n_columns = 16;
    static constexpr int n_blocks  = 8;

    row_tile rows[n_rows * n_blocks];
    float    sums[n_columns][n_rows][tile_lanes][tile_lanes];
};

// Parts of equal size. K types come in eights.
inline int64_t blocks_at_once(int64_t n_blocks) {
    const int64_t n_parts = (n_blocks + tile_work::n_blocks - 1) / tile_work::n_blocks;
    const int64_t unit = n_blocks % 8 ? 1 : 8, n_units = n_blocks / unit;
    return (n_units + n_parts - 1) / n_parts * unit;
}

// Puts columns that are chosen from those that are packed for other bodies into tiles.
inline void gather(const weights_product & p, int64_t column, int64_t n_columns, column_tile * out) {
    const int64_t n_blocks = p.n_elements / WEIGHTS_BLOCK;
    for (int64_t c = 0; c < n_columns; c++) {
        const column_block * in = packed_column(p, column + c);
        column_tile *        to = out + c / tile_lanes * n_blocks;
        for (int64_t b = 0; b < n_blocks; b++) {
            int8_t * values = to[b].values[c % tile_lanes];
            std::memcpy(values, in[b].group(0), WEIGHTS_BLOCK / 2);
            std::memcpy(values + WEIGHTS_BLOCK / 2, in[b].group(4), WEIGHTS_BLOCK / 2);
            to[b].scale[c % tile_lanes] = in[b].scale;
            to[b].sum[c % tile_lanes]   = in[b].sum;
        }
    }
}

template <class V, class T, int Scales, bool Has_least>
void run_tiles(decltype(&unpack_tiles<V, row_q4_0>) unpack, const weights_product & p, void * memory, int64_t row_0,
               int64_t row_1) {
    constexpr int64_t most_rows = tile_work::n_rows * tile_lanes, most_columns = tile_work::n_columns * tile_lanes;

    tile_work &                                                work     = *static_cast<tile_work *>(memory);
    auto * const                                               gathered = reinterpret_cast<column_tile *>(&work + 1);
    const int64_t                                              n_blocks = p.n_elements / WEIGHTS_BLOCK;
    const int64_t                                              at_once  = blocks_at_once(n_blocks);
    tile_products<V, T, Scales, Has_least>                     products;
    const typename T::template session<WEIGHTS_BLOCK / Scales> session;
    for (int64_t column = 0; column < p.n_columns; column += most_columns) {
        const int64_t n_columns = std::min(p.n_columns - column, most_columns);
        if (p.chosen) {
            gather(p, column, n_columns, gathered);
        }
        const column_tile * columns =
            p.chosen ? gathered : tile_of(const_cast<void *>(p.columns), p.n_elements, column, 0);
        for (int64_t row = row_0; row < row_1; row += most_rows) {
            const int64_t n_rows = std::min(row_1 - row, most_rows), n_tiles = tiles_of(n_rows);
            for (int64_t b = 0, n; b < n_blocks; b += n) {
                n = std::min(n_blocks - b, at_once);
                for (int64_t t = 0; t < n_tiles; t++) {
                    unpack(p, row + t * tile_lanes, row_1, b, n, work.rows + t * n);
                }
                for (int64_t c = 0; c < n_columns; c += tile_lanes) {
                    tile_sums to = { work.sums[c / tile_lanes],
                                     b == 0,
                                     b + n == n_blocks,
                                     std::min<int64_t>(n_columns - c, tile_lanes),
                                     n_rows,
                                     {} };
                    for (int64_t i = 0; i < tile_lanes; i++) {
                        to.out[i] = out_column(p, column + c + std::min(i, to.n_columns - 1)) + row;
                    }
                    products.add(columns + c / tile_lanes * n_blocks + b, work.rows, n, n_tiles, to);
                }
            }
        }
    }
}

template <class V, class T>
void run_tile_body(const weights_product & p, void * memory, int64_t row_0, int64_t row_1) {
    with_row_type(p.type, [&](auto * row) {
        using Row = row_of<decltype(row)>;
        run_tiles<V, T, traits<Row>.scales, traits<Row>.has_least>(unpack_tiles<V, Row>, p, memory, row_0, row_1);
    });
}

inline size_t tile_work_bytes(int64_t n_elements, int64_t n_chosen) {
    return sizeof(tile_work) +
           tiled_bytes(0, n_elements, std::min<int64_t>(n_chosen, tile_work::n_columns * tile_lanes));
}

} // namespace
} // namespace mixedkv
