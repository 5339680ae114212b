// A query has the same bits however its prompt was cut into steps: all tokens at once, one by one, or anything between.
// What a step reads is made here as the cache makes it: cold rows of all tokens, a ring whose slots are in any order,
// and the rows of the step's own tokens. test_cuts [--isa NAME] [--prompts N]

#include "graph/hot-order.h"
#include "hot_set/hot_window.h"
#include "support.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>

using mixedkv::row_type;

namespace {

int failures = 0;

struct prompt {
    int                 n_tokens, n_head, n_head_kv, d;
    row_type            type_k, type_v;
    mixedkv::hot_window window;
    float               softcap;
    bool                alibi;
    int                 sliding; // tokens that a query sees, 0: all
    int                 rounding;
    test::rows          cold_k, cold_v, hot_k, hot_v;
    std::vector<float>  q, sinks;
};

int64_t padded(int64_t n) {
    return (n + 255) / 256 * 256;
}

// long_head: the size of heads, 0: of those that have the same bits
prompt random_prompt(test::rng & r, int long_head) {
    const std::vector<row_type> types{ row_type::q4_0, row_type::q8_0, row_type::lm4, row_type::tc3 };
    const std::vector<int>      lengths{ 40, 200, 500, 1100, 2600 };
    const int                   n         = 1 + r.below(r.pick(lengths));
    const int                   n_head_kv = r.pick<int>({ 1, 2, 3 });
    const int                   n_head    = n_head_kv * r.pick<int>({ 1, 3, 4, 7 });
    const int                   d         = long_head ? long_head : r.pick<int>({ 64, 64, 128, 128, 192, 256 });
    const row_type              k = r.pick(types), v = r.chance(0.6) ? k : r.pick(types);
    mixedkv::hot_window         window;
    window.group_size  = 1 + r.below(40);
    window.threshold   = r.chance(0.1) ? 0 : window.group_size + r.below(r.chance(0.2) ? 1500 : 150);
    window.sink_tokens = window.threshold == 0 ? 4 : r.below(9);
    prompt p{ n,
              n_head,
              n_head_kv,
              d,
              k,
              v,
              window,
              r.chance(0.2) ? 10.0f : 0.0f,
              r.chance(0.2),
              r.chance(0.2) ? 1 + r.below(300) : 0,
              r.chance(0.4) ? 8 : 16,
              { r, k, padded(n), n_head_kv, d, 0 },
              { r, v, padded(n), n_head_kv, d, 0 },
              { r, row_type::f16, n, n_head_kv, d, 0 },
              { r, row_type::f16, n, n_head_kv, d, 0 },
              {},
              {} };
    for (int i = 0; i < n * n_head * d; i++) {
        p.q.push_back(3.0f * r.gauss());
    }
    p.sinks.resize(r.chance(0.3) ? n_head : 0);
    for (float & x : p.sinks) {
        x = r.gauss();
    }
    return p;
}

// The rows of some tokens, one after the other
struct copied_rows {
    std::vector<uint8_t>    bytes;
    mixedkv::attention_rows view;

