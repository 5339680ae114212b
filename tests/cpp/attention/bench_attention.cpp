// Speed of attention_run alone, one layer per call: decode and prefill over a cache of each type, 16 query heads over
// 4 KV heads of size 128.  bench_attention [--threads N] [--isa NAME] [--only decode|prefill]
// [--type NAME or NAME/NAME, of K and V] [--keys N] [--quick] [--cpu-time]: of the process, where others share the
// machine

#include "attention/attention.h"
#include "support.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

using mixedkv::row_type;

namespace {

constexpr int n_head = 16, n_head_kv = 4, d = 128;

bool cpu_time = false; // --cpu-time

double now() {
    if (cpu_time) {
        return double(std::clock()) / CLOCKS_PER_SEC;
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Threads that spin between calls, as a graph's workers do: starting one would take as long as a decode step.
class team {
    std::vector<std::thread>         threads;
    const std::function<void(int)> * work = nullptr;
    std::atomic<int>                 round{ 0 }, done{ 0 };
    std::atomic<bool>                stop{ false };

    // On a busy machine the awaited thread may need this core.
    static void wait(int & spins) {
        if (++spins > 20000) {
            std::this_thread::yield();
        }
    }

  public:
    const int size;

    explicit team(int n) : size(n) {
        for (int i = 1; i < n; i++) {
            threads.emplace_back([this, i] {
                for (int seen = 0; true; seen++) {
                    for (int spins = 0; round.load(std::memory_order_acquire) == seen;) {
                        wait(spins);
                    }
                    if (stop) {
                        return;
                    }
                    (*work)(i);
                    done.fetch_add(1, std::memory_order_release);
                }
            });
        }
    }
    ~team() {
        stop = true;
        round.fetch_add(1, std::memory_order_release);
        for (std::thread & t : threads) {
            t.join();
        }
    }
    void run(const std::function<void(int)> & f) {
        work = &f;
        done = 0;
        round.fetch_add(1, std::memory_order_release);
        f(0);
        for (int spins = 0; done.load(std::memory_order_acquire) != size - 1;) {
            wait(spins);
        }
    }
};

struct timing {
    double median, best; // seconds
};

int rounding = 16; // --rounding

timing measure(team & t, double seconds, const std::function<void(int)> & f) {
    std::vector<double> times;
    t.run(f);
    for (const double end = now() + seconds; now() < end || times.size() < 5;) {
        const double begin = now();
        t.run(f);
        times.push_back(now() - begin);
    }
    std::sort(times.begin(), times.end());
    return { times[times.size() / 2], times[0] };
}

// Bytes per second of all threads reading `bytes` once, each its own half; best of the repeats.
double read_bandwidth(team & t, const std::vector<uint64_t> & buffer, size_t bytes, double seconds) {
    std::atomic<uint64_t> sink{ 0 };
    const size_t          n = bytes / sizeof(uint64_t) / t.size / 32 * 32;
    const timing          m = measure(t, seconds, [&](int i) {
        uint64_t         sums[32] = {};
        const uint64_t * p        = buffer.data() + i * n;
        for (size_t j = 0; j < n; j += 32) {
            for (int k = 0; k < 32; k++) {
                sums[k] |= p[j + k];
            }
        }
        for (uint64_t s : sums) {
            sink |= s;
        }
    });
    return double(n * sizeof(uint64_t) * t.size) / m.best;
}

// Random bytes with sane scales: speed does not depend on the values.
struct bench_rows {
    row_type             type;
    size_t               head;
    std::vector<uint8_t> bytes;

    bench_rows(row_type type, int64_t n) : type(type), head(test::row_size(type, d)), bytes(n * n_head_kv * head) {
        uint32_t x = 1;
        for (uint8_t & b : bytes) {
            b = uint8_t((x = x * 1664525u + 1013904223u) >> 24);
        }
        const size_t   block = type == row_type::f16 ? 2 : test::row_size(type, test::block_elements(type));
        const uint16_t scale = test::to_half(0.05f);
        for (size_t i = 0; i < bytes.size(); i += block) {
            if (type == row_type::f16) {
                bytes[i + 1] &= 0xbb; // below 2
            } else {
                std::memcpy(bytes.data() + i, &scale, 2);
            }
        }
    }
    mixedkv::attention_rows view() const {
        mixedkv::attention_rows r;
        r.data = bytes.data();
        r.type = type;
        r.row  = n_head_kv * head;
        r.head = head;
        return r;
    }
};

struct cache {
    bench_rows k, v;

    cache(row_type type_k, row_type type_v, int64_t n) : k(type_k, n), v(type_v, n) {}
    mixedkv::attention_segment segment(int64_t n) const { return { k.view(), v.view(), n }; }
};

struct bandwidths {
    double memory, here; // beyond all caches; over as many bytes as the case reads
};

void bench(team & t, const char * label, const std::vector<mixedkv::attention_segment> & segments, int64_t n_queries,
           double seconds, const std::vector<uint64_t> & buffer, double memory) {
    mixedkv::attention_args a;
    int64_t                 n     = 0;
    size_t                  bytes = 0;
    for (const mixedkv::attention_segment & s : segments) {
        a.segments[a.n_segments++] = s;
        n += s.n;
        bytes += s.n * (s.k.row + s.v.row);
    }
    std::vector<float>    q(n_queries * n_head * d, 0.01f), out(q.size());
    std::vector<uint16_t> mask(n_queries * n, 0);
    for (int64_t i = 0; i < n_queries; i++) { // causal, the queries are the last keys
        std::fill(mask.begin() + i * n + (n - n_queries + i + 1), mask.begin() + (i + 1) * n, uint16_t(0xfc00));
    }
    for (size_t i = 0; i < q.size(); i++) {
        q[i] = float(int(i * 2654435761u >> 20) % 201 - 100) * 0.01f;
    }
    a.n_head    = n_head;
    a.n_head_kv = n_head_kv;
    a.d_k = a.d_v = d;
    a.n_queries   = n_queries;
    a.q           = q.data();
    a.q_row = a.out_row = n_head * d * sizeof(float);
    a.q_head = a.out_head = d * sizeof(float);
    a.mask                = mask.data();
    a.mask_row            = n * sizeof(uint16_t);
    a.scale               = 0.0883883476f;
    a.out                 = out.data();
    a.rounding            = rounding;
    std::vector<char> scratch(mixedkv::attention_scratch_bytes(&a, 1) + 64);
    void *            aligned = reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);

    const double here = n_queries == 1 ? read_bandwidth(t, buffer, std::min(bytes, buffer.size() * 8), seconds / 4) : 0;
    const timing m    = measure(t, seconds, [&](int i) { mixedkv::attention_run(&a, 1, aligned, i, t.size); });
    std::printf("%-22s %6lld %5lld %9.3f %9.3f", label, (long long)n, (long long)n_queries, m.median * 1e3,
                m.best * 1e3);
    if (n_queries == 1) {
        const double rate = double(bytes) / m.best;
        std::printf(" %7.1f GB/s %4.0f%% of memory %4.0f%% of %.1f GB/s\n", rate * 1e-9, 100 * rate / memory,
                    100 * rate / here, here * 1e-9);
    } else {
        std::printf(" %7.0f GFLOP/s\n", 4.0 * n_head * d * double(n_queries) * double(n) / m.best * 1e-9);
    }
    std::fflush(stdout);
}

} // namespace

int main(int argc, char ** argv) {
    int         threads = 2;
    bool        quick   = false;
    int64_t     keys    = 0; // 0: several
    std::string only, type;
    for (int i = 1; i < argc; i++) {
        const std::string arg = argv[i];
        if (arg == "--threads" && i + 1 < argc) {
            threads = std::max(1, std::atoi(argv[++i]));
        } else if (arg == "--isa" && i + 1 < argc) {
            if (!test::force_isa(argv[++i])) {
                return 77;
            }
        } else if (arg == "--only" && i + 1 < argc) {
            only = argv[++i];
        } else if (arg == "--type" && i + 1 < argc) {
            type = argv[++i];
        } else if (arg == "--keys" && i + 1 < argc) {
            keys = std::max(1, std::atoi(argv[++i]));
        } else if (arg == "--rounding" && i + 1 < argc) {
            rounding = std::atoi(argv[++i]);
        } else if (arg == "--quick") {
            quick = true;
        } else if (arg == "--cpu-time") {
            cpu_time = true;
        } else {
            std::fprintf(stderr, "usage: bench_attention [--threads N] [--isa NAME] [--only decode|prefill] "
                                 "[--type NAME] [--keys N] [--rounding 16|8] [--quick] [--cpu-time]\n");
            return 2;
        }
    }
    const double                seconds = quick ? 0.02 : 0.5;
    const std::vector<uint64_t> buffer((quick ? 64u : 1024u) << 17);
    team                        t(threads);
    const double                memory = read_bandwidth(t, buffer, buffer.size() * 8, seconds);
    std::printf("isa %s, %d threads, read bandwidth over %zu MiB: %.1f GB/s\n", mixedkv::attention_isa(), threads,
                buffer.size() >> 17, memory * 1e-9);
    std::printf("%-22s %6s %5s %9s %9s\n", "one layer", "keys", "q", "median ms", "best ms");

    struct named {
        const char * name;
        row_type     type;
    };
    const std::vector<named> names{ { "f16", row_type::f16 },   { "q8_0", row_type::q8_0 }, { "q4_0", row_type::q4_0 },
                                    { "q5_0", row_type::q5_0 }, { "lm4", row_type::lm4 },   { "tc3", row_type::tc3 } };
    for (const named & k : names) {
        for (const named & v : names) {
            const std::string name  = &k == &v ? k.name : std::string(k.name) + "/" + v.name;
            const bool        usual = type.empty() && (&k == &v || name == "lm4/tc3");
            if (!usual && type != name) {
                continue;
            }
            const std::vector<int64_t> depths = keys    ? std::vector<int64_t>{ keys }
                                                : quick ? std::vector<int64_t>{ 1024 }
                                                        : std::vector<int64_t>{ 4096, 16384, 32768 };
            for (int64_t n : depths) {
                const cache all(k.type, v.type, n), hot(row_type::f16, row_type::f16, 512);
                if (only != "prefill") {
                    bench(t, ("decode " + name).c_str(), { all.segment(n) }, 1, seconds, buffer, memory);
                }
                if (name == "q4_0" && only != "prefill") {
                    bench(t, "decode q4_0+hot f16", { all.segment(n), hot.segment(256), hot.segment(1) }, 1, seconds,
                          buffer, memory);
                }
                if (n <= 16384 && only != "decode") {
                    const int64_t queries = quick ? 64 : 512;
                    bench(t, ("prefill " + name).c_str(), { all.segment(n) }, std::min(queries, n), seconds, buffer,
                          memory);
                    bench(t, ("prefill " + name + "+hot f16").c_str(),
                          { all.segment(n), hot.segment(256), hot.segment(queries) }, queries, seconds, buffer, memory);
                }
            }
        }
    }
}
