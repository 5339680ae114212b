// Numbers at the edge of what rows can hold, for one instruction set: test_numbers [--isa NAME]

#include "support.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>

using mixedkv::row_type;

namespace {

int failures = 0;
int rounding = 16;

void expect(bool ok, const std::string & what) {
    if (!ok) {
        std::printf("FAIL %s\n", what.c_str());
        failures++;
    }
}

// of all queries up to `end`
double worst_error(const test::problem & p, int end) {
    return test::worst_error(p.out, p.reference(), size_t(end) * p.o.n_head * p.o.d_v);
}

test::options causal(row_type type, int n_queries) {
    test::options o;
    o.n_queries = n_queries;
    o.n_keys    = { 200 + n_queries };
    o.type_k = o.type_v = { type };
    o.mask              = test::mask_kind::causal;
    o.rounding          = rounding;
    return o;
}

// Every element of a row, or the scale of every block of it
void fill(test::rows & rows, int64_t row, uint16_t half) {
    const int    elements = test::block_elements(rows.type);
    const size_t step     = rows.type == row_type::f16 ? 2 : test::row_size(rows.type, elements);
    const size_t n        = rows.type == row_type::f16 ? rows.d : rows.d / elements;
    for (int head = 0; head < rows.n_head; head++) {
        for (size_t i = 0; i < n; i++) {
            std::memcpy(rows.bytes.data() + row * rows.row_bytes + head * rows.head_bytes + i * step, &half, 2);
        }
    }
}

// The last key is seen by the last query alone, and lies in one block with keys that all see.
void hidden_extremes_do_not_reach_other_queries() {
    for (const row_type type : test::stored_types()) {
        for (const int n_queries : { 2, 5, 16, 40 }) {
            for (const uint16_t half : { 0x7bff, 0xfbff, 0x0001, 0x8001, 0x0000 }) { // +-65504, denormals, 0
                test::rng     r(11);
                test::problem p(r, causal(type, n_queries));
                fill(p.k[0], p.n_keys() - 1, half);
                fill(p.v[0], p.n_keys() - 1, half);
                test::run({ p.args() }, 2);
                const double error = worst_error(p, n_queries - 1);
                expect(error <= (rounding == 8 ? 4e-2 : 1e-4),
                       "error " + std::to_string(error) + " beside " + std::to_string(half) + ": " + p.o.describe());
                for (const float x : p.out) {
                    expect(std::isfinite(x), "not finite beside " + std::to_string(half) + ": " + p.o.describe());
                }
            }
        }
    }
}

void nan_in_a_query_stays_in_its_row() {
    for (const row_type type : test::stored_types()) {
        for (const int n_queries : { 1, 5, 16, 40 }) {
            for (const float odd : { NAN, INFINITY }) {
                test::rng     r(12);
                test::problem p(r, causal(type, n_queries));
                test::run({ p.args() }, 2);
                const std::vector<float> before = p.out;

                const int query = n_queries / 2, head = 1, row = query * p.o.n_head + head;
                p.q[size_t(row) * p.o.d_k + 3] = odd;
                test::run({ p.args() }, 2);
                bool spoilt = true, others = true;
                for (int i = 0; i < n_queries * p.o.n_head; i++) {
                    for (int j = 0; j < p.o.d_v; j++) {
                        const float x = p.out[size_t(i) * p.o.d_v + j], y = before[size_t(i) * p.o.d_v + j];
                        (i == row ? spoilt : others) &= i == row ? std::isnan(x) : std::fabs(x - y) <= 1e-4f * 4;
                    }
                }
                expect(spoilt || !std::isnan(odd), "NaN in Q gives numbers: " + p.o.describe());
                expect(others, "NaN or infinity in Q reaches another row: " + p.o.describe());
            }
        }
    }
}

// Too small for a scale that makes integers of it
void queries_near_zero() {
    for (const row_type type : test::stored_types()) {
        for (const int n_queries : { 1, 40 }) {
            for (const float size : { 0.0f, 1e-44f, 1e-38f, 1e-33f }) {
                test::rng     r(14);
                test::problem p(r, causal(type, n_queries));
                for (float & x : p.q) {
                    x *= size;
                }
                test::run({ p.args() }, 2);
                const double error = worst_error(p, n_queries);
                expect(error <= (rounding == 8 ? 4e-2 : 1e-4),
                       "error " + std::to_string(error) + " of queries near 0: " + p.o.describe());
            }
        }
    }
}

// e^2x overflows from 44.4 times the cap on
void scores_far_beyond_the_soft_cap() {
    for (const row_type type : test::stored_types()) {
        for (const int n_queries : { 1, 40 }) {
            for (const float times : { 1.0f, 20.0f, 30.0f, 60.0f, 1000.0f }) {
                test::rng     r(13);
                test::options o = causal(type, n_queries);
                o.softcap       = 2.0f;
                o.score_std     = o.softcap * times;
                test::problem p(r, o);
                test::run({ p.args() }, 2);
                const double error = worst_error(p, n_queries);
                expect(error <= (rounding == 8 ? 4e-2 : 2e-3), "error " + std::to_string(error) + " at " +
                                                                   std::to_string(times) +
                                                                   " times the cap: " + p.o.describe());
            }
        }
    }
}

} // namespace

int main(int argc, char ** argv) {
    if (!test::force_isa(argc, argv)) {
        return 77;
    }
    for (const int bits : { 16, 8 }) {
        rounding = bits;
        hidden_extremes_do_not_reach_other_queries();
        nan_in_a_query_stays_in_its_row();
        queries_near_zero();
        scores_far_beyond_the_soft_cap();
    }
    std::printf("%s: %d failures\n", mixedkv::attention_isa(), failures);
    return failures != 0;
}
