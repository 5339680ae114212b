// Decode that reads pages beside decode that reads all, one layer, one thread: sequences of as many keys each in one
// stream of random Q4_0 rows, so what is read is scattered as widely as it can be. The error that
// is asked for is found for each share of the pages that is to be read. CPU time, medians of the ratios of rounds
// that take turns.
//   bench_pages [--keys N] [--sequences N] [--size N] [--group N] [--read PERCENT] [--rounds N] [--isa NAME]

#include "support.h"

#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

using mixedkv::attention_strip;

namespace {

constexpr int n_head_kv = 4;

double cpu_seconds() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

double median(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

struct problem {
    int64_t                        n_keys, n_strips;
    int                            n_seq, d, n_head;
    size_t                         head, row, sketch;
    std::vector<uint8_t>           k, v, known, taken, bits;
    std::vector<uint16_t>          mask, steps;
    std::vector<float>             q, out;
    std::vector<uint32_t>          seen;
    std::vector<char>              scratch;
    mixedkv::attention_page_counts counts;
    mixedkv::attention_args        args;
    float                          error = 0.0f;

    problem(int64_t each, int n_seq, int d, int group) :
        n_keys(each * n_seq), n_strips(n_keys / attention_strip), n_seq(n_seq), d(d), n_head(n_head_kv * group),
        head(test::row_size(mixedkv::row_type::q4_0, d)), row(n_head_kv * head),
        sketch(mixedkv::attention_sketch_bytes(d)), k(n_keys * row), v(k.size()), known(n_strips, 1),
        taken(n_seq * mixedkv::attention_taken_bytes(n_keys, n_head_kv)), bits(n_strips * n_head_kv * sketch),
        mask(n_seq * n_keys, 0xfc00), steps(n_strips * n_head_kv * attention_strip), q(n_seq * n_head * d),
        out(q.size()), seen(mixedkv::attention_seen_blocks(n_keys) * n_seq) {
        uint32_t x = 1;
        for (auto * bytes : { &k, &v }) {
            for (uint8_t & b : *bytes) {
                b = uint8_t((x = x * 1664525u + 1013904223u) >> 24);
            }
        }
        for (float & y : q) {
            y = float(int((x = x * 1664525u + 1013904223u) >> 20) % 201 - 100) * 0.01f;
        }
        for (int i = 0; i < n_seq; i++) {
            std::fill_n(mask.begin() + i * n_keys + i * each, each, uint16_t(0));
        }
        auto & a    = args;
        a.n_head    = n_head;
        a.n_head_kv = n_head_kv;
        a.d_k = a.d_v = d;
        a.n_queries   = n_seq;
        a.q           = q.data();
        a.q_row = a.out_row = n_head * d * sizeof(float);
        a.q_head = a.out_head = d * sizeof(float);
        a.n_segments          = 1;
        a.segments[0].n       = n_keys;
        for (auto * rows : { &a.segments[0].k, &a.segments[0].v }) {
            rows->data = rows == &a.segments[0].k ? k.data() : v.data();
            rows->type = mixedkv::row_type::q4_0;
            rows->row  = row;
            rows->head = head;
        }
        a.mask     = mask.data();
        a.mask_row = n_keys * sizeof(uint16_t);
        a.seen     = { seen.data(), n_seq, 1 };
        a.scale    = float(1.0 / std::sqrt(double(d)));
        a.out      = out.data();
        scratch.resize(mixedkv::attention_scratch_bytes(&a, 1) + 64);
        a.page_counts = &counts;
        set_scales();
    }

    // Scores with a standard deviation of 2
    void set_scales() {
        const uint16_t scale = test::to_half(2.0f / (0.58f * 4.6f));
        for (auto * bytes : { &k, &v }) {
            for (size_t at = 0; at < bytes->size(); at += test::row_size(mixedkv::row_type::q4_0, 32)) {
                std::memcpy(bytes->data() + at, &scale, 2);
            }
        }
        for (int64_t i = 0; i < n_strips; i++) {
            mixedkv::attention_sketch(args.segments[0].k, i * attention_strip, n_head_kv, d, bits.data() + i * sketch,
                                      steps.data() + i * attention_strip, n_strips);
        }
    }

    // Finds the error with which that share of the pages is read
    void read(double pages) {
        float low = 1e-4f, high = 1.0f;
        for (int i = 0; i < 12; i++) {
            error  = std::sqrt(low * high);
            counts = {};
            choose();
            (double(counts.pages_read) < pages * double(counts.pages) ? high : low) = error;
        }
        counts = {};
    }

    mixedkv::attention_args choose() {
        auto a         = args;
        a.pages.bits   = bits.data();
        a.pages.steps  = steps.data();
        a.pages.strips = n_strips;
        a.pages.known  = known.data();
        a.pages.error  = error;
        a.pages.taken  = taken.data();
        a.pages.row    = mixedkv::attention_taken_bytes(n_keys, n_head_kv);
        mixedkv::attention_choose_pages(&a, 1, 0, 1);
        return a;
    }

    void dense() { run(args); }

    double sparse() { // returns what choosing took
        const double t      = cpu_seconds();
        const auto   a      = choose();
        const double chosen = cpu_seconds() - t;
        run(a);
        return chosen;
    }

    void run(const mixedkv::attention_args & a) {
        char * aligned = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
        mixedkv::attention_run(&a, 1, aligned, 0, 1);
    }
};

} // namespace

int main(int argc, char ** argv) {
    int64_t keys  = 32768;
    int     n_seq = 8, rounds = 9, size = 128, group = 4, read = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string name  = argv[i];
        const int         value = std::atoi(argv[i + 1]);
        if (name == "--isa" && !test::force_isa(argv[i + 1])) {
            return 77;
        }
        keys   = name == "--keys" ? value : keys;
        n_seq  = name == "--sequences" ? value : n_seq;
        rounds = name == "--rounds" ? value : rounds;
        size   = name == "--size" ? value : size;
        group  = name == "--group" ? value : group;
        read   = name == "--read" ? value : read;
    }
    problem p(keys, n_seq, size, group);
    std::printf("%s, %d sequences of %lld keys of size %d\n%8s %8s %10s %10s %10s %8s\n", mixedkv::attention_isa(),
                n_seq, (long long)keys, size, "error", "read", "dense ms", "choose ms", "sparse ms", "ratio");
    for (const int percent : read ? std::vector<int>{ read } : std::vector<int>{ 5, 10, 20, 30, 40, 50, 70 }) {
        p.read(0.01 * percent);
        std::vector<double> dense, choose, sparse, ratio;
        for (int i = 0; i < rounds + 1; i++) {
            const double a = cpu_seconds();
            p.dense();
            const double b = cpu_seconds();
            const double c = p.sparse();
            const double e = cpu_seconds();
            if (i > 0) {
                dense.push_back(b - a);
                choose.push_back(c);
                sparse.push_back(e - b);
                ratio.push_back((b - a) / (e - b));
            }
        }
        std::printf("%8.4f %7.0f%% %10.2f %10.2f %10.2f %8.2f\n", p.error,
                    100.0 * double(p.counts.pages_read) / double(p.counts.pages), 1e3 * median(dense),
                    1e3 * median(choose), 1e3 * median(sparse), median(ratio));
        std::fflush(stdout);
    }
}
