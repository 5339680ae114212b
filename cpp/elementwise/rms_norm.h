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

static inline void rms_norm_write(const struct rms_norm_row * row, int64_t n, float eps, double sum) {
    const float   mean  = (float)(sum / (double)n);
    const float   scale = 1.0f / sqrtf(mean + eps);
    const float * x     = row->x;
    const float * w     = row->weights;
    float *       y     = row->y;
    for (int64_t i = 0; i < n; i++) {
        y[i] = x[i] * scale * w[i];
    }
}

// Rows of n elements
static inline void rms_norm_rows(const struct rms_norm_row * rows, int n_rows, int64_t n, float eps) {
    if (n_rows == RMS_NORM_ROWS) {
        double sums[RMS_NORM_ROWS] = { 0 };
        for (int64_t i = 0; i < n; i++) {
            for (int r = 0; r < RMS_NORM_ROWS; r++) {
                sums[r] += (double)(rows[r].x[i] * rows[r].x[i]);
            }
        }
        for (int r = 0; r < RMS_NORM_ROWS; r++) {
            rms_norm_write(&rows[r], n, eps, sums[r]);
        }
        return;
    }
    for (int r = 0; r < n_rows; r++) {
        double sum = 0;
        for (int64_t i = 0; i < n; i++) {
            sum += (double)(rows[r].x[i] * rows[r].x[i]);
        }
        rms_norm_write(&rows[r], n, eps, sum);
    }
}
