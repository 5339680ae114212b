// Random rows and columns.

#pragma once

#include "weights/columns.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace test {

const mixedkv::weights_kernels * weights_emulated_tiles(); // emulated_tiles.cpp, where the compiler has AVX-512

namespace {

using namespace mixedkv;

struct alignas(WEIGHTS_ALIGNMENT) line {
    char bytes[WEIGHTS_ALIGNMENT];
};

inline std::unique_ptr<line[]> lines(size_t bytes) {
    return std::unique_ptr<line[]>(new line[(bytes + sizeof(line) - 1) / sizeof(line)]);
}

// Null for a name that this machine has no body for
inline const weights_kernels * find_body(const std::string & name) {
    for (const auto make : std::vector<const weights_kernels * (*)()>{ MIXEDKV_BODIES }) { // of the tests
        if (name == make()->name && make()->supported()) {
            return make();
        }
    }
    return find_weights(name.c_str(), false);
}

struct named_type {
    const char * name;
    int          type;

    bool is_read_by(const weights_kernels & body) const {
        bool res = false;
        with_row_type(type, [&](auto * row) { res = traits<row_of<decltype(row)>>.together <= body.together; });
        return res;
    }
};

constexpr named_type types[] = {
    { "q4_0", WEIGHTS_Q4_0 },       { "q4_1", WEIGHTS_Q4_1 },   { "q5_0", WEIGHTS_Q5_0 },
    { "q5_1", WEIGHTS_Q5_1 },       { "q8_0", WEIGHTS_Q8_0 },   { "q4_k", WEIGHTS_Q4_K },
    { "q5_k", WEIGHTS_Q5_K },       { "q6_k", WEIGHTS_Q6_K },   { "q4_0_x8", WEIGHTS_Q4_0_X8 },
    { "q4_k_x8", WEIGHTS_Q4_K_X8 }, { "mxfp4", WEIGHTS_MXFP4 }, { "mxfp4_x8", WEIGHTS_MXFP4_X8 },
};

// `scale` and `least` in F16
inline void set_least(row_q4_1 & row, uint16_t least) {
    row.least = least;
}
inline void set_least(row_q5_1 & row, uint16_t least) {
    row.least = least;
}
inline void set_least(row_q4_k & row, uint16_t least) {
    row.least = least;
}
inline void set_least(row_q5_k & row, uint16_t least) {
    row.least = least;
}
template <class Row>
void set_least(Row &, uint16_t) {}

// Powers of two have the exponent of such a scale
inline uint8_t exponent_of(uint16_t scale) {
    return uint8_t(128 + std::ilogb(mixedkv::half_to_float(scale)));
}

template <class Scale, class Least>
void set_factors(row_mxfp4 & row, Scale scale, Least) {
    row.exponent = exponent_of(scale());
}

template <class Scale, class Least>
void set_factors(rows_mxfp4_x8 & rows, Scale scale, Least) {
    std::generate_n(rows.exponent, 8, [&] { return exponent_of(scale()); });
}

template <class Row, class Scale, class Least>
void set_factors(Row & row, Scale scale, Least least) {
    if constexpr (traits<Row>.together == 8) {
        std::generate_n(row.scale, 8, scale);
        if constexpr (traits<Row>.has_least) {
            std::generate_n(row.least, 8, least);
        }
    } else {
        row.scale = scale();
        set_least(row, least());
    }
}

// Columns in F32, one behind the other, each in two parts as threads share them
inline std::unique_ptr<line[]> pack_floats(const weights_kernels & body, weights_columns to, const float * x) {
    const size_t            bytes = body.columns_bytes(to.type, to.n_elements, to.n_columns);
    std::unique_ptr<line[]> out   = lines(bytes);
    std::memset(out.get(), 0xff, bytes); // no number, where no column is
    to.packed              = out.get();
    const int64_t n_blocks = to.n_elements / WEIGHTS_BLOCK, half = n_blocks / 2;
    for (int64_t c = 0; c < to.n_columns; c++, x += to.n_elements) {
        body.pack(to, x, c, 0, half);
        body.pack(to, x + half * WEIGHTS_BLOCK, c, half, n_blocks - half);
    }
    return out;
}

// Makes a product in calls of `at_once` rows.
inline std::vector<float> run_in_calls(const weights_kernels & body, weights_product product, int64_t at_once) {
    const auto         work = lines(body.work_bytes(product.n_elements, 0));
    std::vector<float> out(product.n_columns * product.n_rows, -1e30f);
    product.out = out.data();
    for (int64_t r = 0; r < product.n_rows; r += at_once) {
        body.run(product, work.get(), r, std::min(r + at_once, product.n_rows));
    }
    return out;
}

struct problem {
    int                      type;
    int64_t                  n_elements, n_rows, n_columns;
    size_t                   row_bytes = 0;
    std::vector<char>        rows;
    std::vector<column_q8_0> columns;

