// Pages: the sketch of K, which pages a query reads and what they stand for, and that attention reads no others.

#include "support.h"

#include "attention/sparse/pages.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
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
    int64_t                        n; // strips
    size_t                         sketch, of_query;
    std::vector<uint8_t>           bits, known, taken;
    std::vector<uint16_t>          steps;
    mixedkv::attention_page_counts counts;

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

    mixedkv::attention_args add_to(mixedkv::attention_args args, float error, int64_t depth = 0) {
        args.pages.bits   = bits.data();
        args.pages.steps  = steps.data();
        args.pages.strips = n;
        args.pages.known  = known.data();
        args.pages.error  = error;
        args.pages.depth  = depth;
        args.pages.taken  = taken.data();
        args.pages.row    = of_query;
        args.page_counts  = &counts;
        return args;
    }

    const uint8_t * codes(int query, int head_kv) const {
        return taken.data() + query * of_query + head_kv * (n * attention_strip / attention_page + 1);
    }

    bool reads_all(int query, int head_kv) const { return codes(query, head_kv)[n * attention_strip / attention_page]; }

    // How many pages the key's stands for, 0: it is left out
    double stands(int query, int head_kv, int64_t key) const {
        const int code = reads_all(query, head_kv) ? 1 : codes(query, head_kv)[key / attention_page];
        return code == mixedkv::left_out ? 0.0 : 1.0 / mixedkv::probability_of(mixedkv::page_code(code));
    }

    bool is_taken(int query, int head_kv, int64_t key) const { return stands(query, head_kv, key) > 0.0; }

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
    o.rounding                    = n_keys % 2 ? 8 : 16;
    return o;
}

// With each probability there are as many draws below it as there have to be, so no size is read too often in all
// answers.
void draws_are_below_a_probability_as_often_as_it_says() {
    using namespace mixedkv;
    const float * draws = page_draws();
    for (int code = read_once; code <= code_of(0.0f); code++) {
        const float       p    = probability_of(page_code(code));
        const std::string what = std::to_string(p);
        const auto        n    = std::count_if(draws, draws + n_draws, [&](float draw) { return draw < p; });
        expect(float(n) == p * n_draws, "draws below a probability", what + " " + std::to_string(n));
        expect(code_of(p) == code, "the code of its own probability", what);
        expect(code == read_once || code_of(p * 1.0001f) == code - 1, "rounded up", what);
        expect(std::fabs(log2_of(page_code(code)) + std::log2(p)) < 1e-6f, "its logarithm", what);
    }
    expect(std::equal(draws, draws + 64, draws + n_draws), "the first draws once more", "");
}

