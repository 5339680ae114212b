// The body that dequantises rows to BF16: nearer to products in F64 than the integers are, for each type.
//
//     test_bf16

#include "support.h"

#include "check.h"
#include "environment.h"

#include <cmath>

namespace {

using namespace test;

const weights_kernels * body;

// Rounds as llama.cpp does.
void quantise(const float * x, void * blocks, int64_t n_elements) {
    auto * out = static_cast<column_q8_0 *>(blocks);
    for (int64_t b = 0; b < n_elements / WEIGHTS_BLOCK; b++, x += WEIGHTS_BLOCK) {
        float most = 0.0f;
        for (int i = 0; i < WEIGHTS_BLOCK; i++) {
            most = std::max(most, std::fabs(x[i]));
        }
        out[b].scale = float_to_half(most / 127.0f);
        for (int i = 0; i < WEIGHTS_BLOCK; i++) {
            out[b].values[i] = int8_t(most > 0.0f ? std::lround(x[i] * 127.0f / most) : 0);
        }
    }
}

// Rows of a type with columns in F32
struct float_problem {
    problem            rows;
    std::vector<float> columns;

    float_problem(int type, int64_t n_elements, int64_t n_rows, int64_t n_columns) :
        rows(type, n_elements, n_rows, n_columns), columns(n_elements * n_columns) {
        std::mt19937                    random(unsigned(type * 7 + n_elements + n_rows + n_columns));
        std::normal_distribution<float> normal;
        std::generate(columns.begin(), columns.end(), [&] { return normal(random); });
    }

    // Of `n` columns from `first` on, in calls of `at_once` rows
    std::vector<float> run(const weights_kernels & by, int64_t first, int64_t n, int64_t at_once) const {
        const weights_columns of     = { rows.type, false, rows.n_elements, n, nullptr, quantise };
        const auto            packed = pack_floats(by, of, columns.data() + first * rows.n_elements);
        return run_in_calls(by, rows.product(packed.get(), n, nullptr, nullptr), at_once);
    }

    std::vector<float> run(const weights_kernels & by) const { return run(by, 0, rows.n_columns, rows.n_rows); }

    struct sums {
        std::vector<double> exact, sizes; // of all terms, and of their absolute values
    };