    int64_t n_blocks() const { return n_elements / WEIGHTS_BLOCK; }

    problem(int type_, int64_t elements, int64_t rows_, int64_t columns_) :
        type(type_), n_elements(elements), n_rows(rows_), n_columns(columns_), columns(n_blocks() * columns_) {
        std::mt19937                          random(unsigned(type * 101 + elements * 31 + rows_ * 7 + columns_));
        std::uniform_real_distribution<float> size(0.01f, 1.0f);
        with_row_type(type, [&](auto * row) {
            constexpr row_traits of_row = traits<row_of<decltype(row)>>;

            row_bytes = n_blocks() / of_row.blocks * sizeof(*row) / of_row.together;
            n_rows    = (n_rows + of_row.together - 1) / of_row.together * of_row.together;
        });
        rows.resize(row_bytes * n_rows);
        for (char & byte : rows) {
            byte = char(random());
        }
        set_scales([&] { return float_to_half(0.05f * size(random)); },
                   [&] { return float_to_half(-0.4f * size(random)); });
        for (column_q8_0 & block : columns) {
            for (int8_t & value : block.values) {
                value = int8_t(int(random() % 255) - 127);
            }
            block.scale = float_to_half(0.02f * size(random));
        }
    }

    template <class Scale, class Least>
    void set_scales(Scale scale, Least least) {
        with_row_type(type, [&](auto * row) {
            auto * all = reinterpret_cast<std::remove_const_t<std::remove_pointer_t<decltype(row)>> *>(rows.data());
            for (size_t i = 0; i < rows.size() / sizeof(*row); i++) {
                set_factors(all[i], scale, least);
            }
        });
    }

    // `n` columns from `first` on, whose blocks are what quantising makes of them
    std::unique_ptr<line[]> packed(const weights_kernels & body, int64_t first, int64_t n) const {
        static const column_q8_0 * next;
        next = columns.data() + first * n_blocks();

        const size_t            bytes = body.columns_bytes(type, n_elements, n);
        std::unique_ptr<line[]> out   = lines(bytes);
        std::memset(out.get(), 0xff, bytes); // no number, where no column is
        const std::vector<float> unused(n_elements);
        const weights_columns    to = { type,
                                        false,
                                        n_elements,
                                        n,
                                        out.get(),
                                        [](const float *, void * blocks, int64_t n_rounded) {
                                         std::memcpy(blocks, next, n_rounded / WEIGHTS_BLOCK * sizeof(column_q8_0));
                                         next += n_rounded / WEIGHTS_BLOCK;
                                     } };
        for (int64_t c = 0; c < n; c++) {
            body.pack(to, unused.data(), c, 0, n_blocks());
        }
        return out;
    }

    weights_product product(const void * packed_columns, int64_t n, float * out, const int32_t * chosen) const {
        return { type,    n_elements, n_rows,   n, rows.data(), row_bytes, packed_columns, out, n_rows * sizeof(float),
                 nullptr, chosen,     n_columns };
    }

