// Times the attention kernels of cpp/attention/cuda alone, each shape of prefill among them, and compares what they
// compute. `Device` is CUDA's for kernel_times.cu; any that allocates, launches, copies and times will do.

#pragma once

#include "attention/cuda/launch.h"
#include "prefill_variants.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

namespace mixedkv {
namespace cuda {

struct times_options {
    std::vector<int> depths{ 4096, 16384, 32768, 131072 };
    int              tokens = 512; // of a prompt
    int              rounds = 3;   // in which variants take turns
    int              n_head = 32, n_head_kv = 8;
};

// ---- what the device makes

// Numbers with the spread of a normal distribution, from a counter
MIXEDKV_DEVICE float random_number(uint32_t i, uint32_t seed) {
    float sum = 0.0f;
    for (int j = 0; j < 4; j++) {
        uint32_t x = i * 4 + uint32_t(j) + seed * 0x9e3779b9u;
        x          = (x ^ x >> 16) * 0x7feb352du;
        x          = (x ^ x >> 15) * 0x846ca68bu;
        sum += float((x ^ x >> 16) >> 8) * (1.0f / 16777216.0f) - 0.5f;
    }
    return sum * 1.7320508f;
}

constexpr int filled_by_block = 256 * 64;

MIXEDKV_KERNEL(256, 1)
fill_kernel(float * x, int n, uint32_t seed, float size) {
    for (int i = block_x() * filled_by_block + thread(); i < n && i < (block_x() + 1) * filled_by_block; i += 256) {
        x[i] = size * random_number(uint32_t(i), seed);
    }
}

MIXEDKV_KERNEL(256, 1)
number_kernel(int64_t * x, int n, int first) {
    for (int i = thread(); i < n; i += 256) {
        x[i] = first + i;
    }
}

// All cold keys are seen, and those of the micro-batch up to the token's own.
MIXEDKV_KERNEL(256, 1)
mask_kernel(uint16_t * mask, int n_cold, int width) {
    const int token = block_x();
    for (int i = thread(); i < width; i += 256) {
        mask[int64_t(token) * width + i] = i <= n_cold + token ? uint16_t(0) : hidden;
    }
}

// Rows as F16, [n, n_head_kv, d]
template <class Rows, int d, int unit>
MIXEDKV_DEVICE void dequantise_plainly(const char * from, uint16_t * to) {
    uint32_t  y[4];
    const int t = lane() % 4;
    Rows::template dequantise_runs<unit>(from, t, y);
    if (lane() < 4) {
        for (int i = 0; i < 4; i++) {
            const int at = 32 * unit + (i < 2 ? Rows::first_run(t) : Rows::second_run(t)) + 2 * (i % 2);
            to[at]       = uint16_t(y[i]);
            to[at + 1]   = uint16_t(y[i] >> 16);
        }
    }
    if constexpr (unit + 1 < d / 32) {
        dequantise_plainly<Rows, d, unit + 1>(from, to);
    }
}

template <class Rows, int d>
MIXEDKV_KERNEL(32, 1)
dequantise_kernel(const char * from, uint16_t * to) {
    const int64_t at = block_x();
    dequantise_plainly<Rows, d, 0>(from + at * row_bytes<Rows>(d), to + at * d);
}

// A query row by one warp, key by key, from rows in F16
template <int d>
MIXEDKV_KERNEL(32, 1)
plain_kernel(const attention_problem p, const uint16_t * k, const uint16_t * v, float * out) {
    constexpr int n     = d / warp_size;
    const int     token = block_x(), head = block_y(), group = p.group(), head_kv = head / group;
    float         q[n], o[n] = {}, m = -INFINITY, l = 0.0f;
    load_query(p, 0, head_kv, token * group + head % group, q);
    for (int key = 0; key < p.cold.n + p.n_hot(); key++) {
        const bool is_hot = key >= p.cold.n;
        if (p.mask[token * p.mask_token + (is_hot ? key - p.cold.n + p.first_hot_key : key)] == hidden) {
            continue;
        }
        const auto row = [&](bool is_v) {
            return is_hot ? reinterpret_cast<const uint16_t *>(find_row(p, 0, head_kv, key - p.cold.n, true, is_v))
                          : (is_v ? v : k) + (int64_t(key) * p.n_head_kv + head_kv) * d;
        };
        const uint16_t *row_k = row(false), *row_v = row(true);
        float           score = 0.0f;
        for (int i = 0; i < n; i++) {
            score += q[i] * half_bits_to_float(row_k[i * warp_size + lane()]);
        }
        for (int h = 1; h < warp_size; h *= 2) {
            score += shuffle_xor(score, h);
        }
        const float largest = max_of(m, score), factor = exp2_of(m - largest), weight = exp2_of(score - largest);
        m = largest;
        l = l * factor + weight;
        for (int i = 0; i < n; i++) {
            o[i] = o[i] * factor + weight * half_bits_to_float(row_v[i * warp_size + lane()]);
        }
    }
    for (int i = 0; i < n; i++) {
        out[(int64_t(token) * p.n_head + head) * d + i * warp_size + lane()] = o[i] / l;
    }
}

// ---- what is timed

inline const char * name_of(stored_type type) {
    static const char * const names[] = { "f16", "q8_0", "q5_0", "q4_0", "lm4", "tc3" };
    return names[int(type)];
}

template <class K_, class V_, stored_type k, stored_type v>
struct row_pair {
    using K                             = K_;
    using V                             = V_;
    static constexpr stored_type type_k = k, type_v = v;
};

using timed_pairs = shape_list<row_pair<q4_0_rows, q4_0_rows, stored_type::q4_0, stored_type::q4_0>,
                               row_pair<q8_0_rows, q8_0_rows, stored_type::q8_0, stored_type::q8_0>,
                               row_pair<f16_rows, f16_rows, stored_type::f16, stored_type::f16>,
                               row_pair<q5_0_rows, q5_0_rows, stored_type::q5_0, stored_type::q5_0>,
                               row_pair<lm4_rows, lm4_rows, stored_type::lm4, stored_type::lm4>,
                               row_pair<tc3_rows, tc3_rows, stored_type::tc3, stored_type::tc3>,
                               row_pair<q5_0_rows, tc3_rows, stored_type::q5_0, stored_type::tc3>,
                               row_pair<q8_0_rows, q4_0_rows, stored_type::q8_0, stored_type::q4_0>>;

// Memory of the device that grows
template <class Device>
struct device_buffer {
    Device & device;
    void *   data = nullptr;
    size_t   size = 0;