    copied_rows(const test::rows & from, const std::vector<int> & tokens) : bytes(tokens.size() * from.row_bytes + 1) {
        for (size_t i = 0; i < tokens.size(); i++) {
            if (tokens[i] >= 0) {
                std::memcpy(bytes.data() + i * from.row_bytes, from.bytes.data() + tokens[i] * from.row_bytes,
                            from.n_head * from.head_bytes);
            }
        }
        view      = from.view();
        view.data = bytes.data();
    }
};

// Tokens [first, end) after those before them; out: [n_tokens, n_head, d]
void step(test::rng & r, const prompt & p, int first, int end, std::vector<float> & out) {
    const int        n_kv = int(padded(end));
    std::vector<int> ring;
    for (int i = 0; i < first; i++) {
        if (p.window.contains(i, p.window.begin(first))) {
            ring.push_back(i);
        }
    }
    ring.resize(ring.size() + r.below(8), -1); // free slots
    std::shuffle(ring.begin(), ring.end(), r.engine);
    std::vector<int> tokens(end - first);
    std::iota(tokens.begin(), tokens.end(), first);
    const copied_rows ring_k(p.hot_k, ring), ring_v(p.hot_v, ring), own_k(p.hot_k, tokens), own_v(p.hot_v, tokens);

    const int             n_hot = int(ring.size() + tokens.size());
    std::vector<uint16_t> mask(size_t(end - first) * (n_kv + n_hot), 0xfc00);
    for (int query = first; query < end; query++) {
        uint16_t * row  = mask.data() + size_t(query - first) * (n_kv + n_hot);
        const auto hot  = [&](int key) { return p.window.contains(key, p.window.begin(query)); };
        const auto seen = [&](int key) { return key <= query && (p.sliding == 0 || query - key < p.sliding); };
        const auto open = [&](int column, int key) {
            row[column] = test::to_half(p.alibi ? -float(query - key) : 0.0f);
        };
        for (int key = 0; key <= query; key++) {
            if (seen(key) && !hot(key)) {
                open(key, key);
            }
        }
        for (size_t i = 0; i < ring.size(); i++) {
            if (ring[i] >= 0 && seen(ring[i]) && hot(ring[i])) {
                open(n_kv + int(i), ring[i]);
            }
        }
        for (int key = first; key <= query; key++) {
            if (seen(key) && hot(key)) {
                open(n_kv + int(ring.size()) + key - first, key);
            }
        }
    }

    llama_kv_hot_order order(p.window.threshold > 1024);
    for (size_t i = 0; i < ring.size(); i++) {
        if (ring[i] >= 0) {
            order.add(0, ring[i], int32_t(i));
        }
    }
    for (size_t i = 0; i < tokens.size(); i++) {
        order.add(0, tokens[i], int32_t(ring.size() + i));
    }
    order.arrange(order.most_splits(1, n_hot));
    std::vector<uint16_t> ordered_mask(tokens.size() * order.size());
    for (size_t i = 0; i < tokens.size(); i++) {
        order.copy_mask(mask.data() + i * (n_kv + n_hot) + n_kv, ordered_mask.data() + i * order.size());
    }

    mixedkv::attention_args a;
    a.n_head         = p.n_head;
    a.n_head_kv      = p.n_head_kv;
    a.d_k            = p.d;
    a.d_v            = p.d;
    a.n_queries      = end - first;
    a.q              = p.q.data() + size_t(first) * p.n_head * p.d;
    a.q_row          = p.n_head * p.d * sizeof(float);
    a.q_head         = p.d * sizeof(float);
    a.n_segments     = 3;
    a.segments[0]    = { p.cold_k.view(), p.cold_v.view(), n_kv };
    a.segments[1]    = { ring_k.view, ring_v.view, int64_t(ring.size()) };
    a.segments[2]    = { own_k.view, own_v.view, end - first };
    a.mask           = mask.data();
    a.mask_row       = (n_kv + n_hot) * sizeof(uint16_t);
    a.order          = { order.get_blocks().data(), int64_t(order.get_blocks().size()),
                         order.get_splits().data(), int64_t(order.get_splits().size()) - 1,
                         ordered_mask.data(),       order.size() * sizeof(uint16_t) };
    a.scale          = 1.0f / std::sqrt(float(p.d));
    a.max_alibi_bias = p.alibi ? 8.0f : 0.0f;
    a.logit_softcap  = p.softcap;
    a.sinks          = p.sinks.empty() ? nullptr : p.sinks.data();
    a.rotation_q     = 32;
    a.rotation_out   = 32;
    a.rounding       = p.rounding;
    a.out            = out.data() + size_t(first) * p.n_head * p.d;
    a.out_row        = a.q_row;
    a.out_head       = a.q_head;
    test::run({ a }, 1 + r.below(3));
}

// Lengths of steps: many short ones, a few long ones, or both
std::vector<float> evaluate(test::rng & r, const prompt & p, int longest) {
    std::vector<float> out(size_t(p.n_tokens) * p.n_head * p.d, NAN);
    for (int first = 0, end; first < p.n_tokens; first = end) {
        end = std::min(p.n_tokens, first + 1 + r.below(r.chance(0.3) ? std::min(longest, 8) : longest));
        step(r, p, first, end, out);
    }
    return out;
}

// The relative error of a query's output, against double precision
double error_of(const prompt & p, int query, const std::vector<float> & out) {
    double error = 0.0, size = 0.0;
    for (int head = 0; head < p.n_head; head++) {
        const int           head_kv = head / (p.n_head / p.n_head_kv);
        const float *       from    = p.q.data() + (size_t(query) * p.n_head + head) * p.d;
        std::vector<double> q       = test::rotated(std::vector<double>(from, from + p.d), 32), scores, sum(p.d);
        std::vector<int>    keys;
        for (int key = 0; key <= query; key++) {
            if (p.sliding == 0 || query - key < p.sliding) {
                const bool hot = p.window.contains(key, p.window.begin(query));
                const auto k   = (hot ? p.hot_k : p.cold_k).value(key, head_kv);
                double     dot = 0.0;
                for (int i = 0; i < p.d; i++) {
                    dot += q[i] * double(k[i]);
                }
                dot /= std::sqrt(double(p.d));
                keys.push_back(key);
                scores.push_back(p.softcap > 0.0f ? p.softcap * std::tanh(dot / p.softcap) : dot);
            }
        }
        double most  = *std::max_element(scores.begin(), scores.end());
        most         = p.sinks.empty() ? most : std::max(most, double(p.sinks[head]));
        double total = p.sinks.empty() ? 0.0 : std::exp(p.sinks[head] - most);
        for (size_t j = 0; j < keys.size(); j++) {
            const bool   hot    = p.window.contains(keys[j], p.window.begin(query));
            const auto   v      = (hot ? p.hot_v : p.cold_v).value(keys[j], head_kv);
            const double weight = std::exp(scores[j] - most);
            total += weight;
            for (int i = 0; i < p.d; i++) {
                sum[i] += weight * double(v[i]);
            }
        }
        const std::vector<double> want = test::rotated(sum, 32);
        for (int i = 0; i < p.d; i++) {
            const double x = want[i] / total;
            error += std::pow(x - double(out[(size_t(query) * p.n_head + head) * p.d + i]), 2);
            size += x * x;
        }
    }
    return std::sqrt(error / size);
}

void check_values(const prompt & p, const std::vector<float> & out, const char * steps, int i) {
    for (const int query : { 0, p.n_tokens / 3, p.n_tokens - 1 }) {
        const double error = p.alibi ? 0.0 : error_of(p, query, out); // slopes are test_attention's
        if (!(error <= (p.rounding == 8 ? 3e-2 : 3e-4))) {
            std::printf("FAIL prompt %d, %s: token %d of %d with heads of %d and %d bits is off by %g\n", i, steps,
                        query, p.n_tokens, p.d, p.rounding, error);
            failures++;
        }
    }
}

} // namespace

