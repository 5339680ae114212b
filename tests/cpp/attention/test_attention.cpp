// attention_run against the double-precision reference, over random shapes, for one instruction set:
// test_attention [--isa NAME] [--shapes N]

#include "support.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

using mixedkv::row_type;
using test::mask_kind;

namespace {

int failures = 0;

void expect_close(const test::problem & p, const char * what) {
    const double error = test::worst_error(p.out, p.reference(), p.out.size());
    // of integers of 16 or 8 bits, see docs/kernels.md
    if (!(error <= (p.o.rounding == 8 ? 4e-2 : 1.5e-4))) {
        std::printf("FAIL %s: error %.2e: %s\n", what, error, p.o.describe().c_str());
        failures++;
    }
}

void expect_same(const std::vector<float> & a, const std::vector<float> & b, const std::string & what) {
    if (std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) != 0) {
        std::printf("FAIL not bit-identical: %s\n", what.c_str());
        failures++;
    }
}

test::options random_options(test::rng & r) {
    const std::vector<row_type> &       types = test::all_types();
    static const std::vector<mask_kind> masks{ mask_kind::none,  mask_kind::causal,     mask_kind::window,
                                               mask_kind::holes, mask_kind::all_hidden, mask_kind::alibi };
    test::options                       o;
    o.n_head_kv = r.pick<int>({ 1, 2, 3, 4 });
    o.n_head    = o.n_head_kv * r.pick<int>({ 1, 2, 3, 4, 4, 8 });
    o.d_k       = r.pick<int>({ 32, 64, 96, 128, 128, 160, 192, 256, 288 });
    o.d_v       = r.chance(0.7) ? o.d_k : r.pick<int>({ 32, 64, 96, 128, 256 });
    o.n_queries = r.chance(0.6) ? 1 + r.below(8) : 9 + r.below(40);
    o.mask      = r.pick(masks);
    o.softcap   = r.chance(0.2) ? 10.0f : 0.0f;
    o.sinks     = r.chance(0.3);
    o.permuted  = r.chance(0.3);
    o.rounding  = r.chance(0.4) ? 8 : 16;
    const int n = 1 + r.below(mixedkv::attention_max_segments);
    o.n_keys.clear();
    o.type_k.clear();
    o.type_v.clear();
    for (int i = 0; i < n; i++) {
        o.n_keys.push_back(r.chance(0.1) ? 0 : r.chance(0.15) ? 600 + r.below(800) : 1 + r.below(200));
        o.type_k.push_back(r.pick(types));
        o.type_v.push_back(r.chance(0.5) ? o.type_k.back() : r.pick(types));
    }
    const auto whole_blocks = [](std::vector<row_type> & t, int d) {
        std::replace_if(t.begin(), t.end(), [d](row_type x) { return d % test::block_elements(x); }, row_type::q4_0);
    };
    whole_blocks(o.type_k, o.d_k);
    whole_blocks(o.type_v, o.d_v);
    const auto only_half = [&](int & d, const std::vector<row_type> & t, std::vector<int> sizes) {
        for (row_type x : t) {
            if (x != row_type::f16 && x != row_type::other) {
                return;
            }
        }
        if (r.chance(0.5)) {
            d = r.pick(sizes);
        }
    };
    only_half(o.d_k, o.type_k, { 1, 20, 80, 112, 250, 576 });
    only_half(o.d_v, o.type_v, { 1, 20, 80, 112, 250, 512 });
    return o;
}

// 0, or a power of two that divides the head size
int random_edge(test::rng & r, int d) {
    return r.chance(0.5) ? 0 : r.chance(0.5) ? d & -d : std::min(d & -d, 64);
}

void random_shapes_are_near_the_reference(int n) {
    for (int i = 0; i < n; i++) {
        test::rng     r(1000 + i);
        test::options o = random_options(r);
        test::rng     s(i);
        o.rotation_q   = random_edge(s, o.d_k);
        o.rotation_out = random_edge(s, o.d_v);
        o.scaled       = i % 2 == 1;
        o.n_pairs      = i % 3 == 0 ? 1 + i % 4 : 0;
        test::problem p(r, o);
        test::run({ p.args() }, 1 + i % 3);
        expect_close(p, "random shape");
    }
}

// Every pairing of types at every head size named in the interface, decode and prefill.
void every_pair_of_types_is_near_the_reference() {
    for (int d : { 64, 96, 128, 192, 256 }) {
        for (row_type k : test::all_types()) {
            if (d % test::block_elements(k)) {
                continue;
            }
            for (row_type v : { k, row_type::q4_0 }) {
                for (int queries : { 1, 2, 18 }) {
                    test::options o;
                    o.n_head    = 8;
                    o.d_k       = d;
                    o.d_v       = d;
                    o.n_queries = queries;
                    o.n_keys    = { 150 };
                    o.type_k    = { k };
                    o.type_v    = { v };
                    o.mask      = mask_kind::causal;
                    test::rng     r(d + queries);
                    test::problem p(r, o);
                    test::run({ p.args() }, 2);
                    expect_close(p, "pairing");
                }
            }
        }
    }
}

