// The product of two panels in F32, for a vector layer L.

#pragma once

#include "kernel.h"

namespace mixedkv {
namespace {

template <class L>
struct product_of {
    using V = typename L::V;

    // c[R, n] = (accumulate ? c : 0) + a[R, k] b[k, n], n a multiple of C vectors
    template <int R, int C, bool accumulate>
    static void product(const float * a, int64_t lda, const float * b, int64_t ldb, float * c, int64_t ldc, int k) {
        V sum[R][C];
        for (int r = 0; r < R; r++) {
            for (int j = 0; j < C; j++) {
                sum[r][j] = accumulate ? L::load(c + r * ldc + j * L::width) : L::zero();
            }
        }
        for (int i = 0; i < k; i++) {
            V column[C];
            for (int j = 0; j < C; j++) {
                column[j] = L::load(b + i * ldb + j * L::width);
            }
            for (int r = 0; r < R; r++) {
                const V x = L::set(a[r * lda + i]);
                for (int j = 0; j < C; j++) {
                    sum[r][j] = L::fma(x, column[j], sum[r][j]);
                }
            }
        }
        for (int r = 0; r < R; r++) {
            for (int j = 0; j < C; j++) {
                L::store(c + r * ldc + j * L::width, sum[r][j]);
            }
        }
    }

    template <int R, bool accumulate>
    static void product_rows(const float * a, int64_t lda, const float * b, int64_t ldb, float * c, int64_t ldc, int k,
                             int n) {
        int j = 0;
        for (; j + L::cols * L::width <= n; j += L::cols * L::width) {
            product<R, L::cols, accumulate>(a, lda, b + j, ldb, c + j, ldc, k);
        }
        for (; j < n; j += L::width) {
            product<R, 1, accumulate>(a, lda, b + j, ldb, c + j, ldc, k);
        }
    }

    template <bool accumulate>
    static void multiply(int rows, const float * a, int64_t lda, const float * b, int64_t ldb, float * c, int64_t ldc,
                         int k, int n) {
        switch (rows) {
        case 1:
            return product_rows<1, accumulate>(a, lda, b, ldb, c, ldc, k, n);
        case 2:
            return product_rows<2, accumulate>(a, lda, b, ldb, c, ldc, k, n);
        case 3:
            return product_rows<3, accumulate>(a, lda, b, ldb, c, ldc, k, n);
        case 4:
            return product_rows<4, accumulate>(a, lda, b, ldb, c, ldc, k, n);
        case 5:
            return product_rows<5, accumulate>(a, lda, b, ldb, c, ldc, k, n);
        default:
            return product_rows<6, accumulate>(a, lda, b, ldb, c, ldc, k, n);
        }
    }
};

} // namespace
} // namespace mixedkv