    // Of `n` columns from `first` on, in calls of `at_once` rows
    std::vector<float> run(const weights_kernels & body, int64_t first, int64_t n, int64_t at_once) const {
        const auto columns_of = packed(body, first, n);
        return run_in_calls(body, product(columns_of.get(), n, nullptr, nullptr), at_once);
    }

    std::vector<float> run(const weights_kernels & body) const { return run(body, 0, n_columns, n_rows); }

    // What the rows hold, element after element: what the twin makes of columns with a single one
    std::vector<float> elements() const {
        problem ones(type, n_elements, n_rows, n_elements);
        ones.rows = rows;
        for (int64_t b = 0; b < int64_t(ones.columns.size()); b++) {
            const int64_t column = b / n_blocks(), first = b % n_blocks() * WEIGHTS_BLOCK;
            ones.columns[b] = {};
            if (column >= first && column < first + WEIGHTS_BLOCK) {
                ones.columns[b].scale                  = float_to_half(1.0f);
                ones.columns[b].values[column - first] = 1;
            }
        }
        return ones.run(*weights_scalar());
    }

    // Of `n` columns that are chosen, of which column i of `out` has the products of the last but i
    std::vector<float> run_chosen(const weights_kernels & body, int64_t n) const {
        const auto           all  = packed(*weights_scalar(), 0, n_columns);
        const auto           work = lines(body.work_bytes(n_elements, n));
        std::vector<int32_t> pairs;
        for (int32_t i = 0; i < n; i++) {
            pairs.insert(pairs.end(), { int32_t(n_columns - 1 - i), i });
        }
        std::vector<float> out(n * n_rows);
        body.run(product(all.get(), n, out.data(), pairs.data()), work.get(), 0, n_rows);
        return out;
    }
};

inline float value_of(int type, uint16_t bits) {
    if (type == WEIGHTS_F16) {
        return half_to_float(bits);
    }
    const uint32_t whole = uint32_t(bits) << 16;
    float          x;
    std::memcpy(&x, &whole, sizeof(x));
    return x;
}

inline uint16_t bits_of(int type, float x) {
    if (type == WEIGHTS_F16) {
        return float_to_half(x);
    }
    uint32_t whole;
    std::memcpy(&whole, &x, sizeof(whole));
    return uint16_t((whole + 0x7fff + (whole >> 16 & 1)) >> 16);
}

// With rows of 16 bits
struct f16_problem {
    int                   type;
    int64_t               n_elements, n_rows, n_columns;
    std::vector<uint16_t> rows;
    std::vector<float>    columns;

    f16_problem(int type_, int64_t elements, int64_t rows_, int64_t columns_) :
        type(type_), n_elements(elements), n_rows(rows_), n_columns(columns_), rows(elements * rows_),
        columns(elements * columns_) {
        std::mt19937                    random(unsigned(type * 101 + elements * 31 + rows_ * 7 + columns_));
        std::normal_distribution<float> normal;
        std::generate(rows.begin(), rows.end(), [&] { return bits_of(type, 0.02f * normal(random)); });
        std::generate(columns.begin(), columns.end(), [&] { return normal(random); });
    }

    // `n` columns from `first` on
    std::unique_ptr<line[]> packed(const weights_kernels & body, int64_t first, int64_t n) const {
        return pack_floats(body, { type, false, n_elements, n, nullptr, nullptr }, columns.data() + first * n_elements);
    }

    weights_product product(const void * packed, int64_t n, float * out) const {
        return { type,    n_elements,  n_rows,
                 n,       rows.data(), size_t(n_elements) * 2,
                 packed,  out,         n_rows * sizeof(float),
                 nullptr, nullptr,     0 };
    }

    // In calls of `at_once` rows
    std::vector<float> run(const weights_kernels & body, int64_t first, int64_t n, int64_t at_once) const {
        const auto columns_of = packed(body, first, n);
        return run_in_calls(body, product(columns_of.get(), n, nullptr), at_once);
    }

    std::vector<float> run(const weights_kernels & body) const { return run(body, 0, n_columns, n_rows); }
};

} // namespace
} // namespace test