int main(int argc, char ** argv) {
    int prompts = 40;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (std::string(argv[i]) == "--isa" && !test::force_isa(argv[i + 1])) {
            return 77;
        }
        if (std::string(argv[i]) == "--prompts") {
            prompts = std::atoi(argv[i + 1]);
        }
    }
    if (mixedkv::attention_isa() == std::string("neon")) {
        std::printf("skipped: neon does not promise it (docs/kernels.md)\n");
        return 77;
    }
    for (int i = 0; i < prompts; i++) {
        test::rng          r(i);
        prompt             p = random_prompt(r, 0);
        std::vector<float> whole(size_t(p.n_tokens) * p.n_head * p.d, NAN);
        if (mixedkv::attention_isa() == std::string("amx")) {
            p.rounding = 8; // with 16 prefill has sums of its own there
        }
        step(r, p, 0, p.n_tokens, whole);
        check_values(p, whole, "at once", i);
        for (const int longest : { 1, 40, 300, 700 }) {
            if (longest == 1 && p.n_tokens > 300) {
                continue; // takes long
            }
            const std::vector<float> cut = evaluate(r, p, longest);
            for (size_t j = 0; j < whole.size(); j++) {
                if (std::memcmp(&whole[j], &cut[j], sizeof(float)) != 0) {
                    std::printf(
                        "FAIL prompt %d, steps up to %d: token %zu of %d head %zu element %zu: %.9g, at once %.9g; "
                        "heads %d/%d d %d types %d/%d window %u/%u sinks %u softcap %g alibi %d sliding %d\n",
                        i, longest, j / p.d / p.n_head, p.n_tokens, j / p.d % p.n_head, j % p.d, double(cut[j]),
                        double(whole[j]), p.n_head, p.n_head_kv, p.d, int(p.type_k), int(p.type_v), p.window.threshold,
                        p.window.group_size, p.window.sink_tokens, double(p.softcap), p.alibi, p.sliding);
                    failures++;
                    break;
                }
            }
        }
    }
    for (const int d : { 320, 512, 576, 1024 }) { // right, if not the same bits
        test::rng    r(d);
        const prompt p = random_prompt(r, d);
        check_values(p, evaluate(r, p, 8), "short steps", d);
        check_values(p, evaluate(r, p, 300), "long steps", d);
    }
    std::printf("%s: %d failures\n", mixedkv::attention_isa(), failures);
    return failures != 0;
}