// Each element has the nearest of four levels, and the step makes the least of the error, an eighth of the variance.
void a_sketch_has_the_nearest_levels_and_the_best_step() {
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
void reading_all_pages_has_the_bits_of_no_pages() {
    for (const row_type type : test::all_types()) {
        for (int queries : { 1, 5 }) {
            test::rng     r(5);
            test::problem p(r, make_options(type, queries, 2, 700));
            page_data     pages(p);
            test::run({ p.args() }, 2);
            const auto want = p.out;
            for (const float error : { 0.0f, 1e-6f }) { // most of them is all
                const auto args = pages.add_to(p.args(), error);
                choose(args, 2);
                test::run({ args }, 2);
                expect(want == p.out, "no error", p.o.describe());
            }
        }
    }
}

// What a row is estimated to weigh a key with, from the definition: in the mean, and as its root mean square
struct weight {
    double mean;
    double size;
};

weight estimate(const test::problem & p, const page_data & pages, int query, int head, int64_t key) {
    const auto &              o     = p.o;
    const int                 group = o.n_head / o.n_head_kv;
    const auto                at    = p.q.begin() + (query * o.n_head + head) * o.d_k;
    const std::vector<double> q     = test::rotated({ at, at + o.d_k }, o.rotation_q);
    double                    dot = 0.0, norms = 0.0;
    for (int i = 0; i < o.d_k; i++) {
        dot += q[i] * pages.level(key, head / group, i);
        norms += q[i] * q[i];
    }
    const double step     = pages.step(key, head / group);
    const double scale    = 1.0 / std::sqrt(double(o.d_k));
    double       score    = scale * (step * dot + p.score_of_pairs(&*at, head / group, key));
    score                 = o.softcap == 0.0f ? score : o.softcap * std::tanh(score / o.softcap);
    const float  mask     = p.mask.empty() ? 0.0f : test::from_half(p.mask[query * p.n_keys() + key]);
    const double slope    = o.mask == test::mask_kind::alibi ? std::exp2(-2.0 * (head + 1)) : 1.0; // of four heads
    const double variance = scale * scale * norms * 0.479 * step * step;
    return { std::exp(score + 0.5 * variance + slope * mask), std::exp(score + variance + slope * mask) };
}

// What a row really weighs a key with, of K alone and without a mask
double true_weight(const test::problem & p, int query, int head, int64_t key) {
    const auto & o   = p.o;
    const auto   at  = p.q.begin() + (query * o.n_head + head) * o.d_k;
    const auto   q   = test::rotated({ at, at + o.d_k }, o.rotation_q);
    const auto   k   = p.k[0].value(key, head / (o.n_head / o.n_head_kv));
    double       dot = 0.0;
    for (int i = 0; i < o.d_k; i++) {
        dot += q[i] * k[i];
    }
    return std::exp(dot / std::sqrt(double(o.d_k)));
}

// Of one row and KV head: pages are read with a probability by their size, which the variance that is asked for gives.
void check_choice(const test::problem & p, const page_data & pages, int query, int head, double error) {
    double total = 0.0, below = 0.0, variance = 0.0, worst = 0.0;
    double step = 0.0; // size by probability, where it is neither 1 nor as low as it can be
    for (const bool measure : { false, true }) {
        for (int64_t key = 0; key < p.o.n_keys[0]; key += attention_page) {
            const bool known =
                pages.known[key / attention_strip] && key < p.o.n_keys[0] / attention_strip * attention_strip;
            double mean = 0.0, size = 0.0;
            for (int64_t i = key; i < key + attention_page && i < p.o.n_keys[0]; i++) {
                const weight w = estimate(p, pages, query, head, i);
                mean +=
                    known || p.o.mask != test::mask_kind::none || p.o.n_pairs ? w.mean : true_weight(p, query, head, i);
                size += w.size;
            }
            const double stands = pages.stands(query, head, key);
            if (!measure) {
                total += mean;
                step = stands > 1.0 && stands < 255.0 ? std::max(step, size * stands) : step;
            } else if (known && step > 0.0) {
                below += size < step ? size : 0.0;
                variance += size < step ? size * (step - size) : 0.0;
                worst =
                    stands > 1.0 && stands < 255.0 ? std::max(worst, std::fabs(std::log(step / size / stands))) : worst;
                expect(stands > 0.0 || size < 1.1 * step, "all heavy pages are read", p.o.describe());
                expect(stands < 255.0 || size < step / 200.0, "others stand for so many", p.o.describe());
            }
        }
    }
    const double allowed = error * error * total * total;
    expect(worst < 0.25, "what pages stand for is by their size", p.o.describe() + " " + std::to_string(worst));
    expect(variance < 1.3 * allowed, "the error is small", p.o.describe() + " " + std::to_string(variance / allowed));
    expect(step == 0.0 || step * below > 0.4 * allowed, "no more is read",
           p.o.describe() + " " + std::to_string(step * below / allowed));
}

double worst_difference(const std::vector<float> & a, const std::vector<float> & b) {
    double worst = 0.0;
    for (size_t i = 0; i < a.size(); i++) {
        worst = std::max(worst, double(std::fabs(a[i] - b[i])));
    }
    return worst;
}

// What is chosen, and that attention is that over the keys of these pages, for which each stands, whoever shares the
// batch.
void check_choice_of(const test::options & o, float error) {
    test::rng     r(11);
    test::problem p(r, o);
    page_data     pages(p);
    pages.known[7]  = 0;
    const auto args = pages.add_to(p.args(), error);
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
                check_choice(p, pages, query, head, error);
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
        for (int head = 0; head < o.n_head; head++) {
            auto masked = p; // of all heads, what this one reads
            if (p.mask.empty()) {
                masked.mask.assign(o.n_queries * p.n_keys(), 0);
            }
            const double slope = o.mask == test::mask_kind::alibi ? std::exp2(-2.0 * (head + 1)) : 1.0;
            for (int64_t key = 0; key < o.n_keys[0]; key++) {
                uint16_t &   mask = masked.mask[query * p.n_keys() + key];
                const double more = std::log(pages.stands(query, head / group, key)) / slope;
                mask              = test::to_half(float(test::from_half(mask) + more));
            }
            test::run({ masked.args() }, 1);
            const auto part = [&](const std::vector<float> & x) {
                const auto at = x.begin() + (query * o.n_head + head) * o.d_v;
                return std::vector<float>(at, at + o.d_v);
            };
            const double worst = worst_difference(part(got), part(masked.out));
            expect(worst < (o.rounding == 8 ? 2e-2 : 4e-3), "attention over the pages that are read",
                   o.describe() + " " + std::to_string(worst));
        }
    }
}

