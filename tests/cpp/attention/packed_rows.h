// Rows of this project's own types, as their tests pack them.

#pragma once

#include "support.h"

#include <cmath>
#include <cstdint>
#include <vector>

namespace test {

// Mean squared error of y by the mean square of x
inline double relative_error(const std::vector<float> & x, const std::vector<float> & y) {
    double error = 0.0, size = 0.0;
    for (size_t i = 0; i < x.size(); i++) {
        error += (double(x[i]) - y[i]) * (double(x[i]) - y[i]);
        size += double(x[i]) * x[i];
    }
    return error / size;
}

inline std::vector<float> gauss(int n, float size) {
    rng                r(1);
    std::vector<float> x(n);
    for (float & e : x) {
        e = size * r.gauss();
    }
    return x;
}

// Blocks of n_elements in n_bytes, by the functions that ggml calls
template <int n_elements, int n_bytes>
struct packed_rows {
    void (*from_float)(const float *, void *, int64_t);
    void (*to_float)(const void *, float *, int64_t);

    std::vector<uint8_t> pack(const std::vector<float> & x) const {
        std::vector<uint8_t> row(x.size() / n_elements * n_bytes);
        from_float(x.data(), row.data(), int64_t(x.size()));
        return row;
    }

    std::vector<float> dequantise(const std::vector<uint8_t> & row) const {
        std::vector<float> x(row.size() / n_bytes * n_elements);
        to_float(row.data(), x.data(), int64_t(x.size()));
        return x;
    }

    std::vector<float> stored(const std::vector<float> & x) const { return dequantise(pack(x)); }

    // `dot` as ggml calls it: with the numbers that the packed row holds
    template <class Dot>
    bool dot_is_that_of_the_stored_row(Dot dot) const {
        const auto x = gauss(256, 1.0f), y = gauss(512, 1.0f), z = stored(x);
        double     want = 0.0;
        for (int i = 0; i < 256; i++) {
            want += double(z[i]) * y[256 + i];
        }
        float got = 0.0f;
        dot(256, &got, 0, pack(x).data(), 0, y.data() + 256, 0, 1);
        return std::fabs(got - want) < 1e-4;
    }
};

} // namespace test
