/* plain.h - attention of one key/value head as plain loops in double precision, and how close to
 * them a kernel must be. */
#ifndef H2O_PLAIN_H
#define H2O_PLAIN_H

#include "tensors.h"

/* Queries of the R heads of a group, keys and values, as passed in. */
typedef struct {
    double *query;         /* [R][Q][D] */
    double *keys, *values; /* [N][D] */
} plain_unit;

static inline double *plain_rows(const h2o_view *view, int64_t b, int64_t h) {
    const int64_t rows = view->shape[2], D = view->shape[3];
    double *const x = test_alloc((size_t)(rows * D) * sizeof *x);
    for (int64_t i = 0; i < rows * D; i++) x[i] = (double)load_at(view, b, h, i / D, i % D);
    return x;
}

static inline plain_unit make_plain(const h2o_view *query, const h2o_view *keys,
                                    const h2o_view *values, int64_t b, int64_t g) {
    const int64_t R = query->shape[1] / keys->shape[1], size = query->shape[2] * query->shape[3];
    plain_unit u = {.keys = plain_rows(keys, b, g), .values = plain_rows(values, b, g)};
    u.query = test_alloc((size_t)(R * size) * sizeof(double));
    for (int64_t r = 0; r < R; r++) {
        double *const rows = plain_rows(query, b, g * R + r);
        memcpy(u.query + r * size, rows, (size_t)size * sizeof *rows);
        free(rows);
    }
    return u;
}

static inline void free_plain(const plain_unit *u) {
    free(u->query);
    free(u->keys);
    free(u->values);
}

/* Uses four sums that do not wait for each other. */
static inline double plain_dot(const double *x, const double *y, int64_t n) {
    double sums[4] = {0.0};
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        for (int j = 0; j < 4; j++) sums[j] += x[i + j] * y[i + j];
    }
    for (; i < n; i++) sums[0] += x[i] * y[i];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

static inline double plain_logit(const double *query, const double *key, int64_t D, float scale,
                                 float softcap) {
    const double logit = plain_dot(query, key, D) * (double)scale;
    return softcap > 0.0f ? (double)softcap * tanh(logit / (double)softcap) : logit;
}

/* Turns logits into probabilities, in place, with a sink that gets none; -infinity: no sink. */
static inline void plain_softmax(double *x, int64_t n, double sink) {
    double most = sink, total = 0.0;
    for (int64_t i = 0; i < n; i++) most = x[i] > most ? x[i] : most;
    if (sink > -INFINITY) total = exp(sink - most);
    for (int64_t i = 0; i < n; i++) total += x[i] = exp(x[i] - most);
    for (int64_t i = 0; i < n; i++) x[i] /= total;
}

/* The logarithm of the denominator of that softmax. */
static inline double plain_log_sum(const double *x, int64_t n, double sink) {
    double most = sink, total = 0.0;
    for (int64_t i = 0; i < n; i++) most = x[i] > most ? x[i] : most;
    for (int64_t i = 0; i < n; i++) total += exp(x[i] - most);
    return most + log(total + (sink > -INFINITY ? exp(sink - most) : 0.0));
}

/* Sinks [H] of about the size of logits; every fifth head has none. */
static inline h2o_view make_sinks(int64_t H, test_random *random) {
    const h2o_view sinks = make_layout(SPREAD, H2O_F32, 1, H, 1, 1, 1, 3);
    for (int64_t h = 0; h < H; h++) {
        AT(float, sinks, h, 0, 0) = h % 5 == 4 ? -INFINITY : 2.0f * random_float(random);
    }
    return sinks;
}

/* The sink of a head. */
static inline double plain_sink(const h2o_view *sinks, int64_t h) {
    return h2o_given(sinks) ? (double)*(const float *)h2o_at(sinks, h, 0, 0) : -INFINITY;
}

/* Within a share of 1 plus the expected size; values that are not finite must be equal. */
static inline bool is_near(float got, double expected, double share) {
    if (!isfinite(expected)) {
        return isnan(expected) ? isnan(got) : (double)got == expected;
    }
    return fabs((double)got - expected) <= share * (1.0 + fabs(expected));
}

static inline double unit_roundoff(h2o_dtype dtype) {
    return dtype == H2O_F32 ? 0x1p-18 : dtype == H2O_F16 ? 0x1p-10 : 0x1p-7;
}

/* Checks row [b, q, h] of an output. */
static inline void check_row(const h2o_view *out, int64_t b, int64_t q, int64_t h,
                             const double *expected) {
    for (int64_t d = 0; d < out->shape[3]; d++) {
        CHECK(is_near(load_at(out, b, q, h, d), expected[d], unit_roundoff(out->dtype)));
    }
}

#endif
