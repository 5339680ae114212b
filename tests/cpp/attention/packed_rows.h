// Rows of this project's own types, as their tests pack them.

#pragma once

#include "support.h"

#include <cstdint>
#include <vector>

namespace test {

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
};

inline std::vector<float> gauss(int n, float size) {
    rng                r(1);
    std::vector<float> x(n);
    for (float & e : x) {
        e = size * r.gauss();
    }
    return x;
}

} // namespace test
