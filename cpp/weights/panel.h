// The one body of all types and instruction sets. Rows are unpacked into a panel, which is multiplied with a few
// columns at a time; a panel is unpacked once for all columns. For a few columns alone, as in decoding, each unit of
// blocks is multiplied as it is unpacked, with no panel between. Sums and their order are the same in both ways.
//
// V::sum adds the products of a block: V::sum<Row> s; s.begin(start); V::add_group(s, at, values, column, group);
// s.end().

#pragma once

#include "columns.h"
#include "unpack.h"

#include <type_traits>

namespace mixedkv {
namespace {

inline int32_t dword_at(const void * p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return x;
}

// What instruction sets have alike that multiply a dword of a column with all rows
struct by_dwords {
    static constexpr bool panel_has_bias = true;

    // Group `at` of those that the sum has, which is group `group` of the block
    template <class Sum, class Ints>
    MIXEDKV_INLINE static void add_group(Sum & to, int at, Ints values, const column_block & column, int group) {
        to.add(at, values, dword_at(column.group(group)));
    }

    // Of vector `at` of a panel, when a block is there
    template <class Values>
    MIXEDKV_INLINE static void arrange(Values &, int) {}
};

// A block of N times V::lanes rows
template <class V, class Row, int N>
struct panel_block {
    typename V::ints   values[groups][N]; // bytes
    typename V::floats scale[traits<Row>.scales][N];
    typename V::floats least[N];
};

// Puts what is unpacked into vector `at` of a panel.
template <class V, class Row, int N>
struct to_panel {
    panel_block<V, Row, N> * blocks;
    int                      at;

    MIXEDKV_INLINE void scale(int block, int half, typename V::floats x) { blocks[block].scale[half][at] = x; }
    MIXEDKV_INLINE void least(int block, typename V::floats x) { blocks[block].least[at] = x; }
    MIXEDKV_INLINE void done(int block) { V::arrange(blocks[block].values, at); }

    MIXEDKV_INLINE void values(int block, int group, typename V::ints x) {
        if constexpr (V::panel_has_bias) {
            blocks[block].values[group][at] = x;
        } else {
            blocks[block].values[group][at] = V::template without_bias<Row>(x);
        }
    }
};

// To the second cache. Short rows that are read side by side escape the processor's own prefetching, so the rows after
// them are fetched meanwhile; 16 rows and the next 16 are more than the first cache holds.
MIXEDKV_INLINE void fetch(const char * p, size_t n) {
    for (size_t line = 0; line < n; line += 64) {
        __builtin_prefetch(p + line, 0, 2);
    }
}

// Up to N * V::lanes rows; where a matrix has fewer, the last one again. Of rows that lie together the first one
// counts.
template <class V, int N>
struct panel_rows {
    static constexpr int at_most = N * V::lanes;

    const char * rows[at_most];
    int64_t      first;
    int          n;

    panel_rows(const weights_product & p, int64_t row_0, int64_t row_1, int together) :
        first(row_0), n(int(row_1 - row_0 < at_most ? row_1 - row_0 : at_most)) {
        for (int r = 0; r < at_most; r++) {
            rows[r] = static_cast<const char *>(p.rows) + (row_0 + (r < n ? r : n - together)) * p.row_bytes;
        }
    }

    // Where the rows after these begin
    const char * next(const weights_product & p) const {
        return static_cast<const char *>(p.rows) + (first + at_most) * p.row_bytes;
    }

    template <class Row>
    MIXEDKV_INLINE void unpack_unit(int64_t unit, panel_block<V, Row, N> * blocks) const {
#pragma GCC unroll 2
        for (int i = 0; i < N; i++) {
            to_panel<V, Row, N> out = { blocks, i };
            unpack<V>(static_cast<const Row *>(nullptr), rows + i * V::lanes, unit * sizeof(Row), out);
        }
    }
};

// Columns that are multiplied at once
template <int Columns>
struct decode_columns {
    const column_block * in[Columns];
    float *              out[Columns];

