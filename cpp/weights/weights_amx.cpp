// AMX: F16 and BF16 rows, 32 of them with 32 columns at once, in four tiles.
//
// A number is a sum of parts in BF16: F16 of two, of 8 and 3 bits, without a loss. Of the four products of parts the
// one of the two low ones is left out, which is a 2^-16th of the whole at most. Sums are in F32, element after element.
// An infinite number has a low part that is none: its products are NaN.

#include "bodies.h"

#include "attention/x86/tile_session.h"

#include <immintrin.h>

namespace mixedkv {

bool cpu_has_amx(); // attention/cpu.cpp

namespace {

constexpr int lanes = 16; // rows or columns of a tile

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

struct amx_bf16 {
    static constexpr int parts = 1;

    static __m512i rounded(__m512 a, __m512 b) { return __m512i(_mm512_cvtne2ps_pbh(b, a)); }
    static void    split(__m512i x, char * tile) { _mm512_store_si512(tile, x); }
};

// Columns lie in tiles of 16 columns and 32 elements, one for each part, block after block of 16 columns.
template <class Row>
char * tile_of(const weights_columns & columns, int64_t column, int64_t block) {
    const int64_t n_blocks = columns.n_elements / WEIGHTS_BLOCK;
    const int64_t tile     = (column / lanes * n_blocks + block) * Row::parts;
    return static_cast<char *>(columns.packed) + tile * tile_bytes;
}

template <class Row>
void pack_blocks(const weights_columns & columns, const float * x, int64_t column, int64_t first, int64_t n) {
    for (int64_t b = 0; b < n; b++, x += WEIGHTS_BLOCK) {
        const __m512i rounded = Row::rounded(_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16));
        Row::split(rounded, tile_of<Row>(columns, column, first + b) + column % lanes * 64);
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
MIXEDKV_INLINE void add_products(const char * column_0, const char * column_1, const char * row_0, const char * row_1) {
    constexpr bool two = Row::parts == 2;
    _tile_loadd(4, row_0, 64);
    _tile_loadd(5, row_1, 64);
    if (two) {
        _tile_loadd(6, column_0 + tile_bytes, 64);
        _tile_dpbf16ps(0, 6, 4);
        _tile_dpbf16ps(1, 6, 5);
        _tile_loadd(7, column_1 + tile_bytes, 64);
        _tile_dpbf16ps(2, 7, 4);
        _tile_dpbf16ps(3, 7, 5);
    }
    _tile_loadd(6, column_0, 64);
    _tile_dpbf16ps(0, 6, 4);
    _tile_dpbf16ps(1, 6, 5);
    _tile_loadd(7, column_1, 64);
    _tile_dpbf16ps(2, 7, 4);
    _tile_dpbf16ps(3, 7, 5);
    if (two) {
        _tile_loadd(4, row_0 + tile_bytes, 64);
        _tile_dpbf16ps(0, 6, 4);
        _tile_dpbf16ps(2, 7, 4);
        _tile_loadd(5, row_1 + tile_bytes, 64);
        _tile_dpbf16ps(1, 6, 5);
        _tile_dpbf16ps(3, 7, 5);
    }
}

inline float * column_of(const weights_product & p, int64_t column) {
    return reinterpret_cast<float *>(reinterpret_cast<char *>(p.out) + column * p.out_bytes);
}

// What a thread works on: some rows, unpacked for some blocks, and their sums with some columns. A block of columns is
// read from the first cache for most of the rows, all else from the second.
template <class Row>
struct amx_work {
    static constexpr int row_tiles    = 8;
    static constexpr int column_tiles = 32;
    static constexpr int n_blocks     = 16 / Row::parts;

    char  rows[n_blocks][row_tiles][Row::parts * tile_bytes];
    float sums[column_tiles][row_tiles][lanes][lanes];

    // Where a matrix has fewer rows, the last one again
    void unpack(const weights_product & p, int64_t row, int64_t n_rows, int64_t block, int64_t n) {
        for (int t = 0; t * lanes < n_rows; t++) {
            const char * from[lanes];
            for (int64_t i = 0; i < lanes; i++) {
                const int64_t r = row + (t * lanes + i < n_rows ? t * lanes + i : n_rows - 1);
                from[i]         = static_cast<const char *>(p.rows) + r * p.row_bytes + block * WEIGHTS_BLOCK * 2;
            }
            for (int64_t b = 0; b < n; b++) {
                __m512i pairs[16];
                transpose(from, pairs);
                for (int i = 0; i < 16; i++) {
                    Row::split(pairs[i], rows[b][t] + 64 * i);
                    from[i] += 64;
                }
            }
        }
    }

    // 32 columns with 32 rows; tiles 0 to 3 are sums
    void multiply(const char * const * columns, int column_tile, int row_tile, int64_t n, bool begins) {
        float (*first)[lanes][lanes] = sums[column_tile] + row_tile, (*second)[lanes][lanes] = first + row_tiles;
        if (begins) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_loadd(0, first[0], 64);
            _tile_loadd(1, first[1], 64);
            _tile_loadd(2, second[0], 64);
            _tile_loadd(3, second[1], 64);
        }
        for (int64_t b = 0; b < n; b++) {
            const int64_t at = b * Row::parts * tile_bytes;
            add_products<Row>(columns[0] + at, columns[1] + at, rows[b][row_tile], rows[b][row_tile + 1]);
        }
        _tile_stored(0, first[0], 64);
        _tile_stored(1, first[1], 64);
        _tile_stored(2, second[0], 64);
        _tile_stored(3, second[1], 64);
    }

    void write(const weights_product & p, int64_t row, int64_t n_rows, int64_t column, int64_t n_columns) const {
        for (int64_t c = 0; c < n_columns; c++) {
            float * const out = column_of(p, column + c) + row;
            for (int64_t r = 0; r < n_rows; r += lanes) {
                const int64_t n    = n_rows - r < lanes ? n_rows - r : lanes;
                const __m512  some = _mm512_load_ps(sums[c / lanes][r / lanes][c % lanes]);
                _mm512_mask_storeu_ps(out + r, __mmask16((1u << n) - 1), some);
            }
        }
    }
};

template <class Row>
void run_rows(const weights_product & p, void * memory, int64_t row_0, int64_t row_1) {
    using work_of               = amx_work<Row>;
    constexpr int64_t most_rows = work_of::row_tiles * lanes, most_columns = work_of::column_tiles * lanes;

    const weights_columns columns = {
        p.type, false, p.n_elements, p.n_columns, const_cast<void *>(p.columns), nullptr
    };
    const int64_t      n_blocks = p.n_elements / WEIGHTS_BLOCK;
    work_of &          work     = *static_cast<work_of *>(memory);
    const tile_session session;
    for (int64_t column = 0; column < p.n_columns; column += most_columns) {
        const int64_t n_columns = p.n_columns - column < most_columns ? p.n_columns - column : most_columns;
        for (int64_t row = row_0; row < row_1; row += most_rows) {
            const int64_t n_rows = row_1 - row < most_rows ? row_1 - row : most_rows;
            for (int64_t block = 0; block < n_blocks; block += work_of::n_blocks) {
                const int64_t n = n_blocks - block < work_of::n_blocks ? n_blocks - block : work_of::n_blocks;
                work.unpack(p, row, n_rows, block, n);
                memory_is_used();
                const auto tile = [&](int64_t c) {
                    return tile_of<Row>(columns, column + (c < n_columns ? c : 0), block);
                };
                for (int64_t c = 0; c < n_columns; c += 2 * lanes) {
                    const char * const of[2] = { tile(c), tile(c + lanes) };
                    for (int64_t r = 0; r < n_rows; r += 2 * lanes) {
                        work.multiply(of, int(c / lanes), int(r / lanes), n, block == 0);
                    }
                }
            }
            work.write(p, row, n_rows, column, n_columns);
        }
    }
}

size_t columns_bytes(int type, int64_t n_elements, int64_t n_columns) {
    const int64_t tiles = (n_columns + lanes - 1) / lanes * (n_elements / WEIGHTS_BLOCK);
    return size_t(tiles) * tile_bytes * (type == WEIGHTS_F16 ? amx_f16::parts : amx_bf16::parts);
}

void pack(const weights_columns & columns, const float * x, int64_t column, int64_t first, int64_t n) {
    if (columns.type == WEIGHTS_F16) {
        return pack_blocks<amx_f16>(columns, x, column, first, n);
    }
    pack_blocks<amx_bf16>(columns, x, column, first, n);
}

size_t work_bytes(int64_t, int64_t) {
    static_assert(sizeof(amx_work<amx_bf16>) == sizeof(amx_work<amx_f16>));
    return sizeof(amx_work<amx_f16>);
}

void run(const weights_product & p, void * work, int64_t row_0, int64_t row_1) {
    if (p.type == WEIGHTS_F16) {
        return run_rows<amx_f16>(p, work, row_0, row_1);
    }
    run_rows<amx_bf16>(p, work, row_0, row_1);
}

} // namespace

const weights_kernels * weights_amx() {
    static const weights_kernels kernels = { "amx", true, 1, cpu_has_amx, work_bytes, columns_bytes, pack, run };
    return &kernels;
}

} // namespace mixedkv
