// Random attention problems, rows of every type, and the double-precision reference.

#pragma once

#include "attention/attention.h"

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace test {

uint16_t to_half(float x); // round to nearest, ties to even
float    from_half(uint16_t h);

int block_elements(mixedkv::row_type type);

// Bytes of d elements
size_t row_size(mixedkv::row_type type, int d);

const std::vector<mixedkv::row_type> & all_types();

// Without those that are dequantised by a function of ggml
const std::vector<mixedkv::row_type> & stored_types();

struct rng {
    std::mt19937 engine;

    explicit rng(uint32_t seed) : engine(seed) {}
    int   below(int n) { return int(engine() % uint32_t(n)); }
    bool  chance(double p) { return engine() < p * 4294967296.0; }
    float gauss() { return std::normal_distribution<float>()(engine); }
    template <class T>
    T pick(const std::vector<T> & from) {
        return from[below(int(from.size()))];
    }
};

// [n, n_head, d] rows of one type, with gaps between rows and heads, and what they hold as doubles.
struct rows {
    mixedkv::row_type    type;
    int64_t              n;
    int                  n_head;
    int                  d;
    size_t               head_bytes;
    size_t               row_bytes;
    std::vector<uint8_t> bytes; // exactly as long as the last row needs: sanitizers see a read past the end

    rows(rng & r, mixedkv::row_type type, int64_t n, int n_head, int d, size_t gap);
    mixedkv::attention_rows view() const;
    std::vector<float>      value(int64_t row, int head) const; // [d], exact
};

enum class mask_kind { none, causal, window, holes, all_hidden, alibi };

struct options {
    int                            n_head = 4, n_head_kv = 2, d_k = 64, d_v = 64, n_queries = 1;
    std::vector<int64_t>           n_keys{ 100 };
    std::vector<mixedkv::row_type> type_k{ mixedkv::row_type::f16 };
    std::vector<mixedkv::row_type> type_v{ mixedkv::row_type::f16 };
    mask_kind                      mask       = mask_kind::none;
    float                          score_std  = 3.0f; // of scale * q.k
    float                          softcap    = 0.0f;
    int                            rotation_q = 0, rotation_out = 0;
    bool                           scaled   = false; // Q times a scale for each KV head and channel
    int                            n_pairs  = 0;     // whose bias is subtracted from K of the first segment
    bool                           sinks    = false;
    int                            rounding = 16;
    bool                           permuted = false; // Q as [n_head, n_queries, d] and gaps between K and V rows

    std::string describe() const;
};

struct problem {
    options               o;
    std::vector<rows>     k, v;
    std::vector<float>    q, scale_q, sinks, out;
    std::vector<uint16_t> mask;

    std::vector<mixedkv::attention_pair> pairs;
    std::vector<std::vector<float>>      pair_data; // of each pair: subtracted bias, cosines, sines

    static constexpr int first_angle = 5;

    problem(rng & r, const options & o);
    int64_t                 n_keys() const;
    mixedkv::attention_args args();
    void                    make_pairs();
    double                  score_of_pairs(const float * q, int head_kv, int64_t key) const;
    // [n_queries, n_head, d_v]
    std::vector<double>     reference() const;
};

// The largest error of the first `n`, as a share of the largest |v| (Gaussian values: about 4); NaN if one is.
double worst_error(const std::vector<float> & got, const std::vector<double> & want, size_t n);

// x[n] by Hadamard blocks of `edge`, element by element from the definition.
std::vector<double> rotated(const std::vector<double> & x, int edge);

// Zeros, as attention_run asks for
std::unique_ptr<void, void (*)(void *)> make_scratch(size_t bytes);

// All streams in one call of attention_run, every thread its own. The number of threads that were told to be the last.
int run(std::vector<mixedkv::attention_args> streams, int n_threads);

// Makes MIXEDKV_ISA hold; false with a message on stdout when the machine lacks it.
bool force_isa(const std::string & name);

// The same for the argument --isa NAME, where there is one
bool force_isa(int argc, char ** argv);

// What follows an argument of this name
const char * value_after(int argc, char ** argv, const char * name, const char * otherwise);
int          number_after(int argc, char ** argv, const char * name, int otherwise);

} // namespace test
