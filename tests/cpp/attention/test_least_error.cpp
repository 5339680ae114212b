// Rows of Q4_0 and Q5_0 in scales of least error: beside ggml's own, and what becomes of rows that no model has.

#include "attention/kernel.h"
#include "attention/least_error.h"

#include "attention/simd/half.h"
#include "check.h"
#include "packed_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace {

constexpr int n_block = 32;

// ggml's layout: a scale, the fifth bits, nibbles of elements i and i + 16 in a byte
template <class Integers>
void to_float(const void * row, float * x, int64_t n) {
    const auto * block = static_cast<const uint8_t *>(row);
    for (int64_t i = 0; i < n; i += n_block, block += Integers::bytes) {
        const uint8_t * nibbles = block + Integers::bytes - 16;
        uint32_t        fifths  = 0;
        std::memcpy(&fifths, block + 2, Integers::low < -8 ? 4 : 0);
        for (int j = 0; j < n_block; j++) {
            const int low = j < 16 ? nibbles[j] & 15 : nibbles[j - 16] >> 4;
            x[i + j]      = mixedkv::half_at(block) * float((low | int(fifths >> j & 1) << 4) + Integers::low);
        }
    }
}

// What ggml does: the element of the largest magnitude becomes the lowest integer.
template <class Integers>
void plain_from_float(const float * x, std::vector<float> & out) {
    for (size_t i = 0; i < out.size(); i += n_block) {
        const float most =
            *std::max_element(x + i, x + i + n_block, [](float a, float b) { return std::fabs(a) < std::fabs(b); });
        const float scale = most / float(Integers::low);
        for (int j = 0; j < n_block; j++) {
            const float q = scale != 0.0f ? std::floor(x[i + j] / scale + 0.5f) : 0.0f;
            out[i + j]    = mixedkv::half_to_float(mixedkv::float_to_half(scale)) * std::min(q, float(Integers::high));
        }
    }
}

template <class Integers>
struct tests {
    test::packed_rows<n_block, Integers::bytes> rows;

    std::vector<float> stored(const std::vector<float> & x) const { return rows.stored(x); }

    // Of Gaussian rows 0.9 of ggml's error. Rows of another kind lose nothing.
    void less_error_than_ggml() const {
        test::rng r(1);
        for (const float size : { 1e-3f, 1.0f, -1.0f, 3e3f }) {
            for (int kind = 0; kind < 4; kind++) {
                std::vector<float> x = test::gauss(1 << 15, 1.0f);
                for (float & e : x) {
                    e = size * (kind == 0 ? e : kind == 1 ? e * e * e / 30 : kind == 2 ? std::fabs(e) : r.below(5) - 2);
                }
                std::vector<float> plain(x.size());
                plain_from_float<Integers>(x.data(), plain);
                CHECK(test::relative_error(x, stored(x)) <=
                      (kind == 0 ? 0.93 : 1.0) * test::relative_error(x, plain) + 1e-12);
            }
        }
    }

    // Whether they are stored again as before, or as ggml does it
    void stored_rows_stay() const {
        const std::vector<float> x = stored(test::gauss(1 << 13, 1.0f));
        CHECK(stored(x) == x);
        std::vector<float> plain(x.size());
        plain_from_float<Integers>(x.data(), plain);
        CHECK(plain == x);
    }

    void integers_come_back() const {
        for (const float scale : { 0.5f, -0.5f }) {
            std::vector<float> x(n_block);
            for (int i = 0; i < n_block; i++) {
                x[i] = scale * float(Integers::low + i * (n_block - 1) % (Integers::high - Integers::low + 1));
            }
            CHECK(stored(x) == x);
        }
    }

    void rows_that_no_model_has() const {
        const std::vector<float> zeros(2 * n_block);
        CHECK(stored(zeros) == zeros);

        for (const float x : { 65504.0f, -65504.0f, 1e-3f, 1e-30f, 1e-42f }) {
            std::vector<float> one = zeros;
            one[40]                = x;
            for (size_t i = 0; i < one.size(); i++) { // a scale is a half: steps of 6e-8
                CHECK(std::fabs(stored(one)[i] - one[i]) <= 1e-3f * std::fabs(one[i]) + 3e-8f * 16);
            }
        }

        std::vector<float> x = test::gauss(2 * n_block, 1.0f);
        const auto         y = stored(x);
        for (const float odd : { NAN, INFINITY, -INFINITY }) { // the other block as it was; that of infinity has none
            x[5]         = odd;
            const auto z = stored(x);
            CHECK(std::memcmp(&y[n_block], &z[n_block], n_block * sizeof(float)) == 0);
            CHECK(std::isnan(odd) || !std::isfinite(z[5]));
        }
    }

    void run() const {
        less_error_than_ggml();
        stored_rows_stay();
        integers_come_back();
        rows_that_no_model_has();
    }
};

// Wide vectors write what narrow ones do, bit for bit.
void same_bytes(mixedkv::least_error_writers::write_fn write, mixedkv::least_error_writers::write_fn as, int bytes) {
    test::rng r(2);
    for (int kind = 0; kind < 4; kind++) {
        std::vector<float> x = test::gauss(1 << 14, 1.0f);
        for (size_t i = 0; i < x.size(); i++) {
            const float sizes[] = { x[i], std::ldexp(x[i], int(r.below(60)) - 30), float(int(r.below(16)) - 8), 0.0f };
            x[i]                = sizes[kind == 3 ? r.below(4) : kind];
        }
        std::vector<uint8_t> rows[2];
        for (auto & to : rows) {
            to.resize(x.size() / n_block * bytes);
            (&to == rows ? write : as)(x.data(), to.data(), int64_t(x.size()));
        }
        CHECK(rows[0] == rows[1]);
    }
}

void all_have_the_same_bytes() {
#ifdef __x86_64__
    if (mixedkv::cpu_has_avx512()) {
        const auto &wide = *mixedkv::least_error_avx512(), &any = *mixedkv::least_error_any();
        same_bytes(wide.q4_0, any.q4_0, mixedkv::q4_0_integers::bytes);
        same_bytes(wide.q5_0, any.q5_0, mixedkv::q5_0_integers::bytes);
    }
#endif
}

} // namespace

int main() {
    all_have_the_same_bytes();
    using namespace mixedkv;
    tests<q4_0_integers>{ { q4_0_from_float, to_float<q4_0_integers> } }.run();
    tests<q5_0_integers>{ { q5_0_from_float, to_float<q5_0_integers> } }.run();
    return 0;
}