    explicit device_buffer(Device & device) : device(device) {}
    device_buffer(const device_buffer &) = delete;
    ~device_buffer() { device.release(data); }

    template <class T = char>
    T * get(size_t n) {
        if (n * sizeof(T) > size) {
            device.release(data);
            size = n * sizeof(T);
            data = device.allocate(size);
        }
        return static_cast<T *>(data);
    }
};

inline double median_of(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

// What the differences are of the numbers, as RMS
inline double difference_of(const std::vector<float> & got, const std::vector<float> & want) {
    double error = 0.0, square = 0.0;
    for (size_t i = 0; i < want.size(); i++) {
        error += (double(got[i]) - want[i]) * (double(got[i]) - want[i]);
        square += double(want[i]) * want[i];
    }
    return std::sqrt(error / square);
}

template <class Device, int d>
class head_times {
    using buffer = device_buffer<Device>;

    static constexpr int    chunk     = 4096; // rows that are stored at a time
    static constexpr double tolerance = 5e-3; // Q, weights and dequantised values are rounded to F16

    Device &              device;
    const times_options & o;
    const int             most;
    buffer                rows_k[6], rows_v[6]; // by type
    buffer                f16_k, f16_v, from_k, from_v, numbers, hot, queries, mask, sums, weights, out, plain;
    int                   failures = 0;

    static int bytes_of(stored_type type) {
        int res = 0;
        with_rows<d>(type, [&](auto rows) { res = row_bytes<decltype(rows)>(d); });
        return res;
    }

    void fill(float * x, int n, uint32_t seed, float size) {
        device.launch({ (n + filled_by_block - 1) / filled_by_block, 1, 1 }, 256, size_t(0), fill_kernel, x, n, seed,
                      size);
    }

    // n rows of K and V that lie as the cache has them, from `first` on
    void store(stored_type type, int first, int n, uint16_t * f16) {
        store_problem p;
        const int     width = o.n_head_kv * d;
        p.n_tokens          = n;
        p.n_head_kv         = o.n_head_kv;
        p.f16               = f16;
        for (const bool is_v : { false, true }) {
            store_rows & s    = is_v ? p.v : p.k;
            float *      from = (is_v ? from_v : from_k).template get<float>(size_t(chunk) * width);
            fill(from, n * width, uint32_t(2 * first + is_v + 1), 1.0f);
            s.from       = reinterpret_cast<const char *>(from);
            s.from_head  = d * 4;
            s.from_token = width * 4;
            s.cold_row   = int64_t(o.n_head_kv) * bytes_of(type);
            s.cold       = (is_v ? rows_v : rows_k)[int(type)].get(size_t(most) * s.cold_row);
            s.cold_rows  = numbers.template get<int64_t>(chunk);
        }
        device.launch({ 1, 1, 1 }, 256, size_t(0), number_kernel, numbers.template get<int64_t>(chunk), n, first);
        run_store<Device, d>(device, p, type, type);
    }

    // first: of the cold keys. Others lie further on, so that a cache of the device cannot keep them.
    attention_problem problem(int depth, int n_tokens, stored_type k, stored_type v, int first) {
        attention_problem p;
        p.n_head    = o.n_head;
        p.n_head_kv = o.n_head_kv;
        p.n_tokens  = n_tokens;
        p.q         = queries.get(0);
        p.q_head    = d * 4;
        p.q_token   = int64_t(o.n_head) * d * 4;
        p.scale     = 1.0f / std::sqrt(float(d));
        p.cold.n    = depth;
        for (const bool is_v : { false, true }) {
            row_view & cold    = is_v ? p.cold.v : p.cold.k;
            row_view & current = is_v ? p.current.v : p.current.k;
            cold.head          = bytes_of(is_v ? v : k);
            cold.row           = o.n_head_kv * cold.head;
            cold.data          = (is_v ? rows_v[int(v)] : rows_k[int(k)]).get(0) + first * cold.row;
            current.head       = d * 2;
            current.row        = int64_t(2) * o.n_head_kv * d * 2;
            current.data       = hot.get(0) + (is_v ? o.n_head_kv * d * 2 : 0);
        }
        p.current.n     = n_tokens;
        p.mask          = mask.template get<uint16_t>(0);
        p.mask_token    = width_of(depth);
        p.first_hot_key = depth;
        p.out           = out.template get<float>(size_t(n_tokens) * o.n_head * d);
        return p;
    }

    int width_of(int depth) const { return round_up(depth + o.tokens, 32) + 32; }

    void place_sums(attention_problem & p) {
        p.sums    = sums.template get<float>(sums_floats(p, d));
        p.weights = weights.template get<float>(weights_floats(p));
    }

    std::vector<float> read(const void * from, int n_tokens) {
        std::vector<float> res(size_t(n_tokens) * o.n_head * d);
        device.read(res.data(), from, res.size() * sizeof(float));
        return res;
    }

    // The output key by key
    template <class Pair>
    std::vector<float> compute_plainly(int depth, int n_tokens) {
        const attention_problem p = problem(depth, n_tokens, Pair::type_k, Pair::type_v, 0);
        const size_t            n = size_t(depth) * o.n_head_kv;
        uint16_t *              k = f16_k.template get<uint16_t>(n * d), *v = f16_v.template get<uint16_t>(n * d);
        device.launch({ int(n), 1, 1 }, 32, size_t(0), dequantise_kernel<typename Pair::K, d>, p.cold.k.data, k);
        device.launch({ int(n), 1, 1 }, 32, size_t(0), dequantise_kernel<typename Pair::V, d>, p.cold.v.data, v);
        float * to = plain.template get<float>(size_t(n_tokens) * o.n_head * d);
        device.launch({ n_tokens, o.n_head, 1 }, 32, size_t(0), plain_kernel<d>, p, static_cast<const uint16_t *>(k),
                      static_cast<const uint16_t *>(v), to);
        return read(to, n_tokens);
    }

    void expect_same(const std::vector<float> & got, const std::vector<float> & want, const std::string & what) {
        const double difference = difference_of(got, want);
        if (!(difference <= tolerance)) {
            std::printf("FAIL %s: differs by %.1e\n", what.c_str(), difference);
            failures++;
        }
    }

    // ---- tables: lines of times, of which the shortest of each column is marked

    struct table {
        std::vector<std::string>         names;
        std::vector<std::vector<double>> us; // [variant][depth], 0: does not run
    };

    void print_lines(const std::string & pair, const table & t, const std::vector<double> & work, const char * unit) {
        for (size_t i = 0; i < t.names.size(); i++) {
            std::printf("| %-10s | %-26s |", pair.c_str(), t.names[i].c_str());
            for (size_t j = 0; j < o.depths.size(); j++) {
                double best = 0.0;
                for (const auto & times : t.us) {
                    best = times[j] > 0.0 && (best == 0.0 || times[j] < best) ? times[j] : best;
                }
                if (t.us[i][j] > 0.0) {
                    std::printf(" %8.1f us %6.2f %s%s |", t.us[i][j], work[j] / t.us[i][j], unit,
                                t.us[i][j] == best ? " *" : "  ");
                } else {
                    std::printf(" %24s |", "does not fit");
                }
            }
            std::printf("\n");
        }
        std::fflush(stdout);
    }

    void print_head(const char * what, int n_tokens) {
        std::printf("\n%s of %d tokens, heads of %d, %d over %d\n| %-10s | %-26s |", what, n_tokens, d, o.n_head,
                    o.n_head_kv, "K, V", "variant");
        for (const int depth : o.depths) {
            std::printf(" %24d |", depth);
        }
        std::printf("\n|---|---|");
        for (size_t i = 0; i < o.depths.size(); i++) {
            std::printf("---|");
        }
        std::printf("\n");
    }

    // Times by those of the first variant, over all pairs of types at the two largest depths: geometric mean
    void print_means(const std::vector<table> & tables) {
        for (size_t i = 0; i < tables[0].names.size(); i++) {
            double sum = 0.0;
            int    n   = 0;
            for (const table & t : tables) {
                for (size_t j = o.depths.size() < 2 ? 0 : o.depths.size() - 2; j < o.depths.size(); j++) {
                    if (t.us[i][j] > 0.0 && t.us[0][j] > 0.0) {
                        sum += std::log(t.us[i][j] / t.us[0][j]);
                        n++;
                    }
                }
            }
            if (n > 0) {
                std::printf("mean of times, %s by the usual: %.3f\n", tables[0].names[i].c_str(), std::exp(sum / n));
            }
        }
    }

    // Calls run(variant, problem) in turns; the median time of one call. Calls in a row read other keys each.
    template <class Run>
    void time_in_turns(table & t, size_t column, int depth, int n_tokens, stored_type k, stored_type v, int n_calls,
                       Run && run) {
        std::vector<std::vector<double>> all(t.names.size());
        for (int round = 0; round < o.rounds + 1; round++) {
            for (size_t i = 0; i < t.names.size(); i++) {
                const double us = device.time([&] {
                    for (int call = 0; call < n_calls; call++) {
                        const int n_places = most / depth;
                        run(int(i), problem(depth, n_tokens, k, v, call % n_places * depth));
                    }
                });
                if (round > 0) { // the first warms up
                    all[i].push_back(us / n_calls);
                }
            }
        }
        for (size_t i = 0; i < t.names.size(); i++) {
            t.us[i][column] = t.us[i][column] < 0.0 ? 0.0 : median_of(all[i]);
        }
    }

    void make_mask(int depth, int n_tokens) {
        uint16_t * to = mask.template get<uint16_t>(size_t(n_tokens) * width_of(depth));
        device.launch({ n_tokens, 1, 1 }, 256, size_t(0), mask_kernel, to, depth, width_of(depth));
    }

    table empty_table(std::vector<std::string> names) const {
        table t;
        t.names = std::move(names);
        t.us.assign(t.names.size(), std::vector<double>(o.depths.size(), 1.0));
        return t;
    }

    static double bytes(stored_type k, stored_type v, int n_head_kv, double depth) {
        return depth * n_head_kv * (bytes_of(k) + bytes_of(v));
    }

    // Variants: how many blocks of a processor the splits are made for
    void time_decode() {
        print_head("decode", 1);
        std::vector<table> tables;
        timed_pairs::for_each([&](auto pair) {
            using Pair      = decltype(pair);
            const int usual = d > 128 || (Pair::type_k == stored_type::f16 && Pair::type_v == stored_type::f16) ? 1 : 2;
            const std::string name = std::string(name_of(Pair::type_k)) + ", " + name_of(Pair::type_v);
            table             t    = empty_table({ "usual splits", "half as many", "twice as many" });
            const auto        run  = [&](int variant, attention_problem p) {
                device_size size;
                size.n_processors     = variant == 1 ? device.n_processors() / 2 : device.n_processors();
                size.blocks_of_decode = variant == 2 ? 2 * usual : usual;
                plan_splits(p, size, 0);
                place_sums(p);
                run_decode<Device, typename Pair::K, typename Pair::V, d>(device, p);
                run_merge<Device, d>(device, p);
            };
            std::vector<double> work;
            for (size_t j = 0; j < o.depths.size(); j++) {
                const int depth = o.depths[j];
                make_mask(depth, 1);
                const auto         want = j == 0 ? compute_plainly<Pair>(depth, 1) : std::vector<float>();
                std::vector<float> first;
                for (int i = 0; i < int(t.names.size()); i++) {
                    run(i, problem(depth, 1, Pair::type_k, Pair::type_v, 0));
                    const auto got = read(out.get(0), 1);
                    expect_same(got, j == 0 ? want : i == 0 ? got : first, name + " at " + std::to_string(depth));
                    first = i == 0 ? got : first;
                }
                time_in_turns(t, j, depth, 1, Pair::type_k, Pair::type_v, 32, run);
                work.push_back(bytes(Pair::type_k, Pair::type_v, o.n_head_kv, depth) * 1e-6);
            }
            print_lines(name, t, work, "TB/s");
            tables.push_back(t);
        });
        print_means(tables);
    }

    template <class Shape>
    static std::string name_of_shape() {
        return std::to_string(Shape::warp_rows) + " rows " + std::to_string(Shape::warps) + " warps " +
               std::to_string(Shape::keys) + " keys" + (Shape::between ? " between" : "");
    }

    void time_prefill() {
        print_head("prefill", o.tokens);
        std::vector<std::string> names;
        prefill_variants<d>::for_each([&](auto shape) { names.push_back(name_of_shape<decltype(shape)>()); });
        std::vector<table> tables;
        const auto         fits = [&](auto shape) {
            return prefill_layout<d, decltype(shape)>::bytes(o.n_head / o.n_head_kv) <= device.most_shared_bytes();
        };
        timed_pairs::for_each([&](auto pair) {
            using Pair             = decltype(pair);
            const std::string name = std::string(name_of(Pair::type_k)) + ", " + name_of(Pair::type_v);
            table             t    = empty_table(names);
            const auto        run  = [&](int variant, attention_problem p) {
                int i = 0;
                prefill_variants<d>::for_each([&](auto shape) {
                    using Shape = decltype(shape);
                    if (i++ != variant || !fits(shape)) {
                        return;
                    }
                    device_size size;
                    size.n_processors      = device.n_processors();
                    size.blocks_of_prefill = Shape::blocks;
                    plan_splits(p, size, Shape::rows);
                    place_sums(p);
                    run_prefill<Device, d, Shape>(device, p, Pair::type_k, Pair::type_v);
                    run_merge<Device, d>(device, p);
                });
            };
            std::vector<double> work;
            for (size_t j = 0; j < o.depths.size(); j++) {
                const int depth = o.depths[j];
                make_mask(depth, o.tokens);
                const auto         want = j == 0 ? compute_plainly<Pair>(depth, o.tokens) : std::vector<float>();
                std::vector<float> first;
                int                i = 0;
                prefill_variants<d>::for_each([&](auto shape) {
                    if (fits(shape)) {
                        run(i, problem(depth, o.tokens, Pair::type_k, Pair::type_v, 0));
                        const auto got = read(out.get(0), o.tokens);
                        expect_same(got,
                                    j == 0          ? want
                                    : first.empty() ? got
                                                    : first,
                                    name + " at " + std::to_string(depth) + ", " + names[i]);
                        first = first.empty() ? got : first;
                    } else {
                        t.us[i][j] = -1.0;
                    }
                    i++;
                });
                time_in_turns(t, j, depth, o.tokens, Pair::type_k, Pair::type_v, depth < 32768 ? 4 : 2, run);
                work.push_back(4.0 * o.tokens * o.n_head * d * (depth + 0.5 * o.tokens) * 1e-6);
            }
            print_lines(name, t, work, "TFLOP/s");
            tables.push_back(t);
        });
        print_means(tables);
    }

  public:
    head_times(Device & device, const times_options & o) :
        device(device), o(o), most(*std::max_element(o.depths.begin(), o.depths.end())),
        rows_k{ buffer(device), buffer(device), buffer(device), buffer(device), buffer(device), buffer(device) },
        rows_v{ buffer(device), buffer(device), buffer(device), buffer(device), buffer(device), buffer(device) },
        f16_k(device), f16_v(device), from_k(device), from_v(device), numbers(device), hot(device), queries(device),
        mask(device), sums(device), weights(device), out(device), plain(device) {}

    // How many results were wrong
    int run() {
        const int width = o.n_head * d;
        fill(queries.template get<float>(size_t(o.tokens) * width), o.tokens * width, 7, 2.0f); // scores spread by 2
        uint16_t * f16 = hot.template get<uint16_t>(size_t(o.tokens) * 2 * o.n_head_kv * d);
        for (int type = 0; type < 6; type++) {
            if (type == 0) {
                store(stored_type(type), 0, std::min(o.tokens, std::min(most, chunk)), f16);
            }
            for (int first = 0; first < most; first += chunk) {
                store(stored_type(type), first, std::min(chunk, most - first), nullptr);
            }
        }
        time_decode();
        time_prefill();
        return failures;
    }
};

} // namespace cuda
} // namespace mixedkv
