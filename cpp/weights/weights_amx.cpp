// AMX: F16 and BF16 rows, and quantised ones that become BF16, 32 of them with 32 columns at once, in four tiles.
//
// A number is a sum of parts in BF16: F16 of two, of 8 and 3 bits, without a loss. Of the four products of parts the
// one of the two low ones is left out, which is a 2^-16th of the whole at most. Sums are in F32, element after element.
// An infinite number has a low part that is none: its products are NaN.

#include "attention/x86/tile_session.h"
#include "lanes_avx512.h"

#include <algorithm>

namespace mixedkv {

bool cpu_has_amx(); // attention/cpu.cpp

namespace {

constexpr int lanes      = 16; // rows or columns of a tile
constexpr int pair_lanes = 2 * lanes;

struct amx_f16 {
    static constexpr int parts = 2;

    // Elements as packed, 32 of them
    static __m512i rounded(__m512 a, __m512 b) {
        return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(a, 0)), _mm512_cvtps_ph(b, 0), 1);
    }

    // To the nearest of those with the upper 16 bits alone
    static __m512 high(__m512 x) {
        const __m512i bits = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
        return _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(int(0xffff0000))));
    }

    static void split(__m512i x, char * tile) {
        const __m512 a = _mm512_cvtph_ps(_mm512_castsi512_si256(x)), a_high = high(a);
        const __m512 b = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1)), b_high = high(b);
        _mm512_store_si512(tile, __m512i(_mm512_cvtne2ps_pbh(b_high, a_high)));
        _mm512_store_si512(tile + tile_bytes,
                           __m512i(_mm512_cvtne2ps_pbh(_mm512_sub_ps(b, b_high), _mm512_sub_ps(a, a_high))));
    }
};

// Also what quantised rows are dequantised to
struct amx_bf16 {
    static constexpr int parts = 1;

    static __m512i rounded(__m512 a, __m512 b) { return __m512i(_mm512_cvtne2ps_pbh(b, a)); }
    static void    split(__m512i x, char * tile) { _mm512_store_si512(tile, x); }
};

// A block of 32 rows or columns, which are multiplied at once: two tiles of 16, in parts
template <class Row>
struct alignas(64) tile_pair {
    char tiles[2][Row::parts][tile_bytes];
};

// Columns are packed block after block of 32 columns.
template <class Row>
tile_pair<Row> * pair_of(void * packed, int64_t n_elements, int64_t column, int64_t block) {
    return static_cast<tile_pair<Row> *>(packed) + column / pair_lanes * (n_elements / WEIGHTS_BLOCK) + block;
}

template <class Row>
void pack_blocks(const weights_columns & columns, const float * x, int64_t column, int64_t first, int64_t n) {
    tile_pair<Row> * const to = pair_of<Row>(columns.packed, columns.n_elements, column, first);
    for (int64_t b = 0; b < n; b++, x += WEIGHTS_BLOCK) {
        const __m512i rounded = Row::rounded(_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16));
        Row::split(rounded, to[b].tiles[column / lanes % 2][0] + column % lanes * 64);
    }
}

// Of columns that are chosen a product takes any, so they are packed one after the other, and gathered for each
// product.
void pack_apart(const weights_columns & columns, const float * x, int64_t column, int64_t first, int64_t n) {
    auto * to = static_cast<__m512i *>(columns.packed) + column * (columns.n_elements / WEIGHTS_BLOCK) + first;
    for (int64_t b = 0; b < n; b++, x += WEIGHTS_BLOCK) {
        _mm512_store_si512(to + b, amx_bf16::rounded(_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16)));
    }
}

constexpr int64_t most_gathered = 256; // columns

// Past the last column of a block whatever is there: its products are not written.
void gather(const weights_product & p, int64_t column, int64_t n_columns, tile_pair<amx_bf16> * out) {
    const int64_t n_blocks = p.n_elements / WEIGHTS_BLOCK;
    for (int64_t c = 0; c < n_columns; c++) {
        const auto * in = static_cast<const __m512i *>(p.columns) + p.chosen[2 * (column + c)] * n_blocks;
        tile_pair<amx_bf16> * const to = out + c / pair_lanes * n_blocks;
        for (int64_t b = 0; b < n_blocks; b++) {
            _mm512_store_si512(to[b].tiles[c / lanes % 2][0] + c % lanes * 64, _mm512_load_si512(in + b));
        }
    }
}