    decode_columns(const weights_product & p, int64_t first, int64_t row) {
        for (int c = 0; c < Columns; c++) {
            in[c]  = packed_column(p, first + c);
            out[c] = out_column(p, first + c) + row;
        }
    }
};

// The sums of a block's elements that have a scale in common, of all rows of a panel with some columns
template <class V, class Row, int N, int Columns>
struct block_sums {
    static constexpr int part = groups / traits<Row>.scales;

    typename V::template sum<Row> whole[Columns][N];

    MIXEDKV_INLINE void add(const panel_block<V, Row, N> & w, const column_block * const * in, int64_t block, int s) {
#pragma GCC unroll 8
        for (int c = 0; c < Columns; c++) {
#pragma GCC unroll 2
            for (int i = 0; i < N; i++) {
                whole[c][i].begin(V::panel_has_bias && traits<Row>.bias ? in[c][block].start[s] : 0);
            }
        }
#pragma GCC unroll 8
        for (int g = 0; g < part; g++) {
#pragma GCC unroll 8
            for (int c = 0; c < Columns; c++) {
#pragma GCC unroll 2
                for (int i = 0; i < N; i++) {
                    V::add_group(whole[c][i], g, w.values[s * part + g][i], in[c][block], s * part + g);
                }
            }
        }
    }

    MIXEDKV_INLINE typename V::ints of(int column, int at) const { return whole[column][at].end(); }
};

template <class V, int N, int Columns>
struct panel_sums {
    typename V::floats at[Columns][N];

    MIXEDKV_INLINE void load(float * const out[Columns], int n_rows) {
        for (int c = 0; c < Columns; c++) {
            float         some[N * V::lanes];
            const float * from = out[c];
            if (n_rows < N * V::lanes) {
                std::memcpy(some, out[c], n_rows * sizeof(float));
                from = some;
            }
            for (int i = 0; i < N; i++) {
                at[c][i] = V::load(from + i * V::lanes);
            }
        }
    }

    MIXEDKV_INLINE void store(float * const out[Columns], int n_rows) const {
        for (int c = 0; c < Columns; c++) {
            float   some[N * V::lanes];
            float * to = n_rows == N * V::lanes ? out[c] : some;
            for (int i = 0; i < N; i++) {
                V::store(to + i * V::lanes, at[c][i]);
            }
            if (to == some) {
                std::memcpy(out[c], some, n_rows * sizeof(float));
            }
        }
    }

