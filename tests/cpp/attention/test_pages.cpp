// Pages: their means, which of them a query reads, and that attention reads those and no others.

#include "support.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <thread>

namespace {

using mixedkv::attention_page;
using mixedkv::row_type;

int failures = 0;

void expect(bool ok, const char * what, const std::string & where) {
    if (!ok) {
        std::printf("FAIL %s, %s\n", what, where.c_str());
        failures++;
    }
}

// What a cache has of the pages of its first segment
struct page_data {
    int64_t                              n;
    std::vector<uint16_t>                means;
    std::vector<float>                   spreads;
    std::vector<uint8_t>                 known, taken;
    std::vector<std::vector<float>>      turns;
    std::vector<mixedkv::attention_pair> pairs;
    mixedkv::attention_skips             counts;

    explicit page_data(test::problem & p) : n((p.o.n_keys[0] + attention_page - 1) / attention_page) {
        const auto & o = p.o;
        means.resize(n * o.n_head_kv * o.d_k);
        spreads.resize(n * o.n_head_kv);
        known.assign(n, 1);
        taken.assign(o.n_queries * o.n_head_kv * n, 0xaa);
        for (int64_t i = 0; i < o.n_keys[0] / attention_page; i++) {
            mixedkv::attention_sum_up_page(p.k[0].view(), i * attention_page, o.n_head_kv, o.d_k,
                                           means.data() + i * o.n_head_kv * o.d_k, spreads.data() + i * o.n_head_kv);
        }
        for (const auto & pair : p.pairs) {
            for (const float * from : { pair.cosines, pair.sines }) {
                std::vector<float> by_page(n + 16);
                for (int64_t key = 0; key < o.n_keys[0]; key++) {
                    by_page[key / attention_page] += from[test::problem::first_turn + key] / attention_page;
                }
                turns.push_back(by_page);
            }
        }
        pairs = p.pairs;
        for (size_t i = 0; i < pairs.size(); i++) {
            pairs[i].cosines = turns[2 * i].data();
            pairs[i].sines   = turns[2 * i + 1].data();
        }
    }

    mixedkv::attention_args add_to(mixedkv::attention_args args, float share, int64_t depth = 0) {
        args.pages.means   = means.data();
        args.pages.spreads = spreads.data();
        args.pages.pairs   = pairs.data();
        args.pages.known   = known.data();
        args.pages.share   = share;
        args.pages.depth   = depth;
        args.pages.taken   = taken.data();
        args.pages.row     = args.n_head_kv * n;
        args.skips         = &counts;
        return args;
    }