// 64 bytes of 16 rows: dword i of each into vector i
inline void transpose(const char * const * rows, __m512i out[16]) {
    for (int quarter = 0; quarter < 4; quarter++) {
        __m512i x[4];
        for (int i = 0; i < 4; i++) {
            const auto line = [&](int row) {
                return _mm_loadu_si128(reinterpret_cast<const __m128i *>(rows[row] + 16 * quarter));
            };
            x[i] = _mm512_castsi128_si512(line(i));
            x[i] = _mm512_inserti32x4(x[i], line(i + 4), 1);
            x[i] = _mm512_inserti32x4(x[i], line(i + 8), 2);
            x[i] = _mm512_inserti32x4(x[i], line(i + 12), 3);
        }
        const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
        const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
        out[4 * quarter]     = _mm512_unpacklo_epi64(a, c);
        out[4 * quarter + 1] = _mm512_unpackhi_epi64(a, c);
        out[4 * quarter + 2] = _mm512_unpacklo_epi64(b, d);
        out[4 * quarter + 3] = _mm512_unpackhi_epi64(b, d);
    }
}

// A block of 32 columns with one of 32 rows: to tiles 0 to 3, of rows in 4 and 5 and columns in 6 and 7
template <class Row>
MIXEDKV_INLINE void add_products(const tile_pair<Row> & columns, const tile_pair<Row> & rows) {
    constexpr bool two = Row::parts == 2;
    _tile_loadd(4, rows.tiles[0][0], 64);
    if (two) {
        _tile_loadd(6, columns.tiles[0][1], 64);
        _tile_dpbf16ps(0, 6, 4);
        _tile_loadd(5, rows.tiles[1][0], 64);
        _tile_dpbf16ps(1, 6, 5);
        _tile_loadd(7, columns.tiles[1][1], 64);
        _tile_dpbf16ps(2, 7, 4);
        _tile_dpbf16ps(3, 7, 5);
    }
    _tile_loadd(6, columns.tiles[0][0], 64);
    _tile_dpbf16ps(0, 6, 4);
    if (!two) {
        _tile_loadd(5, rows.tiles[1][0], 64);
    }
    _tile_dpbf16ps(1, 6, 5);
    _tile_loadd(7, columns.tiles[1][0], 64);
    _tile_dpbf16ps(2, 7, 4);
    _tile_dpbf16ps(3, 7, 5);
    if (two) {
        _tile_loadd(4, rows.tiles[0][1], 64);
        _tile_dpbf16ps(0, 6, 4);
        _tile_dpbf16ps(2, 7, 4);
        _tile_loadd(5, rows.tiles[1][1], 64);
        _tile_dpbf16ps(1, 6, 5);
        _tile_dpbf16ps(3, 7, 5);
    }
}

// What a thread works on: some rows, unpacked for some blocks, and their sums with some columns. A block of columns is
// read from the first cache for most of the rows, all else from the second, into which the next columns are fetched
// meanwhile: all of them are more than it holds. Behind it lie columns that were gathered.
template <class Row>
struct amx_work {
    static constexpr int row_pairs    = 8;
    static constexpr int column_pairs = 16;
    static constexpr int n_blocks     = 8 / Row::parts;

    tile_pair<Row> rows[row_pairs][n_blocks];
    float          sums[column_pairs][row_pairs][2][2][lanes][lanes]; // of either tile of columns with either of rows

    // 32 columns with 32 rows, while so many lines of a block are fetched; tiles 0 to 3 are sums
    void multiply(const tile_pair<Row> * columns, int column_pair, int row_pair, int64_t n, bool begins,
                  const char * next, int n_lines) {
        float (&to)[2][2][lanes][lanes] = sums[column_pair][row_pair];
        if (begins) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_loadd(0, to[0][0], 64);
            _tile_loadd(1, to[0][1], 64);
            _tile_loadd(2, to[1][0], 64);
            _tile_loadd(3, to[1][1], 64);
        }
        for (int64_t b = 0; b < n; b++) {
            for (int i = 0; i < n_lines; i++, next += 64) {
                _mm_prefetch(next, _MM_HINT_T1);
            }
            add_products(columns[b], rows[row_pair][b]);
        }
        _tile_stored(0, to[0][0], 64);
        _tile_stored(1, to[0][1], 64);
        _tile_stored(2, to[1][0], 64);
        _tile_stored(3, to[1][1], 64);
    }

    void write(const weights_product & p, int64_t row, int64_t n_rows, int64_t column, int64_t n_columns) const {
        for (int64_t c = 0; c < n_columns; c++) {
            float * const out = out_column(p, column + c) + row;
            for (int64_t r = 0; r < n_rows; r += lanes) {
                const int64_t n    = n_rows - r < lanes ? n_rows - r : lanes;
                const auto &  from = sums[c / pair_lanes][r / pair_lanes][c / lanes % 2][r / lanes % 2];
                _mm512_mask_storeu_ps(out + r, __mmask16((1u << n) - 1), _mm512_load_ps(from[c % lanes]));
            }
        }
    }
};

