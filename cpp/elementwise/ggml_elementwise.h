// What ggml-cpu.c calls to compute a node that is no product. Included there, as weights/ggml_mul_mat.h is.

#pragma once

#include "geglu.h"
#include "rms_norm.h"

// With a name of its own in a profile
#ifdef __GNUC__
#define ELEMENTWISE_NODE static __attribute__((noinline))
#else
#define ELEMENTWISE_NODE static
#endif

#ifdef GEGLU_ROW
// This thread's share of a GEGLU node in F32. False for any other node, which ggml computes.
ELEMENTWISE_NODE bool geglu_compute_forward(const struct ggml_compute_params * params, struct ggml_tensor * dst) {
    const struct ggml_tensor * x = dst->src[0];
    if (dst->op != GGML_OP_GLU || ggml_get_glu_op(dst) != GGML_GLU_OP_GEGLU || x->type != GGML_TYPE_F32) {
        return false;
    }
    const struct ggml_tensor * g = dst->src[1] ? dst->src[1] : x;
    GGML_ASSERT(ggml_is_contiguous_1(x) && ggml_is_contiguous_1(g) && ggml_is_contiguous_1(dst));
    GGML_ASSERT(g->type == x->type && ggml_nrows(dst) == ggml_nrows(x) && ggml_nrows(g) == ggml_nrows(x));

    const int64_t n       = dst->ne[0];
    const bool    swapped = ggml_get_op_params_i32(dst, 1);
    const int64_t x_at    = !dst->src[1] && swapped ? n : 0; // one tensor holds both
    const int64_t g_at    = !dst->src[1] && !swapped ? n : 0;
    const int64_t n_rows  = ggml_nrows(x);
    const int64_t end     = n_rows * (params->ith + 1) / params->nth;
    for (int64_t r = n_rows * params->ith / params->nth; r < end; r++) {
        const float * of_x = (const float *)((const char *)x->data + r * x->nb[1]);
        const float * of_g = (const float *)((const char *)g->data + r * g->nb[1]);
        geglu_row(ggml_table_gelu_f16, n, (float *)((char *)dst->data + r * dst->nb[1]), of_x + x_at, of_g + g_at);
    }
    return true;
}
#else
static inline bool geglu_compute_forward(const struct ggml_compute_params * params, struct ggml_tensor * dst) {
    (void)params, (void)dst;
    return false;
}
#endif

// This thread's share of an RMS norm and of its product with weights, `mul`
ELEMENTWISE_NODE void rms_norm_mul_compute_forward(const struct ggml_compute_params * params,
                                                   const struct ggml_tensor * norm, struct ggml_tensor * mul) {
    const struct ggml_tensor * x       = norm->src[0];
    const struct ggml_tensor * weights = mul->src[mul->src[0] == norm];
    GGML_ASSERT(ggml_are_same_shape(x, mul) && x->nb[0] == sizeof(float));

    float eps;
    memcpy(&eps, norm->op_params, sizeof(eps));
    GGML_ASSERT(eps >= 0.0f);

    struct rms_norm_row rows[RMS_NORM_ROWS];
    int                 n = 0;
    for (int64_t r = params->ith; r < ggml_nrows(x); r += params->nth) {
        const int64_t i1 = r % x->ne[1], i2 = r / x->ne[1] % x->ne[2], i3 = r / x->ne[1] / x->ne[2];
        rows[n].x       = (const float *)((const char *)x->data + i1 * x->nb[1] + i2 * x->nb[2] + i3 * x->nb[3]);
        rows[n].weights = (const float *)((const char *)weights->data + i1 % weights->ne[1] * weights->nb[1] +
                                          i2 % weights->ne[2] * weights->nb[2] + i3 % weights->ne[3] * weights->nb[3]);
        rows[n].y       = (float *)((char *)mul->data + i1 * mul->nb[1] + i2 * mul->nb[2] + i3 * mul->nb[3]);
        if (++n == RMS_NORM_ROWS) {
            rms_norm_rows(rows, n, x->ne[0], eps);
            n = 0;
        }
    }
    rms_norm_rows(rows, n, x->ne[0], eps);
}
