// A query has the same bits however its prompt was cut into steps: all tokens at once, one by one, or anything between;
// in whichever cells its rows lie, whatever lies in the others; and beside other sequences, which may share rows with
// it. What a step reads is made here as the cache makes it: cold rows of all tokens, a ring whose slots are in any
// order, and the rows of the step's own tokens. test_cuts [--isa NAME] [--prompts N]

#include "graph/key-order.h"
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
    const std::vector<row_type> types{ row_type::q4_0, row_type::q5_0, row_type::q8_0, row_type::lm4, row_type::tc3 };
    const std::vector<int>      lengths{ 40, 200, 500, 1100, 2600 };
    const int                   n         = 1 + r.below(r.pick(lengths));
    const int                   n_head_kv = r.pick<int>({ 1, 2, 3 });
    const int                   n_head    = n_head_kv * r.pick<int>({ 1, 2, 3, 4, 5, 6, 7, 8 });
    const row_type              k = r.pick(types), v = r.chance(0.6) ? k : r.pick(types);
    const bool                  in_blocks_of_32 = test::block_elements(k) == 32 && test::block_elements(v) == 32;
    const std::vector<int>      sizes           = in_blocks_of_32 ? std::vector<int>{ 32, 64, 96, 128, 160, 256 }
                                                                  : std::vector<int>{ 64, 64, 128, 128, 192, 256 };
    const int                   d               = long_head ? long_head : r.pick(sizes);
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

// Rows of some tokens, one after the other. What lies where there is none is finite, and not to be seen.
struct copied_rows {
    std::vector<uint8_t>    bytes;
    mixedkv::attention_rows view;

    copied_rows(test::rng & r, const test::rows & from, const std::vector<int> & tokens) :
        bytes(tokens.size() * from.row_bytes + 1) {
        const int n = int(from.bytes.size() / from.row_bytes);
        for (size_t i = 0; i < tokens.size(); i++) {
            const int token = tokens[i] >= 0 ? tokens[i] : r.below(n);
            std::memcpy(bytes.data() + i * from.row_bytes, from.bytes.data() + token * from.row_bytes,
                        from.n_head * from.head_bytes);
        }
        view      = from.view();
        view.data = bytes.data();
    }
};

// Tokens of a prompt by position, those from `first` on in the step
struct sequence {
    std::vector<int> tokens;
    int              first;
};

// Which token each cell holds, -1: none of these
using layout = std::vector<int>;

layout in_order(int n) {
    layout cells(n);
    std::iota(cells.begin(), cells.end(), 0);
    return cells;
}

// Runs of tokens anywhere: whole blocks of cells, runs of any length, or each for itself
layout anywhere(test::rng & r, int n) {
    std::vector<layout> runs;
    const int           longest = r.pick<int>({ 1, 7, 64, 200, n });
    for (int first = 0; first < n;) {
        const int end = std::min(n, first + (longest == 64 ? 64 : 1 + r.below(longest)));
        layout    run(longest == 64 ? 0 : r.below(40), -1);
        for (int i = first; i < end; i++) {
            run.push_back(i);
        }
        runs.push_back(run);
        first = end;
    }
    std::shuffle(runs.begin(), runs.end(), r.engine);
    layout cells;
    for (const layout & run : runs) {
        cells.insert(cells.end(), run.begin(), run.end());
    }
    return cells;
}

