// Pages: the sketch of K, which pages a query reads, and that attention reads those and no others.

#include "support.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <thread>

namespace {

using mixedkv::attention_page;
using mixedkv::attention_strip;
using mixedkv::row_type;

int failures = 0;

void expect(bool ok, const char * what, const std::string & where) {
    if (!ok) {
        std::printf("FAIL %s, %s\n", what, where.c_str());
        failures++;
    }
}

// What a cache has of the keys of its first segment
struct page_data {
    int64_t                  n; // strips
    size_t                   sketch, of_query;
    std::vector<uint8_t>     bits, known, taken;
    std::vector<uint16_t>    steps;
    mixedkv::attention_skips counts;

    explicit page_data(test::problem & p) :
        n((p.o.n_keys[0] + attention_strip - 1) / attention_strip), sketch(mixedkv::attention_sketch_bytes(p.o.d_k)),
        of_query(mixedkv::attention_taken_bytes(p.o.n_keys[0], p.o.n_head_kv)) {
        const auto & o = p.o;
        bits.resize(n * o.n_head_kv * sketch);
        steps.resize(n * o.n_head_kv * attention_strip);
        known.assign(n, 1);
        taken.assign(o.n_queries * of_query, 0xaa);
        for (int64_t i = 0; i < o.n_keys[0] / attention_strip; i++) {
            mixedkv::attention_sketch(p.k[0].view(), i * attention_strip, o.n_head_kv, o.d_k, bits.data() + i * sketch,
                                      steps.data() + i * attention_strip, n);
        }
    }

    mixedkv::attention_args add_to(mixedkv::attention_args args, float share, int64_t depth = 0) {
        args.pages.bits   = bits.data();
        args.pages.steps  = steps.data();
        args.pages.strips = n;
        args.pages.known  = known.data();
        args.pages.share  = share;
        args.pages.depth  = depth;
        args.pages.taken  = taken.data();
        args.pages.row    = of_query;
        args.skips        = &counts;
        return args;
    }

    bool reads_all(int query, int head_kv) const { return taken[query * of_query + head_kv * (n + 1) + n]; }

    bool is_taken(int query, int head_kv, int64_t key) const {
        const uint8_t strip = taken[query * of_query + head_kv * (n + 1) + key / attention_strip];
        return reads_all(query, head_kv) || strip >> key % attention_strip / attention_page & 1;
    }

    double step(int64_t key, int head_kv) const { return test::from_half(steps[head_kv * n * attention_strip + key]); }