// Up to 16 rows in 16 bits, for n blocks, which lie `stride` bytes apart. Where a matrix has fewer rows, the last one
// again.
template <class Row>
void unpack_halves(const weights_product & p, int64_t row, int64_t row_1, int64_t block, int64_t n, char * tile,
                   size_t stride) {
    const char * from[lanes];
    for (int64_t i = 0; i < lanes; i++) {
        const int64_t r = row + i < row_1 ? row + i : row_1 - 1;
        from[i]         = static_cast<const char *>(p.rows) + r * p.row_bytes + block * WEIGHTS_BLOCK * 2;
    }
    for (int64_t b = 0; b < n; b++, tile += stride) {
        __m512i pairs[16];
        transpose(from, pairs);
        for (int i = 0; i < 16; i++) {
            Row::split(pairs[i], tile + 64 * i);
            from[i] += 64;
        }
    }
}

// Dequantises to BF16, rounded to the nearest.
template <class Row>
struct to_bf16 {
    char * tile;
    size_t stride;
    __m512 scales[traits<Row>.scales], starts[traits<Row>.scales];

    MIXEDKV_INLINE void scale(int, int half, __m512 x) {
        scales[half] = roundable(x);
        starts[half] = _mm512_mul_ps(scales[half], _mm512_set1_ps(-traits<Row>.bias));
    }

    MIXEDKV_INLINE void least(int, __m512 x) { starts[0] = roundable(x); }

    // With a NaN that stays one in pairs(): all ones would become a zero.
    MIXEDKV_INLINE static __m512 roundable(__m512 x) {
        const __m512i nan = _mm512_set1_epi32(0x7fc00000);
        return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_castsi512_ps(nan));
    }

    MIXEDKV_INLINE void values(int block, int group, avx512::ints x) {
        const int  half    = traits<Row>.scales == 2 ? group / 4 : 0;
        const auto element = [&](int i) {
            const avx512::ints value = i == 3 ? x >> 24 : x >> 8 * i & 0xff;
            return _mm512_fmadd_ps(avx512::to_floats(value), scales[half], starts[half]);
        };
        char * const to = tile + block * stride + 128 * group;
        _mm512_store_si512(to, pairs(element(0), element(1)));
        _mm512_store_si512(to + 64, pairs(element(2), element(3)));
    }

    MIXEDKV_INLINE void done(int) {}

    // Two elements of all lanes, in 16 bits side by side
    MIXEDKV_INLINE static __m512i pairs(__m512 a, __m512 b) {
        const __m512i half = _mm512_set1_epi32(0x8000);
        const __m512i x    = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(a), half), 16);
        return _mm512_mask_blend_epi16(0xaaaaaaaa, x, _mm512_add_epi32(_mm512_castps_si512(b), half));
    }
};

template <class Row>
void unpack_quantised(const weights_product & p, int64_t row, int64_t row_1, int64_t block, int64_t n, char * tile,
                      size_t stride) {
    const panel_rows<avx512, 1> rows(p, row, row_1, traits<Row>.together);
    for (int64_t b = 0; b < n; b += traits<Row>.blocks) {
        to_bf16<Row> to = { tile + b * stride, stride, {}, {} };
        unpack<avx512>(static_cast<const Row *>(nullptr), rows.rows, (block + b) / traits<Row>.blocks * sizeof(Row),
                       to);
    }
}

