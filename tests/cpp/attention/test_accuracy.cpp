// The error against double precision is no larger than that of llama.cpp's flash attention over an F16 cache, which
// rounds Q to F16, multiplies in F32, and adds up V in F16. Prints the table; --isa NAME.

#include "support.h"

#include <cmath>
#include <cstdio>
#include <string>

using mixedkv::row_type;

namespace {

float round_half(float x) {
    return test::from_half(test::to_half(x));
}

// What flash attention on an F16 cache gives for the rows of `p`, which are F16, without a mask.
std::vector<double> f16_flash_attention(const test::problem & p) {
    const test::options &           o = p.o;
    std::vector<double>             out;
    std::vector<std::vector<float>> ks, vs;
    for (int64_t j = 0; j < p.n_keys(); j++) {
        ks.push_back(p.k[0].value(j, 0));
        vs.push_back(p.v[0].value(j, 0));
    }
    for (int row = 0; row < o.n_queries * o.n_head; row++) {
        std::vector<float> q(p.q.begin() + row * o.d_k, p.q.begin() + (row + 1) * o.d_k);
        std::vector<float> acc(o.d_v, 0.0f);
        float              max = -INFINITY, sum = 0.0f;
        for (float & x : q) {
            x = round_half(x);
        }
        for (int64_t j = 0; j < p.n_keys(); j++) {
            const std::vector<float> &k = ks[j], &v = vs[j];
            float                     s = 0.0f;
            for (int e = 0; e < o.d_k; e++) {
                s += q[e] * k[e];
            }
            s *= 1.0f / std::sqrt(float(o.d_k));
            float weight = 1.0f;
            if (s > max) {
                const float correction = std::exp(max - s);
                max                    = s;
                sum *= correction;
                for (float & x : acc) {
                    x = round_half(x * correction);
                }
            } else {
                weight = std::exp(s - max);
            }
            sum += weight;
            for (int e = 0; e < o.d_v; e++) {
                acc[e] = round_half(acc[e] + v[e] * weight);
            }
        }
        for (float x : acc) {
            out.push_back(double(x) / sum);
        }
    }
    return out;
}

// Root mean square error as a share of the root mean square of the reference
template <class T>
double relative_error(const std::vector<T> & got, const std::vector<double> & want) {
    double error = 0.0, size = 0.0;
    for (size_t i = 0; i < want.size(); i++) {
        error += (got[i] - want[i]) * (got[i] - want[i]);
        size += want[i] * want[i];
    }
    return std::sqrt(error / size);
}

test::problem make(row_type type, int64_t keys, float score_std, int queries) {
    test::options o;
    o.n_head    = 4;
    o.n_head_kv = 1;
    o.d_k = o.d_v = 128;
    o.n_queries   = queries;
    o.n_keys      = { keys };
    o.type_k      = { type };
    o.type_v      = { type };
    o.score_std   = score_std;
    test::rng r(uint32_t(keys) + 1);
    return test::problem(r, o);
}

} // namespace

int main(int argc, char ** argv) {
    if (!test::force_isa(argc, argv)) {
        return 77;
    }
    int failures = 0;
    std::printf("%s, relative RMS error\n%6s %9s %7s %9s | %9s %9s %9s %9s %9s %9s %9s %9s %9s\n",
                mixedkv::attention_isa(), "keys", "score std", "queries", "F16 flash", "f16", "q8_0", "q5_0", "q4_0",
                "lm4", "tc3", "q8_0 by 8", "q4_0 by 8", "tc3 by 8");
    for (int64_t keys : { 64, 1024, 4096, 16384 }) {
        for (float score_std : { 2.0f, 4.0f }) {
            for (int queries : { 1, 12 }) {       // decode and prefill
                if (queries > 1 && keys > 1024) { // the reference takes too long
                    continue;
                }
                const test::problem flash = make(row_type::f16, keys, score_std, queries);
                const double        bound = relative_error(f16_flash_attention(flash), flash.reference());
                std::printf("%6lld %9g %7d %9.1e |", (long long)keys, double(score_std), queries, bound);
                for (row_type type :
                     { row_type::f16, row_type::q8_0, row_type::q5_0, row_type::q4_0, row_type::lm4, row_type::tc3 }) {
                    test::problem p = make(type, keys, score_std, queries);
                    test::run({ p.args() }, 2);
                    const double error = relative_error(p.out, p.reference());
                    std::printf(" %9.1e%s", error, error <= bound ? "" : " FAIL");
                    failures += !(error <= bound);
                }
                for (row_type type : { row_type::q8_0, row_type::q4_0, row_type::tc3 }) { // in 8 bits
                    test::problem p = make(type, keys, score_std, queries);
                    p.o.rounding    = 8;
                    test::run({ p.args() }, 2);
                    const double error = relative_error(p.out, p.reference());
                    std::printf(" %9.1e%s", error, error <= 4e-2 ? "" : " FAIL");
                    failures += !(error <= 4e-2);
                }
                std::printf("\n");
            }
        }
    }
    return failures != 0;
}