// The shape this is built for: cold rows, a ring of F16 rows, the running micro-batch.
test::options mixed_cache(int queries, int64_t cold, mask_kind mask) {
    test::options o;
    o.n_head    = 16;
    o.n_head_kv = 4;
    o.d_k       = 128;
    o.d_v       = 128;
    o.n_queries = queries;
    o.n_keys    = { cold, 256, queries };
    o.type_k    = { row_type::q4_0, row_type::f16, row_type::f16 };
    o.type_v    = o.type_k;
    o.mask      = mask;
    return o;
}

void any_number_of_threads_gives_the_same_bits() {
    for (int queries : { 1, 5, 48 }) {
        test::rng     r(7);
        test::problem p(r, mixed_cache(queries, 3000, mask_kind::causal));
        test::run({ p.args() }, 1);
        expect_close(p, "mixed cache");
        const std::vector<float> one = p.out;
        for (int threads = 2; threads <= 8; threads++) {
            std::fill(p.out.begin(), p.out.end(), NAN);
            if (test::run({ p.args() }, threads) != 1) {
                std::printf("FAIL not one last thread of %d\n", threads);
                failures++;
            }
            expect_same(one, p.out, std::to_string(threads) + " threads, " + p.o.describe());
        }
    }
}

// One call with several streams of different shapes gives what a call for each gives.
void streams_of_one_call_get_what_each_gets_alone() {
    test::rng                                   r(11);
    std::vector<std::unique_ptr<test::problem>> problems;
    for (int queries : { 1, 3, 40 }) {
        problems.push_back(
            std::make_unique<test::problem>(r, mixed_cache(queries, 500 + 300 * queries, mask_kind::causal)));
    }
    std::vector<mixedkv::attention_args> streams;
    std::vector<std::vector<float>>      alone;
    for (auto & p : problems) {
        test::run({ p->args() }, 1);
        expect_close(*p, "stream alone");
        alone.push_back(p->out);
        streams.push_back(p->args());
    }
    test::run(streams, 3);
    for (size_t i = 0; i < problems.size(); i++) {
        expect_same(alone[i], problems[i]->out, "stream " + std::to_string(i));
    }
}

// Queries cut into several calls over the same keys: each gets what it would get in one call, but for rounding.
void queries_of_several_calls_are_near_the_reference() {
    test::rng     r(29);
    test::problem p(r, mixed_cache(70, 900, mask_kind::causal));
    const auto    whole = p.args();
    for (const std::vector<int64_t> & parts : { std::vector<int64_t>{ 1, 1, 60, 8 }, { 3, 67 }, { 35, 34, 1 } }) {
        std::vector<mixedkv::attention_args> calls;
        int64_t                              first = 0;
        for (const int64_t n : parts) {
            mixedkv::attention_args a = whole;
            a.n_queries               = n;
            a.q                       = whole.q + first * whole.q_row / sizeof(float);
            a.mask                    = whole.mask + first * whole.mask_row / sizeof(uint16_t);
            a.out                     = whole.out + first * whole.out_row / sizeof(float);
            calls.push_back(a);
            first += n;
        }
        std::fill(p.out.begin(), p.out.end(), NAN);
        test::run(calls, 2);
        expect_close(p, "queries cut apart");
    }
}

// The sums of ggml's order: of neighbours first
std::vector<float> rotated_in_order(std::vector<float> x, size_t edge) {
    for (float & e : x) {
        e *= 1.0f / std::sqrt(float(edge));
    }
    for (size_t h = 1; h < edge; h *= 2) {
        std::vector<float> y(x.size());
        for (size_t i = 0; i < x.size(); i++) {
            y[i] = i & h ? x[i ^ h] - x[i] : x[i] + x[i ^ h];
        }
        x = y;
    }
    return x;
}

void rotation_is_that_of_its_definition() {
    test::rng r(23);
    for (int edge : { 1, 2, 4, 8, 16, 32, 64, 128, 256, 1024 }) {
        std::vector<float> x(3 * edge);
        for (float & e : x) {
            e = r.gauss();
        }
        const std::vector<double> want  = test::rotated(std::vector<double>(x.begin(), x.end()), edge);
        const std::vector<float>  exact = rotated_in_order(x, edge);
        mixedkv::rotate_row(x.data(), int64_t(x.size()), edge);
        if (x != exact) {
            std::printf("FAIL rotation by %d has not the bits of ggml's\n", edge);
            failures++;
        }
        for (size_t i = 0; i < x.size(); i++) {
            if (!(std::fabs(x[i] - want[i]) < 1e-5)) {
                std::printf("FAIL rotation by %d, element %zu: %g, not %g\n", edge, i, double(x[i]), want[i]);
                failures++;
                return;
            }
        }
    }
}

