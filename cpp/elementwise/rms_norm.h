// Rows that are divided by their root mean square and multiplied with weights, with the bits of ggml's own: the squares
// of a row are added up one after the other, in double precision, so the next sum waits for the one before. Here the
// sums of several rows are made side by side.

#pragma once

#include <math.h>
#include <stdint.h>

enum { RMS_NORM_ROWS = 8 };

struct rms_norm_row {
    const float * x;
    const float * weights;
    float *       y;
};

// So many rows of n elements, at most RMS_NORM_ROWS
static inline void rms_norm_side_by_side(const struct rms_norm_row * rows, int count, int64_t n, float eps) {
    double sums[RMS_NORM_ROWS] = { 0 };
    for (int64_t i = 0; i < n; i++) {
        for (int r = 0; r < count; r++) {
            sums[r] += (double)(rows[r].x[i] * rows[r].x[i]);
        }
    }
    for (int r = 0; r < count; r++) {
        const float   mean  = (float)(sums[r] / (double)n);
        const float   scale = 1.0f / sqrtf(mean + eps);
        const float * x     = rows[r].x;
        const float * w     = rows[r].weights;
        float *       y     = rows[r].y;
        for (int64_t i = 0; i < n; i++) {
            y[i] = x[i] * scale * w[i];
        }
    }
}

// The counts are constants, for which each is compiled.
static inline void rms_norm_rows(const struct rms_norm_row * rows, int n_rows, int64_t n, float eps) {
    if (n_rows == RMS_NORM_ROWS) {
        rms_norm_side_by_side(rows, RMS_NORM_ROWS, n, eps);
        return;
    }
    for (int r = 0; r < n_rows; r++) {
        rms_norm_side_by_side(rows + r, 1, n, eps);
    }
}