    int level(int64_t key, int head_kv, int i) const { // -3, -1, 1, 3
        const uint8_t * strip = bits.data() + (head_kv * n + key / attention_strip) * sketch;
        const uint8_t   byte  = strip[i / 16 * 64 + key % attention_strip * 4 + i % 4];
        return 2 * (byte >> i % 16 / 4 * 2 & 3) - 3;
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

// Each element has the nearest of four levels, and the step makes the least of the error, an eighth of the variance.
void test_sketch() {
    for (const row_type type : test::all_types()) {
        for (const int d : { 64, 128 }) {
            test::rng     r(3);
            test::options o = make_options(type, 1, 2, 64);
            o.d_k           = d;
            test::problem p(r, o);
            page_data     pages(p);
            double        wrong = 0.0, lost = 0.0;
            for (int64_t key = 0; key < 64; key++) {
                for (int head = 0; head < 2; head++) {
                    const auto x   = p.k[0].value(key, head);
                    double     dot = 0.0, norm = 0.0, squares = 0.0, error = 0.0;
                    for (const float y : x) {
                        squares += double(y) * y;
                    }
                    for (int i = 0; i < d; i++) {
                        const int    level  = pages.level(key, head, i);
                        const double scaled = x[i] / (0.498 * std::sqrt(squares / d));
                        expect(std::fabs(scaled - level) < 1.001 || std::abs(level) == 3, "the nearest level",
                               o.describe());
                        dot += level * x[i];
                        norm += level * level;
                    }
                    const double step = pages.step(key, head);
                    for (int i = 0; i < d; i++) {
                        error += std::pow(x[i] - step * pages.level(key, head, i), 2);
                    }
                    wrong = std::max(wrong, std::fabs(step / (dot / norm) - 1.0));
                    lost += error / squares / 128;
                }
            }
            expect(wrong < 1e-3, "the step", o.describe());
            expect(lost > 0.08 && lost < 0.15, "what is lost", o.describe() + " " + std::to_string(lost));
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
            for (const float share : { 1.0f, 0.999999f }) { // most of them is all
                const auto args = pages.add_to(p.args(), share);
                choose(args, 2);
                test::run({ args }, 2);
                expect(want == p.out, "a share of 1", p.o.describe());
            }
        }
    }
}

// What a row is estimated to weigh a key with, from the definition
double estimate(const test::problem & p, const page_data & pages, int query, int head, int64_t key) {
    const auto &              o     = p.o;
    const int                 group = o.n_head / o.n_head_kv;
    const auto                at    = p.q.begin() + (query * o.n_head + head) * o.d_k;
    const std::vector<double> q     = test::rotated({ at, at + o.d_k }, o.rotation_q);
    double                    dot = 0.0, norms = 0.0;
    for (int i = 0; i < o.d_k; i++) {
        dot += q[i] * pages.level(key, head / group, i);
        norms += q[i] * q[i];
    }
    const double step  = pages.step(key, head / group);
    const double scale = 1.0 / std::sqrt(double(o.d_k));
    double       score = scale * (step * dot + p.score_of_pairs(&*at, head / group, key));
    score              = o.softcap == 0.0f ? score : o.softcap * std::tanh(score / o.softcap);
    const float  mask  = p.mask.empty() ? 0.0f : test::from_half(p.mask[query * p.n_keys() + key]);
    const double slope = o.mask == test::mask_kind::alibi ? std::exp2(-2.0 * (head + 1)) : 1.0; // of four heads
    return std::exp(score + 0.5 * scale * scale * norms * 0.479 * step * step + slope * mask);
}

// Of one row and KV head: pages that are read weigh more than those that are not, which hold as much as they may.
void check_choice(const test::problem & p, const page_data & pages, int query, int head, double share) {
    double total = 0.0, left_out = 0.0, heaviest = 0.0, lightest = INFINITY;
    for (int64_t key = 0; key < p.o.n_keys[0]; key += attention_page) {
        double weight = 0.0;
        for (int64_t i = key; i < key + attention_page && i < p.o.n_keys[0]; i++) {
            weight += estimate(p, pages, query, head, i); // near enough, of what is weighed as it is
        }
        total += weight;
        if (!pages.known[key / attention_strip] || key >= p.o.n_keys[0] / attention_strip * attention_strip) {
            continue;
        }
        if (pages.is_taken(query, head, key)) {
            lightest = std::min(lightest, weight > 0.0 ? weight : INFINITY);
        } else {
            left_out += weight;
            heaviest = std::max(heaviest, weight);
        }
    }
    expect(heaviest < 1.2 * lightest, "the lightest are left out", p.o.describe());
    expect(left_out < 1.1 * (1.0 - share) * total, "the share is held", p.o.describe());
    expect(left_out > 0.8 * (1.0 - share) * total - 1.2 * lightest, "no more is read", p.o.describe());
}

double worst_difference(const std::vector<float> & a, const std::vector<float> & b) {
    double worst = 0.0;
    for (size_t i = 0; i < a.size(); i++) {
        worst = std::max(worst, double(std::fabs(a[i] - b[i])));
    }
    return worst;
}

// What is chosen, and that attention is that over the keys of these pages alone, whoever shares the batch.
void test_share(const test::options & o, float share) {
    test::rng     r(11);
    test::problem p(r, o);
    page_data     pages(p);
    pages.known[7]  = 0;
    const auto args = pages.add_to(p.args(), share);
    choose(args, 1);
    const auto taken = pages.taken;
    if (is_scalar()) {
        expect(pages.reads_all(0, 0), "scalar reads all", "");
        return;
    }
    expect(pages.counts.pages_read > 0 && pages.counts.pages_read < pages.counts.pages * 4 / 5,
           "some pages are left out", o.describe());
    const int group = o.n_head / o.n_head_kv;
    for (int query = 0; query < o.n_queries; query++) {
        expect(o.mask == test::mask_kind::holes || pages.is_taken(query, 0, 7 * attention_strip),
               "what has no sketch is read", o.describe());
        for (int head = 0; head < o.n_head && group == 1 && o.n_keys.size() == 1; head++) {
            if (!pages.reads_all(query, head)) {
                check_choice(p, pages, query, head, share);
            }
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
    expect(std::equal(taken.begin(), taken.begin() + pages.of_query, pages.taken.begin()), "chosen alone",
           o.describe());
    pages.taken = taken;

    for (int query = 0; query < o.n_queries; query++) {
        for (int head = 0; head < o.n_head_kv; head++) {
            auto masked = p; // of all heads, what this one reads
            if (p.mask.empty()) {
                masked.mask.assign(o.n_queries * p.n_keys(), 0);
            }
            for (int64_t key = 0; key < o.n_keys[0]; key++) {
                if (!pages.is_taken(query, head, key)) {
                    masked.mask[query * p.n_keys() + key] = 0xfc00;
                }
            }
            test::run({ masked.args() }, 1);
            const auto part = [&](const std::vector<float> & x) {
                const auto at = x.begin() + (query * o.n_head + head * group) * o.d_v;
                return std::vector<float>(at, at + group * o.d_v);
            };
            const double worst = worst_difference(part(got), part(masked.out));
            expect(worst < 1e-3, "attention over the pages that are read", o.describe() + " " + std::to_string(worst));
        }
    }
}

void test_shares() {
    for (const row_type type : { row_type::q4_0, row_type::f16, row_type::other }) {
        for (const auto mask :
             { test::mask_kind::none, test::mask_kind::causal, test::mask_kind::holes, test::mask_kind::alibi }) {
            for (const int heads_kv : { 1, 4 }) {
                for (const int n_pairs : { 0, 2 }) {
                    test::options o = make_options(type, 2, heads_kv, mask == test::mask_kind::alibi ? 608 : 603);
                    o.mask          = mask;
                    o.n_pairs       = n_pairs;
                    o.softcap       = heads_kv == 4 && mask == test::mask_kind::causal ? 20.0f : 0.0f;
                    if (heads_kv == 4) {
                        o.n_keys.resize(1);
                        o.type_k.resize(1);
                        o.type_v.resize(1);
                    }
                    test_share(o, heads_kv == 1 ? 0.6f : 0.9f);
                }
            }
        }
    }
    for (const int d : { 32, 96, 128, 256, 320 }) { // rows beyond what integer bodies take, and sums of 16 bits
        test::options o = make_options(row_type::q4_0, 2, 2, 700);
        o.d_k = o.d_v = d;
        o.rotation_q = o.rotation_out = 32;
        test_share(o, 0.8f);
    }
}

// What is really lost of the attention: about what may be. Keys that two bits make too light are left out more often
// than others, so it is a little more.
void test_loss() {
    test::options o   = make_options(row_type::q4_0, 8, 4, 1200);
    o.score_std       = 3.0f;
    const float share = 0.95f;
    int         n = 0, n_more = 0;
    double      sum = 0.0;
    for (uint32_t seed = 0; seed < 12 && !is_scalar(); seed++) {
        test::rng     r(seed);
        test::problem p(r, o);
        page_data     pages(p);
        choose(pages.add_to(p.args(), share), 1);
        for (int query = 0; query < o.n_queries; query++) {
            for (int head = 0; head < o.n_head; head++, n++) {
                const auto lost = [&](bool all) {
                    double     weight = 0.0;
                    const auto q      = test::rotated({ p.q.begin() + (query * o.n_head + head) * o.d_k,
                                                        p.q.begin() + (query * o.n_head + head + 1) * o.d_k },
                                                      o.rotation_q);
                    for (int64_t key = 0; key < o.n_keys[0]; key++) {
                        if (all || !pages.is_taken(query, head, key)) {
                            const auto k   = p.k[0].value(key, head);
                            double     dot = 0.0;
                            for (int i = 0; i < o.d_k; i++) {
                                dot += q[i] * k[i];
                            }
                            weight += std::exp(dot / std::sqrt(double(o.d_k)));
                        }
                    }
                    return weight;
                };
                const double x = lost(false) / lost(true);
                sum += x;
                n_more += x > 2.0 * (1.0 - share);
            }
        }
    }
    std::printf("share %g: %g lost in the mean, more than twice what may be by %d of %d rows\n", double(share),
                n ? sum / n : 0.0, n_more, n);
    expect(sum <= 1.3 * (1.0 - share) * n, "lost in the mean", o.describe());
    expect(n_more <= n / 20, "lost by a row", o.describe());
}

void test_depth() {
    test::rng     r(13);
    test::problem p(r, make_options(row_type::q4_0, 1, 2, 1000));
    page_data     pages(p);
    test::run({ p.args() }, 1);
    const auto want = p.out;
    const auto args = pages.add_to(p.args(), 0.5f, 993);
    choose(args, 1);
    test::run({ args }, 1);
    expect(want == p.out, "all are read below the depth", p.o.describe());
}

} // namespace

int main(int argc, char ** argv) {
    if (argc == 3 && !test::force_isa(argv[2])) {
        return 77;
    }
    test_sketch();
    test_all();
    test_shares();
    test_loss();
    test_depth();
    std::printf("%s: %d failures\n", mixedkv::attention_isa(), failures);
    return failures != 0;
}