// out: [tokens, n_head, d]
void step(test::rng & r, const prompt & p, const std::vector<sequence> & sequences, layout cells,
          std::vector<float> & out) {
    cells.resize(padded(cells.size()), -1);
    const int n_kv = int(cells.size());

    struct query {
        const sequence * of;
        int              pos;
    };
    std::vector<query>   queries;
    std::vector<int32_t> readers;
    std::vector<int>     ring, own;
    for (size_t s = 0; s < sequences.size(); s++) {
        const sequence & cur = sequences[s];
        for (int pos = 0; pos < cur.first; pos++) {
            const int token = cur.tokens[pos];
            if (p.window.contains(pos, p.window.begin(cur.first)) &&
                std::find(ring.begin(), ring.end(), token) == ring.end()) {
                ring.push_back(token);
            }
        }
        for (int pos = cur.first; pos < int(cur.tokens.size()); pos++) {
            queries.push_back({ &cur, pos });
            readers.push_back(int32_t(s));
            own.push_back(cur.tokens[pos]);
        }
    }
    ring.resize(ring.size() + r.below(8), -1); // free slots
    std::shuffle(ring.begin(), ring.end(), r.engine);
    const copied_rows cold_k(r, p.cold_k, cells), cold_v(r, p.cold_v, cells), ring_k(r, p.hot_k, ring),
        ring_v(r, p.hot_v, ring), own_k(r, p.hot_k, own), own_v(r, p.hot_v, own);

    const int        n_hot     = int(ring.size() + own.size());
    const int        n_columns = n_kv + n_hot;
    std::vector<int> cold(p.n_tokens, -1), hot(p.n_tokens, -1); // columns of tokens
    const auto       number = [](const std::vector<int> & tokens, int column, std::vector<int> & columns) {
        for (const int token : tokens) {
            if (token >= 0) {
                columns[token] = column;
            }
            column++;
        }
    };
    number(cells, 0, cold);
    number(ring, n_kv, hot);
    number(own, n_kv + int(ring.size()), hot);

    std::vector<uint16_t> mask(queries.size() * n_columns, 0xfc00);
    std::vector<float>    q(queries.size() * p.n_head * p.d);
    for (size_t i = 0; i < queries.size(); i++) {
        const query & cur = queries[i];
        for (int pos = 0; pos <= cur.pos; pos++) {
            if (p.sliding == 0 || cur.pos - pos < p.sliding) {
                const int  token  = cur.of->tokens[pos];
                const bool is_hot = p.window.contains(pos, p.window.begin(cur.pos));
                mask[i * n_columns + (is_hot ? hot[token] : cold[token])] =
                    test::to_half(p.alibi ? -float(cur.pos - pos) : 0.0f);
            }
        }
        std::memcpy(&q[i * p.n_head * p.d], &p.q[size_t(cur.of->tokens[cur.pos]) * p.n_head * p.d],
                    p.n_head * p.d * sizeof(float));
    }

    const auto shares = [&](int token) {
        return std::count_if(sequences.begin(), sequences.end(), [&](const sequence & s) {
                   return std::find(s.tokens.begin(), s.tokens.end(), token) != s.tokens.end();
               }) > 1;
    };
    const int          n_seq = int(sequences.size());
    llama_kv_key_order order;
    const auto         add_all = [&](const std::vector<int> & columns) {
        for (int s = 0; s < n_seq; s++) {
            const std::vector<int> & tokens = sequences[s].tokens;
            for (size_t pos = 0; pos < tokens.size(); pos++) {
                if (columns[tokens[pos]] >= 0) {
                    order.add(s, { int32_t(pos), columns[tokens[pos]], 1, n_seq > 1 && shares(tokens[pos]) });
                }
            }
        }
    };
    order.begin(0, { n_kv, n_kv + int(ring.size()) }, readers);
    add_all(cold);
    order.arrange(llama_kv_key_order::cold_splits(n_seq, n_kv, p.sliding));
    add_all(hot);
    order.arrange(llama_kv_key_order::hot_splits(n_seq, n_hot, p.window.threshold > 1024));
    order.look(mask.data(), n_columns);

    std::vector<float>      res(q.size(), NAN);
    mixedkv::attention_args a;
    a.n_head         = p.n_head;
    a.n_head_kv      = p.n_head_kv;
    a.d_k            = p.d;
    a.d_v            = p.d;
    a.n_queries      = int64_t(queries.size());
    a.q              = q.data();
    a.q_row          = p.n_head * p.d * sizeof(float);
    a.q_head         = p.d * sizeof(float);
    a.n_segments     = 3;
    a.segments[0]    = { cold_k.view, cold_v.view, n_kv };
    a.segments[1]    = { ring_k.view, ring_v.view, int64_t(ring.size()) };
    a.segments[2]    = { own_k.view, own_v.view, int64_t(own.size()) };
    a.mask           = mask.data();
    a.mask_row       = n_columns * sizeof(uint16_t);
    a.order          = order.get();
    a.scale          = 1.0f / std::sqrt(float(p.d));
    a.max_alibi_bias = p.alibi ? 8.0f : 0.0f;
    a.logit_softcap  = p.softcap;
    a.sinks          = p.sinks.empty() ? nullptr : p.sinks.data();
    a.rotation_q     = 32;
    a.rotation_out   = 32;
    a.rounding       = p.rounding;
    a.out            = res.data();
    a.out_row        = a.q_row;
    a.out_head       = a.q_head;
    test::run({ a }, 1 + r.below(3));
    for (size_t i = 0; i < queries.size(); i++) {
        std::memcpy(&out[size_t(queries[i].of->tokens[queries[i].pos]) * p.n_head * p.d], &res[i * p.n_head * p.d],
                    p.n_head * p.d * sizeof(float));
    }
}