    bool is_taken(const test::problem & p, int query, int head_kv, int64_t page) const {
        return taken[(query * p.o.n_head_kv + head_kv) * n + page];
    }
};

void choose(const mixedkv::attention_args & args, int n_threads) {
    std::vector<std::thread> threads;
    for (int i = 0; i < n_threads; i++) {
        threads.emplace_back([&, i] { mixedkv::attention_choose_pages(&args, 1, i, n_threads); });
    }
    for (auto & thread : threads) {
        thread.join();
    }
}

bool is_scalar() {
    return std::string(mixedkv::attention_isa()) == "scalar";
}

test::options make_options(row_type type, int n_queries, int n_head_kv, int64_t n_keys) {
    test::options o;
    o.n_head     = 4;
    o.n_head_kv  = n_head_kv;
    o.n_queries  = n_queries;
    o.n_keys     = { n_keys, 40, n_queries };
    o.type_k     = { type, row_type::f16, row_type::f16 };
    o.type_v     = o.type_k;
    o.mask       = test::mask_kind::causal;
    o.rotation_q = o.rotation_out = 64;
    return o;
}

void test_means() {
    for (const row_type type : test::all_types()) {
        test::rng     r(3);
        test::problem p(r, make_options(type, 1, 2, 64));
        page_data     pages(p);
        for (int page = 0; page < 4; page++) {
            for (int head = 0; head < 2; head++) {
                double squares = 0.0;
                double error   = 0.0;
                for (int c = 0; c < p.o.d_k; c++) {
                    double mean = 0.0;
                    double all  = 0.0;
                    for (int i = 0; i < attention_page; i++) {
                        const double x = p.k[0].value(page * attention_page + i, head)[c];
                        mean += x / attention_page;
                        all += x * x;
                    }
                    squares += all - attention_page * mean * mean;
                    const float got = test::from_half(pages.means[(page * 2 + head) * p.o.d_k + c]);
                    error           = std::max(error, std::fabs(got - mean) / (std::fabs(mean) + 1e-4));
                }
                const double spread = squares / (attention_page * p.o.d_k);
                expect(error < 1e-3, "mean", std::to_string(int(type)));
                expect(std::fabs(pages.spreads[page * 2 + head] - spread) < 1e-4 * spread, "spread",
                       std::to_string(int(type)));
            }
        }
    }
}

// Everything that is read is all that there is: the same bits as without pages.
void test_all() {
    for (const row_type type : test::all_types()) {
        for (int queries : { 1, 5 }) {
            test::rng     r(5);
            test::problem p(r, make_options(type, queries, 2, 700));
            page_data     pages(p);
            test::run({ p.args() }, 2);
            const auto want = p.out;
            const auto args = pages.add_to(p.args(), 1.0f);
            choose(args, 2);
            test::run({ args }, 2);
            expect(want == p.out, "a share of 1", p.o.describe());
        }
    }
}

// What log2 of a row's weight on a page is estimated to be, times e for the sum of those
double estimate(const test::problem & p, int query, int head, int64_t page, const page_data & pages) {
    const auto &        o     = p.o;
    const int           group = o.n_head / o.n_head_kv;
    std::vector<double> q(p.q.begin() + (query * o.n_head + head) * o.d_k,
                          p.q.begin() + (query * o.n_head + head + 1) * o.d_k);
    q            = test::rotated(q, o.rotation_q);
    double dot   = 0.0;
    double norms = 0.0;
    for (int c = 0; c < o.d_k; c++) {
        double mean = 0.0;
        for (int i = 0; i < attention_page; i++) {
            mean += p.k[0].value(page * attention_page + i, head / group)[c];
        }
        dot += q[c] * mean / attention_page;
        norms += q[c] * q[c];
    }
    const double scale = 1.0 / std::sqrt(double(o.d_k));
    return scale * dot + scale * scale * norms * pages.spreads[page * o.n_head_kv + head / group] / 2;
}

// Pages that are read hold the share, the others weigh less than those of the row that wants most, and attention is
// that over the keys of these pages alone.
void test_share(row_type type, bool with_pairs) {
    test::options o = make_options(type, 3, 1, 1000);
    o.score_std     = 4.0f;
    o.n_pairs       = with_pairs ? 2 : 0;
    test::rng     r(11);
    test::problem p(r, o);
    page_data     pages(p);
    pages.known[7]  = 0;
    const auto args = pages.add_to(p.args(), 0.6f);
    choose(args, 1);
    const auto taken = pages.taken;
    if (is_scalar()) {
        expect(std::count(taken.begin(), taken.end(), 1) == std::ptrdiff_t(taken.size()), "scalar reads all", "");
        return;
    }
    expect(pages.counts.pages_read > 0 && pages.counts.pages_read < pages.counts.pages * 4 / 5,
           "some pages are left out", o.describe());
    for (int query = 0; query < o.n_queries; query++) {
        expect(pages.is_taken(p, query, 0, 7), "an unknown page is read", o.describe());
        for (int head = 0; head < o.n_head && !with_pairs; head++) {
            double total = 0.0;
            double held  = 0.0;
            for (int64_t page = 0; page < o.n_keys[0] / attention_page; page++) {
                const double weight = page == 7 ? 0.0 : std::exp(estimate(p, query, head, page, pages));
                total += weight;
                held += pages.is_taken(p, query, 0, page) ? weight : 0.0;
            }
            expect(held >= 0.55 * total, "the share is held", o.describe()); // with what is read anyway
        }
    }
    test::run({ args }, 1);
    const auto got = p.out;
    test::run({ args }, 3);
    expect(got == p.out, "3 threads", o.describe());
    choose(args, 3);
    expect(taken == pages.taken, "chosen by 3 threads", o.describe());

    auto alone      = args;
    alone.n_queries = 1;
    std::fill(pages.taken.begin(), pages.taken.end(), 0);
    choose(alone, 1);
    expect(std::equal(taken.begin(), taken.begin() + pages.n, pages.taken.begin()), "chosen alone", o.describe());

    for (int query = 0; query < o.n_queries; query++) {
        for (int64_t key = 0; key < o.n_keys[0]; key++) {
            if (!taken[query * pages.n + key / attention_page]) {
                p.mask[query * p.n_keys() + key] = 0xfc00;
            }
        }
    }
    test::run({ p.args() }, 1);
    double worst = 0.0;
    for (size_t i = 0; i < got.size(); i++) {
        worst = std::max(worst, double(std::fabs(got[i] - p.out[i])));
    }
    expect(worst < 5e-4, "attention over the pages that are read", o.describe() + " " + std::to_string(worst));
}

void test_depth() {
    test::rng     r(13);
    test::problem p(r, make_options(row_type::q4_0, 1, 2, 1000));
    page_data     pages(p);
    test::run({ p.args() }, 1);
    const auto want = p.out;
    const auto args = pages.add_to(p.args(), 0.5f, 1009);
    choose(args, 1);
    test::run({ args }, 1);
    expect(want == p.out, "all are read below the depth", p.o.describe());
}

} // namespace

int main(int argc, char ** argv) {
    if (argc == 3 && !test::force_isa(argv[2])) {
        return 77;
    }
    test_means();
    test_all();
    for (const row_type type : { row_type::q4_0, row_type::q8_0, row_type::f16, row_type::q5_1 }) {
        test_share(type, false);
        test_share(type, true);
    }
    test_depth();
    std::printf("%s: %d failures\n", mixedkv::attention_isa(), failures);
    return failures != 0;
}