    template <class Row>
    MIXEDKV_INLINE void add(const panel_block<V, Row, N> & w, const column_block * const * in, int64_t block) {
#pragma GCC unroll 2
        for (int s = 0; s < traits<Row>.scales; s++) {
            block_sums<V, Row, N, Columns> sums;
            sums.add(w, in, block, s);
#pragma GCC unroll 8
            for (int c = 0; c < Columns; c++) {
#pragma GCC unroll 2
                for (int i = 0; i < N; i++) {
                    const typename V::floats x = V::to_floats(sums.of(c, i));
                    at[c][i]                   = V::fma(x, w.scale[s][i] * V::set(in[c][block].scale), at[c][i]);
                }
            }
        }
        if (traits<Row>.has_least) {
#pragma GCC unroll 8
            for (int c = 0; c < Columns; c++) {
#pragma GCC unroll 2
                for (int i = 0; i < N; i++) {
                    at[c][i] = V::fma(w.least[i], V::set(in[c][block].sum), at[c][i]);
                }
            }
        }
    }
};

// A panel with `Columns` columns
template <class V, class Row, int N, int Columns>
void multiply(const weights_product & p, const panel_block<V, Row, N> * panel, int64_t block_0, int64_t n_blocks,
              int64_t column, int64_t row, int n_rows) {
    const decode_columns<Columns> columns(p, column, row);
    panel_sums<V, N, Columns>     sums = {};
    if (block_0) {
        sums.load(columns.out, n_rows);
    }
    for (int64_t b = 0; b < n_blocks; b++) {
        sums.template add<Row>(panel[b], columns.in, block_0 + b);
    }
    sums.store(columns.out, n_rows);
}

// All columns, by panels
template <class V, class Row>
void run_panels(const weights_product & p, int64_t row_0, int64_t row_1) {
    constexpr int          N        = V::vectors;
    constexpr int          Columns  = V::columns;
    const int64_t          n_blocks = p.n_elements / WEIGHTS_BLOCK;
    panel_block<V, Row, N> panel[V::panel_blocks];
    for (int64_t r = row_0; r < row_1; r += N * V::lanes) {
        const panel_rows<V, N> rows(p, r, row_1, traits<Row>.together);
        const char *           next = rows.next(p);
        for (int64_t b_0 = 0; b_0 < n_blocks; b_0 += V::panel_blocks) {
            const int64_t n = n_blocks - b_0 < V::panel_blocks ? n_blocks - b_0 : V::panel_blocks;
            for (int64_t b = 0; b < n; b += traits<Row>.blocks) {
                constexpr size_t bytes = N * V::lanes * sizeof(Row) / traits<Row>.together;
                fetch(next, bytes);
                next += bytes;
                rows.template unpack_unit<Row>((b_0 + b) / traits<Row>.blocks, panel + b);
            }
            int64_t c = 0;
            for (; c + Columns <= p.n_columns; c += Columns) {
                multiply<V, Row, N, Columns>(p, panel, b_0, n, c, r, rows.n);
            }
            switch (p.n_columns - c) {
            case 1:
                multiply<V, Row, N, 1>(p, panel, b_0, n, c, r, rows.n);
                break;
            case 2:
                multiply<V, Row, N, 2>(p, panel, b_0, n, c, r, rows.n);
                break;
            case 3:
                multiply<V, Row, N, 3>(p, panel, b_0, n, c, r, rows.n);
                break;
            case 4:
                multiply < V, Row, N, Columns<5 ? 1 : 4>(p, panel, b_0, n, c, r, rows.n);
                break;
            case 5:
                multiply < V, Row, N, Columns<6 ? 1 : 5>(p, panel, b_0, n, c, r, rows.n);
                break;
            }
        }
    }
}

// Multiplies what is unpacked with a few columns.
template <class V, class Row, int Columns>
struct to_sums {
    using sum = typename V::template sum<Row>;

    const decode_columns<Columns> & columns;
    const char *                    next;  // rows to fetch
    int64_t                         first; // block of the struct that is unpacked
    typename V::floats              sums[Columns];
    typename V::floats              scales[traits<Row>.scales], leasts;
    sum                             whole[Columns][traits<Row>.scales];

    MIXEDKV_INLINE to_sums(const decode_columns<Columns> & columns_, const char * next_) :
        columns(columns_), next(next_), first(0) {
#pragma GCC unroll 8
        for (int c = 0; c < Columns; c++) {
            sums[c] = V::set(0.0f);
        }
    }

    MIXEDKV_INLINE void scale(int, int half, typename V::floats x) { scales[half] = x; }
    MIXEDKV_INLINE void least(int, typename V::floats x) { leasts = x; }

    MIXEDKV_INLINE void values(int block, int group, typename V::ints x) {
        constexpr int part = groups / traits<Row>.scales;
#pragma GCC unroll 8
        for (int c = 0; c < Columns; c++) {
            const column_block & column = columns.in[c][first + block];
            sum &                to     = whole[c][group / part];
            if (group % part == 0) {
                to.begin(traits<Row>.bias ? column.start[group / part] : 0);
            }
            V::add_group(to, group % part, x, column, group);
        }
    }

    // A dword of the row with the elements from `at` on in a half of the column, zeros around them counted
    MIXEDKV_INLINE void nibbles(int block, int at, typename V::ints x, bool begins) {
#pragma GCC unroll 8
        for (int c = 0; c < Columns; c++) {
            const column_block & column = columns.in[c][first + block];
            if (begins) {
                whole[c][0].begin(traits<Row>.bias ? column.start[0] : 0);
            }
            whole[c][0].add(0, low_nibbles(x), dword_at(column.halves[0] + at));
            whole[c][0].add(0, high_nibbles(x), dword_at(column.halves[1] + at));
        }
    }