template <class Row>
void run_rows(decltype(&unpack_halves<Row>) unpack, const weights_product & p, void * memory, int64_t row_0,
              int64_t row_1) {
    using work_of               = amx_work<Row>;
    constexpr int64_t most_rows = work_of::row_pairs * pair_lanes;

    const int64_t      n_blocks     = p.n_elements / WEIGHTS_BLOCK;
    const int64_t      most_columns = p.chosen ? most_gathered : work_of::column_pairs * pair_lanes;
    work_of &          work         = *static_cast<work_of *>(memory);
    auto * const       gathered     = reinterpret_cast<tile_pair<Row> *>(&work + 1);
    const tile_session session;
    for (int64_t column = 0; column < p.n_columns; column += most_columns) {
        const int64_t n_columns = std::min(p.n_columns - column, most_columns);
        if constexpr (std::is_same_v<Row, amx_bf16>) {
            if (p.chosen) {
                gather(p, column, n_columns, gathered);
            }
        }
        for (int64_t row = row_0; row < row_1; row += most_rows) {
            const int64_t n_rows  = std::min(row_1 - row, most_rows);
            const int     n_lines = int(sizeof(tile_pair<Row>) / 64 / ((n_rows + pair_lanes - 1) / pair_lanes));
            for (int64_t block = 0, n; block < n_blocks; block += n) {
                n = std::min<int64_t>(n_blocks - block, work_of::n_blocks);
                for (int64_t r = 0; r < n_rows; r += lanes) {
                    unpack(p, row + r, row_1, block, n, work.rows[r / pair_lanes][0].tiles[r / lanes % 2][0],
                           sizeof(tile_pair<Row>));
                }
                memory_is_used();
                for (int64_t c = 0; c < n_columns; c += pair_lanes) {
                    const auto * columns =
                        p.chosen ? gathered + c / pair_lanes * n_blocks + block
                                 : pair_of<Row>(const_cast<void *>(p.columns), p.n_elements, column + c, block);
                    const char * next = reinterpret_cast<const char *>(columns + n_blocks);
                    for (int64_t r = 0; r < n_rows; r += pair_lanes, next += n * n_lines * 64) {
                        work.multiply(columns, int(c / pair_lanes), int(r / pair_lanes), n, block == 0, next, n_lines);
                    }
                }
            }
            work.write(p, row, n_rows, column, n_columns);
        }
    }
}

size_t columns_bytes(int type, int64_t n_elements, int64_t n_columns) {
    const int64_t pairs = (n_columns + pair_lanes - 1) / pair_lanes * (n_elements / WEIGHTS_BLOCK);
    return size_t(pairs) * (type == WEIGHTS_F16 ? sizeof(tile_pair<amx_f16>) : sizeof(tile_pair<amx_bf16>));
}

void pack(const weights_columns & columns, const float * x, int64_t column, int64_t first, int64_t n) {
    if (columns.type == WEIGHTS_F16) {
        return pack_blocks<amx_f16>(columns, x, column, first, n);
    }
    if (columns.are_chosen) {
        return pack_apart(columns, x, column, first, n);
    }
    pack_blocks<amx_bf16>(columns, x, column, first, n);
}

size_t work_bytes(int64_t n_elements, int64_t n_chosen) {
    static_assert(sizeof(amx_work<amx_bf16>) == sizeof(amx_work<amx_f16>));
    return sizeof(amx_work<amx_f16>) + columns_bytes(WEIGHTS_BF16, n_elements, std::min(n_chosen, most_gathered));
}

void run(const weights_product & p, void * work, int64_t row_0, int64_t row_1) {
    if (p.type == WEIGHTS_F16) {
        return run_rows<amx_f16>(unpack_halves<amx_f16>, p, work, row_0, row_1);
    }
    run_rows<amx_bf16>(unpack_halves<amx_bf16>, p, work, row_0, row_1);
}

void run_quantised(const weights_product & p, void * work, int64_t row_0, int64_t row_1) {
    with_row_type(p.type, [&](auto * row) {
        run_rows<amx_bf16>(unpack_quantised<row_of<decltype(row)>>, p, work, row_0, row_1);
    });
}

} // namespace

const weights_kernels * weights_amx() {
    static const weights_kernels kernels = { "amx", true, 1, cpu_has_amx, work_bytes, columns_bytes, pack, run };
    return &kernels;
}

const weights_kernels * weights_bf16() {
    static const weights_kernels kernels = { "bf16",     false,         8,    cpu_has_amx,
                                             work_bytes, columns_bytes, pack, run_quantised };
    return &kernels;
}

} // namespace mixedkv
