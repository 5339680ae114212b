// Decode that reads pages beside decode that reads all, one layer, one thread: sequences of as many keys each in one
// stream of Q4_0 rows, 16 query heads over 4 KV heads of size 128. Each KV head has pages of its own, in runs of four,
// whose keys are as large as to hold the attention: the share of them is the structure. CPU time, medians of the ratios
// of rounds that take turns.
//   bench_pages [--keys N] [--sequences N] [--rounds N] [--isa NAME]

#include "support.h"

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

using mixedkv::attention_page;

namespace {

constexpr int n_head = 16, n_head_kv = 4, d = 128;

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
    int64_t                  n_keys, n_pages;
    int                      n_seq;
    size_t                   head = test::row_size(mixedkv::row_type::q4_0, d), row = n_head_kv * head;
    std::vector<uint8_t>     k, v, known, taken;
    std::vector<uint16_t>    mask, means;
    std::vector<float>       spreads, q, out;
    std::vector<uint32_t>    seen;
    std::vector<char>        scratch;
    mixedkv::attention_skips counts;
    mixedkv::attention_args  args;

    problem(int64_t each, int n_seq) :
        n_keys(each * n_seq), n_pages(n_keys / attention_page), n_seq(n_seq), k(n_keys * row), v(k.size()),
        known(n_pages, 1), taken(n_seq * n_head_kv * n_pages), mask(n_seq * n_keys, 0xfc00),
        means(n_pages * n_head_kv * d), spreads(n_pages * n_head_kv), q(n_seq * n_head * d), out(q.size()),
        seen(mixedkv::attention_seen_blocks(n_keys) * n_seq) {
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
        a.scale    = 0.0883883476f;
        a.out      = out.data();
        scratch.resize(mixedkv::attention_scratch_bytes(&a, 1) + 64);
        a.skips = &counts;
    }

    void structure(double share) {
        uint32_t x = 7;
        for (auto * bytes : { &k, &v }) {
            for (int64_t page = 0; page < n_pages; page += 4) {
                for (int h = 0; h < n_head_kv; h++) {
                    const bool     large = double((x = x * 1664525u + 1013904223u) >> 8) < share * 16777216.0;
                    const uint16_t scale = test::to_half(large && bytes == &k ? 2.0f : 0.05f);
                    for (int64_t key = page * attention_page; key < (page + 4) * attention_page && key < n_keys;
                         key++) {
                        for (size_t at = 0; at < head; at += head / 4) {
                            std::memcpy(bytes->data() + key * row + h * head + at, &scale, 2);
                        }
                    }
                }
            }
        }
        for (int64_t page = 0; page < n_pages; page++) {
            mixedkv::attention_sum_up_page(args.segments[0].k, page * attention_page, n_head_kv, d,
                                           means.data() + page * n_head_kv * d, spreads.data() + page * n_head_kv);
        }
        counts = {};
    }

    void dense() { run(args); }

    double sparse() { // returns what choosing took
        auto a          = args;
        a.pages.means   = means.data();
        a.pages.spreads = spreads.data();
        a.pages.known   = known.data();
        a.pages.share   = 0.99f;
        a.pages.taken   = taken.data();
        a.pages.row     = n_head_kv * n_pages;
        const double t  = cpu_seconds();
        mixedkv::attention_choose_pages(&a, 1, 0, 1);
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
    int     n_seq = 8, rounds = 9;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string name  = argv[i];
        const int         value = std::atoi(argv[i + 1]);
        if (name == "--isa" && !test::force_isa(argv[i + 1])) {
            return 77;
        }
        keys   = name == "--keys" ? value : keys;
        n_seq  = name == "--sequences" ? value : n_seq;
        rounds = name == "--rounds" ? value : rounds;
    }
    problem p(keys, n_seq);
    std::printf("%s, %d sequences of %lld keys\n%8s %8s %10s %10s %10s %8s\n", mixedkv::attention_isa(), n_seq,
                (long long)keys, "large", "read", "dense ms", "choose ms", "sparse ms", "ratio");
    for (const double share : { 0.05, 0.1, 0.2, 0.3, 0.5, 0.8 }) {
        p.structure(share);
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
        std::printf("%7.0f%% %7.0f%% %10.2f %10.2f %10.2f %8.2f\n", 100 * share,
                    100.0 * double(p.counts.pages_read) / double(p.counts.pages), 1e3 * median(dense),
                    1e3 * median(choose), 1e3 * median(sparse), median(ratio));
        std::fflush(stdout);
    }
}