    MIXEDKV_INLINE void done(int block) {
        constexpr size_t of_block = V::lanes * sizeof(Row) / traits<Row>.together / traits<Row>.blocks;
        fetch(next, of_block);
        next += of_block;
#pragma GCC unroll 8
        for (int c = 0; c < Columns; c++) {
            const column_block & column = columns.in[c][first + block];
#pragma GCC unroll 2
            for (int s = 0; s < traits<Row>.scales; s++) {
                const typename V::floats x = V::to_floats(whole[c][s].end());
                sums[c]                    = V::fma(x, scales[s] * V::set(column.scale), sums[c]);
            }
            if (traits<Row>.has_least) {
                sums[c] = V::fma(leasts, V::set(column.sum), sums[c]);
            }
        }
    }
};

// Few columns
template <class V, class Row, int Columns>
void run_columns(const weights_product & p, int64_t row_0, int64_t row_1) {
    const int64_t n_units = p.n_elements / WEIGHTS_BLOCK / traits<Row>.blocks;
    for (int64_t r = row_0; r < row_1; r += V::lanes) {
        const panel_rows<V, 1>        rows(p, r, row_1, traits<Row>.together);
        const decode_columns<Columns> columns(p, 0, r);
        to_sums<V, Row, Columns>      out(columns, rows.next(p));
        for (int64_t u = 0, n; u < n_units; u += n) {
            n         = V::unpacks_many && n_units - u >= at_once<Row> ? at_once<Row> : 1;
            out.first = u * traits<Row>.blocks;
            if constexpr (V::unpacks_many && at_once<Row> > 1) {
                if (n > 1) {
                    unpack_many<V>(static_cast<const Row *>(nullptr), rows.rows, u * sizeof(Row), out);
                    continue;
                }
            }
            unpack<V>(static_cast<const Row *>(nullptr), rows.rows, u * sizeof(Row), out);
        }
        for (int c = 0; c < Columns; c++) {
            float some[V::lanes];
            V::store(some, out.sums[c]);
            std::memcpy(columns.out[c], some, rows.n * sizeof(float));
        }
    }
}

template <class V, class Row>
void run_type(const weights_product & p, int64_t row_0, int64_t row_1) {
    if (p.n_columns > V::decode_columns) {
        return run_panels<V, Row>(p, row_0, row_1);
    }
    if constexpr (V::decode_columns > 0) {
        switch (p.n_columns) {
        case 1:
            return run_columns<V, Row, 1>(p, row_0, row_1);
        case 2:
            return run_columns<V, Row, 2>(p, row_0, row_1);
        case 3:
            return run_columns<V, Row, 3>(p, row_0, row_1);
        case 4:
            return run_columns<V, Row, 4>(p, row_0, row_1);
        case 5:
            return run_columns<V, Row, (V::decode_columns < 5 ? 1 : 5)>(p, row_0, row_1);
        case 6:
            return run_columns<V, Row, (V::decode_columns < 6 ? 1 : 6)>(p, row_0, row_1);
        case 7:
            return run_columns<V, Row, (V::decode_columns < 7 ? 1 : 7)>(p, row_0, row_1);
        case 8:
            return run_columns<V, Row, (V::decode_columns < 8 ? 1 : 8)>(p, row_0, row_1);
        }
    }
}

template <class V>
void run_body(const weights_product & p, void *, int64_t row_0, int64_t row_1) {
    with_row_type(p.type, [&](auto * row) {
        using Row = row_of<decltype(row)>;
        if constexpr (traits<Row>.together <= V::lanes) { // weights_kernels::together
            run_type<V, Row>(p, row_0, row_1);
        }
    });
}

} // namespace
} // namespace mixedkv