    sums exact() const {
        const std::vector<float> weights = rows.elements();
        sums                     res     = { std::vector<double>(rows.n_columns * rows.n_rows), {} };
        res.sizes                        = res.exact;
        for (int64_t c = 0; c < rows.n_columns; c++) {
            for (int64_t e = 0; e < rows.n_elements; e++) {
                const double x = columns[c * rows.n_elements + e];
                for (int64_t r = 0; r < rows.n_rows; r++) {
                    const double term = double(weights[e * rows.n_rows + r]) * x;
                    res.exact[c * rows.n_rows + r] += term;
                    res.sizes[c * rows.n_rows + r] += std::fabs(term);
                }
            }
        }
        return res;
    }
};

// Root of the mean square, of the differences and of the exact products
double error(const std::vector<float> & got, const std::vector<double> & exact) {
    double differences = 0.0, all = 0.0;
    for (size_t i = 0; i < got.size(); i++) {
        differences += (got[i] - exact[i]) * (got[i] - exact[i]);
        all += exact[i] * exact[i];
    }
    return std::sqrt(differences / all);
}

void is_nearer_than_integers(const named_type & of) {
    const float_problem       p(of.type, 1024, 48, 40);
    const std::vector<double> exact = p.exact().exact;
    const double              mine = error(p.run(*body), exact), integers = error(p.run(*weights_scalar()), exact);
    std::printf("%-8s error %.1e, of integers %.1e\n", of.name, mine, integers);
    CHECK(mine < 0.5 * integers);
}

void shapes(const named_type & of) {
    int64_t unit = WEIGHTS_BLOCK;
    with_row_type(of.type, [&](auto * row) { unit *= traits<row_of<decltype(row)>>.blocks; });
    for (const int64_t n_units : { 1, unit == WEIGHTS_BLOCK ? 17 : 3 }) {
        for (const int64_t n_rows : { 1, 33, 257 }) {
            for (const int64_t n_columns : { 1, 17, 65 }) {
                const float_problem       p(of.type, unit * n_units, n_rows, n_columns);
                const std::vector<float>  got  = p.run(*body);
                const float_problem::sums of_p = p.exact();
                for (size_t i = 0; i < got.size(); i++) {
                    CHECK(std::fabs(got[i] - of_p.exact[i]) < 8e-3 * of_p.sizes[i]); // both are rounded to 8 bits
                }
            }
        }
    }
}

void a_column_has_the_same_bits_in_any_batch(const named_type & of) {
    const float_problem      p(of.type, 1280, 72, 70);
    const std::vector<float> together = p.run(*body);
    for (int64_t n = 1; n <= 70; n += 3) {
        const int64_t            first = n * 13 % (71 - n);
        const std::vector<float> some  = p.run(*body, first, n, 32);
        CHECK(std::equal(some.begin(), some.end(), together.begin() + first * 72));
    }
}

// Of columns that are chosen, some of them twice, products are those of the same columns packed for them alone. Where
// there are few, or few are packed, they are multiplied as integers.
void columns_may_be_chosen(const named_type & of, int n_packed) {
    const float_problem p(of.type, 512, 40, n_packed);
    weights_columns     columns = { of.type, true, 512, n_packed, nullptr, quantise };
    const auto          packed  = lines(weights_columns_bytes(&columns));
    columns.packed              = packed.get();
    for (int64_t c = 0; c < p.rows.n_columns; c++) {
        weights_pack(&columns, p.columns.data() + c * 512, c, 0, 5);
        weights_pack(&columns, p.columns.data() + c * 512 + 5 * WEIGHTS_BLOCK, c, 5, 11);
    }
    const auto work = lines(weights_work_bytes(&columns));
    for (const int32_t n : { 1, 17, WEIGHTS_BF16_COLUMNS, 255, 300 }) {
        std::vector<int32_t> pairs;
        float_problem        apart = p;
        apart.columns.clear();
        apart.rows.n_columns = n;
        for (int32_t i = 0; i < n; i++) {
            const int32_t from = i * 37 % n_packed;
            pairs.insert(pairs.end(), { from, n - 1 - i });
            apart.columns.insert(apart.columns.end(), p.columns.begin() + from * 512,
                                 p.columns.begin() + (from + 1) * 512);
        }
        std::vector<float> got(size_t(n) * 40);
        weights_product    product = p.rows.product(packed.get(), n, got.data(), pairs.data());
        weights_run(&product, work.get(), 0, 32);
        weights_run(&product, work.get(), 32, 40);
        const bool               in_bf16 = n >= WEIGHTS_BF16_COLUMNS && n_packed >= WEIGHTS_BF16_COLUMNS;
        const std::vector<float> own     = apart.run(in_bf16 ? *body : *weights_scalar());
        for (int32_t i = 0; i < n; i++) {
            CHECK(std::equal(own.begin() + i * 40, own.begin() + (i + 1) * 40, got.begin() + (n - 1 - i) * 40));
        }
    }
}

void nan_stays_nan(const named_type & of) {
    float_problem  p(of.type, 512, 16, 33);
    const uint32_t bits = 0x7fffffff;
    std::memcpy(&p.columns[2 * 512 + 37], &bits, sizeof(bits));
    std::vector<float> got = p.run(*body);
    for (size_t i = 0; i < got.size(); i++) {
        CHECK(std::isnan(got[i]) == (i / 16 == 2));
    }
    if (of.type != WEIGHTS_MXFP4 && of.type != WEIGHTS_MXFP4_X8) { // whose scale is an exponent
        for (const uint16_t scale : { 0x7fff, 0xffff, 0x7c01 }) {
            p.rows.set_scales([&] { return scale; }, [&] { return scale; });
            got = p.run(*body);
            CHECK(std::all_of(got.begin(), got.end(), [](float x) { return std::isnan(x); }));
        }
    }
}

} // namespace

int main() {
    body = find_weights("bf16", false);
    if (!body) {
        std::printf("bf16: not on this machine\n");
        return 77;
    }
    test::set_variable("MIXEDKV_WEIGHTS", "bf16");
    for (const named_type & of : types) {
        is_nearer_than_integers(of);
        shapes(of);
        a_column_has_the_same_bits_in_any_batch(of);
        for (const int n_packed : { 20, WEIGHTS_BF16_COLUMNS - 1, 90 }) {
            columns_may_be_chosen(of, n_packed);
        }
        nan_stays_nan(of);
    }
}