// Scratch asked for once, for the largest shape, serves a sequence of smaller calls with changing thread counts.
void scratch_of_the_largest_shape_serves_smaller_ones() {
    test::rng     r(13);
    test::problem largest(r, mixed_cache(40, 5000, mask_kind::none));
    const auto    a       = largest.args();
    const size_t  bytes   = mixedkv::attention_scratch_bytes(&a, 1);
    const auto    scratch = test::make_scratch(bytes);
    for (int queries : { 40, 1, 8, 17, 1, 40 }) {
        test::problem p(r, mixed_cache(queries, 100 * (queries + 7), mask_kind::causal));
        const auto    args = p.args();
        if (mixedkv::attention_scratch_bytes(&args, 1) > bytes) {
            std::printf("FAIL a smaller shape needs more scratch: %s\n", p.o.describe().c_str());
            failures++;
        }
        for (int ith = 0, nth = 1 + queries % 3; ith < nth; ith++) {
            mixedkv::attention_run(&args, 1, scratch.get(), ith, nth);
        }
        expect_close(p, "scratch reuse");
    }
}

// Rows that no query sees must not be read: they are allowed to hold anything, here NaN.
void hidden_rows_are_not_read() {
    for (int queries : { 1, 40 }) {
        test::options o = mixed_cache(queries, 500, mask_kind::none);
        o.mask          = mask_kind::window;
        test::rng     r(17);
        test::problem p(r, o);
        test::run({ p.args() }, 1);
        const std::vector<float> before = p.out;
        for (int64_t row = 0; row < 384; row++) { // 64-key blocks wholly outside of the window of 70
            std::memset(p.k[0].bytes.data() + row * p.k[0].row_bytes, 0x7f, p.k[0].row_bytes);
            std::memset(p.v[0].bytes.data() + row * p.v[0].row_bytes, 0x7f, p.v[0].row_bytes);
        }
        test::run({ p.args() }, 1);
        expect_same(before, p.out, "hidden rows, " + o.describe());
    }
}

// Queries of several sequences in one call: what one of them gets does not depend on rows that others alone see.
void rows_of_other_sequences_do_not_matter() {
    for (row_type type : { row_type::q4_0, row_type::q8_0, row_type::f16 }) {
        for (int queries : { 5, 8, 12 }) {
            test::options o = mixed_cache(queries, 900, mask_kind::holes);
            o.type_k[0] = o.type_v[0] = type;
            test::rng     r(29);
            test::problem p(r, o), other(r, o);
            const auto    row = [&](int query) { return p.mask.data() + query * p.n_keys(); };
            for (int64_t key = 0; key < p.n_keys(); key++) {
                const int owner = int(key / 7 % queries); // neighbours within a block of keys
                for (int query = 0; query < queries; query++) {
                    row(query)[key] = query == owner ? 0 : 0xfc00; // -inf
                }
            }
            test::run({ p.args() }, 2);
            expect_close(p, "sequences");
            const std::vector<float> first(p.out.begin(), p.out.begin() + o.n_head * o.d_v);
            for (int64_t key = 0; key < o.n_keys[0]; key++) {
                for (int i = 0; i < 2 && row(0)[key] != 0; i++) {
                    test::rows & to = i == 0 ? p.k[0] : p.v[0];
                    const auto & by = i == 0 ? other.k[0] : other.v[0];
                    const size_t n  = key + 1 < o.n_keys[0] ? to.row_bytes : to.n_head * to.head_bytes;
                    const size_t at = key * to.row_bytes;
                    std::memcpy(to.bytes.data() + at, by.bytes.data() + at, std::min(n, to.bytes.size() - at));
                }
            }
            test::run({ p.args() }, 2);
            expect_close(p, "sequences");
            p.out.resize(first.size());
            expect_same(first, p.out, "rows of other sequences, " + o.describe());
        }
    }
}

// What one call has found in the mask serves the next; a mask of another step is looked at anew.
void a_mask_that_is_kept_gives_the_same_bits() {
    std::vector<uint32_t> blocks;
    uint32_t              step = 0;
    for (int i = 0; i < 12; i++) {
        test::rng     r(400 + i);
        test::options o = random_options(r);
        if (o.n_queries > 8) {
            continue;
        }
        test::problem p(r, o);
        auto          args = p.args();
        test::run({ args }, 2);
        const std::vector<float> want = p.out;
        blocks.resize(std::max<size_t>(blocks.size(), mixedkv::attention_seen_blocks(p.n_keys()) * o.n_queries));
        args.seen = { blocks.data(), o.n_queries, ++step };
        for (int call = 0; call < 2; call++) {
            test::run({ args }, 2);
            expect_same(want, p.out, "masks kept, " + o.describe());
        }
    }
}

} // namespace

int main(int argc, char ** argv) {
    if (!test::force_isa(argc, argv)) {
        return 77;
    }
    random_shapes_are_near_the_reference(test::number_after(argc, argv, "--shapes", 100));
    every_pair_of_types_is_near_the_reference();
    any_number_of_threads_gives_the_same_bits();
    streams_of_one_call_get_what_each_gets_alone();
    queries_of_several_calls_are_near_the_reference();
    rotation_is_that_of_its_definition();
    scratch_of_the_largest_shape_serves_smaller_ones();
    hidden_rows_are_not_read();
    rows_of_other_sequences_do_not_matter();
    a_mask_that_is_kept_gives_the_same_bits();
    std::printf("%s: %d failures\n", mixedkv::attention_isa(), failures);
    return failures != 0;
}