// Tokens [first, end) after those before them
void step(test::rng & r, const prompt & p, int first, int end, const layout & cells, std::vector<float> & out) {
    sequence s{ std::vector<int>(end), first };
    std::iota(s.tokens.begin(), s.tokens.end(), 0);
    step(r, p, { s }, cells, out);
}

// Lengths of steps: many short ones, a few long ones, or both
std::vector<float> evaluate(test::rng & r, const prompt & p, int longest) {
    std::vector<float> out(size_t(p.n_tokens) * p.n_head * p.d, NAN);
    const layout       cells = r.chance(0.3) ? in_order(p.n_tokens) : anywhere(r, p.n_tokens);
    for (int first = 0, end; first < p.n_tokens; first = end) {
        end = std::min(p.n_tokens, first + 1 + r.below(r.chance(0.3) ? std::min(longest, 8) : longest));
        step(r, p, first, end, cells, out);
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
    if (!test::force_isa(argc, argv)) {
        return 77;
    }
    const int prompts = test::number_after(argc, argv, "--prompts", 40);
    if (mixedkv::attention_isa() == std::string("neon")) {
        std::printf("skipped: neon does not promise it (docs/kernels.md)\n");
        return 77;
    }
    for (int i = 0; i < prompts; i++) {
        test::rng          r(i);
        prompt             p = random_prompt(r, 0);
        std::vector<float> whole(size_t(p.n_tokens) * p.n_head * p.d, NAN);
        step(r, p, 0, p.n_tokens, in_order(p.n_tokens), whole);
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
    for (int i = 0; i < prompts; i++) { // three sequences with a common beginning, in one step
        test::rng             r(1000 + i);
        prompt                p      = random_prompt(r, 0);
        const int             common = r.below(p.n_tokens);
        std::vector<sequence> sequences(1 + r.below(3));
        std::vector<float>    alone(size_t(p.n_tokens) * p.n_head * p.d, 0.0f), together = alone;
        for (size_t s = 0; s < sequences.size(); s++) {
            for (int token = 0; token < p.n_tokens; token++) {
                if (token < common || token % sequences.size() == s) {
                    sequences[s].tokens.push_back(token);
                }
            }
            const int n        = int(sequences[s].tokens.size());
            sequences[s].first = std::max(std::min(n - 1, common), r.chance(0.5) ? n - 1 - r.below(std::min(n, 4)) : 0);
            step(r, p, { sequences[s] }, in_order(p.n_tokens), alone);
        }
        step(r, p, sequences, anywhere(r, p.n_tokens), together);
        if (std::memcmp(alone.data(), together.data(), alone.size() * sizeof(float)) != 0) {
            std::printf("FAIL prompt %d: %zu sequences with %d common tokens of %d have other bits than alone\n", i,
                        sequences.size(), common, p.n_tokens);
            failures++;
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