void attention_is_that_over_the_pages_that_are_read() {
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
                    check_choice_of(o, heads_kv == 1 ? 0.15f : 0.05f);
                }
            }
        }
    }
    for (const int d : { 32, 96, 128, 256, 320 }) { // rows beyond what integer bodies take, and sums of 16 bits
        test::options o = make_options(row_type::q4_0, 2, 2, 700);
        o.d_k = o.d_v = d;
        o.rotation_q = o.rotation_out = 32;
        check_choice_of(o, 0.06f);
    }
}

// Over 10,000 queries the output is farther off than it may be no more often than it may be: with V of 1 and -1, by
// pages, by no more than `error` of their distance from the output.
void errors_are_no_larger_than_was_asked_for() {
    const double  normal = 1.959964; // beyond which a twentieth is
    const double  eps    = 0.1;
    test::options o      = make_options(row_type::q4_0, 32, 4, 1200);
    o.score_std          = 3.0f;
    o.type_v[0]          = row_type::f16;
    o.d_v                = 32;
    o.rotation_out       = 0;
    int64_t  n = 0, n_far = 0;
    double   bias = 0.0, squares = 0.0;
    uint64_t read = 0, pages_of_all = 0;
    for (uint32_t seed = 0; seed < 80 && !is_scalar(); seed++) {
        test::rng     r(seed);
        test::problem p(r, o);
        for (int64_t key = 0; key < o.n_keys[0]; key++) {
            for (int i = 0; i < o.n_head_kv * o.d_v; i++) {
                const uint32_t bits = uint32_t(key / attention_page * 2654435761u + i * 40503u + seed) * 2246822519u;
                const uint16_t x    = bits >> 31 ? 0x3c00 : 0xbc00;
                const size_t   head = i / o.d_v * p.v[0].head_bytes;
                std::memcpy(p.v[0].bytes.data() + key * p.v[0].row_bytes + head + 2 * (i % o.d_v), &x, 2);
            }
        }
        page_data pages(p);
        test::run({ p.args() }, 2);
        const auto want = p.out;
        const auto args = pages.add_to(p.args(), float(eps / normal));
        choose(args, 2);
        test::run({ args }, 2);
        read += pages.counts.pages_read;
        pages_of_all += pages.counts.pages;
        for (size_t i = 0; i < want.size(); i++, n++) {
            const double wrong = double(p.out[i]) - want[i];
            const double unit  = 1.0 + std::fabs(want[i]);
            n_far += std::fabs(wrong) > eps * unit;
            bias += wrong / unit * (want[i] < 0.0f ? -1.0 : 1.0);
            squares += wrong * wrong / unit / unit;
        }
    }
    if (n == 0) {
        return;
    }
    std::printf("%lld queries, %.0f%% of the pages: farther off than %g in %.2f%% of the elements, standard error "
                "%.4f, mean %.5f\n",
                (long long)n / o.d_v, 100.0 * double(read) / double(pages_of_all), eps,
                100.0 * double(n_far) / double(n), std::sqrt(squares / double(n)), bias / double(n));
    expect(n_far <= 0.05 * double(n), "how often it is farther off", o.describe());
    expect(std::fabs(bias) < 0.1 * eps * double(n), "the mean", o.describe());
    expect(read < 0.5 * double(pages_of_all), "some is left out", o.describe());
}

void all_pages_are_read_below_the_depth() {
    test::rng     r(13);
    test::problem p(r, make_options(row_type::q4_0, 1, 2, 1000));
    page_data     pages(p);
    test::run({ p.args() }, 1);
    const auto want = p.out;
    const auto args = pages.add_to(p.args(), 0.2f, 993);
    choose(args, 1);
    test::run({ args }, 1);
    expect(want == p.out, "all are read below the depth", p.o.describe());
}

} // namespace

int main(int argc, char ** argv) {
    if (!test::force_isa(argc, argv)) {
        return 77;
    }
    draws_are_below_a_probability_as_often_as_it_says();
    if (!is_scalar()) {
        a_sketch_has_the_nearest_levels_and_the_best_step();
    }
    reading_all_pages_has_the_bits_of_no_pages();
    attention_is_that_over_the_pages_that_are_read();
    errors_are_no_larger_than_was_asked_for();
    all_pages_are_read_below_the_depth();
    std::printf("%s: %d failures\n", mixedkv::attention_isa(), failures);
    return failures != 0;
}
