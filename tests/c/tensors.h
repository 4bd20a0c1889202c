/* tensors.h - shared by tests and counts of the kernels: tensors, and operations that run as in a
 * call from Python. Needs _GNU_SOURCE. */
#ifndef H2O_TENSORS_H
#define H2O_TENSORS_H

#include "half.h"

#include "test.h"

#include <math.h>
#include <pthread.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

/* ---- Tensors ----------------------------------------------------------- */

/* DENSE tensors have no gaps. SPREAD ones have gaps after each dimension, filled with bytes that
 * are no sensible number; elements of the last dimension are `step` apart. */
typedef enum { DENSE, SPREAD } layout;

static inline h2o_view make_layout(layout how, h2o_dtype dtype, int ndim, int64_t a, int64_t b,
                                   int64_t c, int64_t d, int64_t step) {
    h2o_view view = {
        .shape = {a, b, c, d}, .dtype = dtype, .ndim = ndim, .device_type = 1, .name = "tensor"};
    int64_t count = how == SPREAD ? step : 1;
    for (int i = ndim - 1; i >= 0; i--) {
        view.stride[i] = count;
        count = count * view.shape[i] + (how == SPREAD ? 3 : 0);
    }
    const size_t bytes = (size_t)(count * h2o_dtype_size(dtype));
    view.data = test_alloc(bytes);
    if (how == SPREAD) memset(view.data, 0xa5, bytes);
    return view;
}

static inline h2o_view make_tensor(h2o_dtype dtype, int ndim, int64_t a, int64_t b, int64_t c,
                                   int64_t d) {
    return make_layout(DENSE, dtype, ndim, a, b, c, d, 1);
}

static inline size_t tensor_bytes(const h2o_view *view) {
    return (size_t)(view->shape[0] * view->stride[0] * h2o_dtype_size(view->dtype));
}

/* Element [a, b, c] of a tensor of up to three dimensions. */
#define AT(type, view, a, b, c) (*(type *)h2o_at(&(view), a, b, c))

/* Sets all elements of a tensor of up to three dimensions. */
#define FILL(type, view, x)                                                                        \
    do {                                                                                           \
        const int64_t *const n = (view).shape;                                                     \
        for (int64_t i = 0; i < n[0]; i++)                                                         \
            for (int64_t j = 0; j < ((view).ndim > 1 ? n[1] : 1); j++)                             \
                for (int64_t k = 0; k < ((view).ndim > 2 ? n[2] : 1); k++)                         \
                    AT(type, view, i, j, k) = (x);                                                 \
    } while (0)

static inline float load_at(const h2o_view *view, int64_t a, int64_t b, int64_t c, int64_t d) {
    const char *const row = h2o_at(view, a, b, c);
    return load_scalar(row + d * view->stride[3] * h2o_dtype_size(view->dtype), view->dtype);
}

static inline void store_at(const h2o_view *view, int64_t a, int64_t b, int64_t c, int64_t d,
                            float x) {
    char *const row = h2o_at(view, a, b, c);
    store_scalar(row + d * view->stride[3] * h2o_dtype_size(view->dtype), view->dtype, x);
}

static inline h2o_dims make_dims(int64_t B, int64_t G, int64_t R, int64_t Q, int64_t S, int64_t D) {
    return (h2o_dims){.B = B, .H = G * R, .G = G, .R = R, .Q = Q, .S = S, .D = D};
}

/* Fills with keys of uneven importance, or with queries whose direction drifts. */
static inline void fill_tensor(const h2o_view *view, float drift, test_random *random) {
    for (int64_t i = 0; i < view->shape[0] * view->shape[1]; i++) {
        for (int64_t q = 0; q < view->shape[2]; q++) {
            const float weight = random_float(random) * 2.0f;
            for (int64_t d = 0; d < view->shape[3]; d++) {
                const float turning = sinf(drift * (float)q + (float)d);
                store_at(view, i / view->shape[1], i % view->shape[1], q, d,
                         weight * turning + random_float(random) - 0.5f);
            }
        }
    }
}

/* ---- Slots ------------------------------------------------------------- */

/* An empty store with rows of a type; H2O_Q8 and H2O_Q4 are rows of bytes, and keys beside values of
 * H2O_Q4 are H2O_S4. Scores of empty slots are NaN, since they must not be read. */
static inline h2o_slots make_slots(layout how, const h2o_dims *d, h2o_dtype stored, int32_t heavy,
                                   int32_t recent, bool weighted) {
    const h2o_dtype dtype = stored > H2O_U8 ? H2O_U8 : stored;
    const h2o_dtype of_keys = stored == H2O_Q4 ? H2O_S4 : stored;
    const int64_t size = h2o_dtype_size(dtype);
    h2o_slots slots = {
        .keys =
            make_layout(how, dtype, 4, d->B, d->G, d->S, h2o_row_bytes(of_keys, d->D) / size, 1),
        .values =
            make_layout(how, dtype, 4, d->B, d->G, d->S, h2o_row_bytes(stored, d->D) / size, 1),
        .scores = make_layout(how, H2O_F32, 3, d->B, d->G, d->S, 1, 1),
        .positions = make_layout(how, H2O_I32, 3, d->B, d->G, d->S, 1, 1),
        .next_slot = make_layout(how, H2O_I32, 2, d->B, d->G, 1, 1, 2),
        .seen_tokens = make_layout(how, H2O_I64, 1, d->B, 1, 1, 1, 3),
        .budget = make_layout(how, H2O_I32, 2, d->B, 2, 1, 1, 4),
        .evicted_score = make_layout(how, H2O_F64, 2, d->B, d->G, 1, 1, 2),
    };
    if (weighted) slots.norms = make_layout(how, H2O_F32, 3, d->B, d->G, d->S, 1, 1);
    FILL(float, slots.scores, NAN);
    FILL(int32_t, slots.positions, -1);
    FILL(int32_t, slots.next_slot, 0);
    FILL(int64_t, slots.seen_tokens, 0);
    FILL(double, slots.evicted_score, 0.0);
    for (int64_t b = 0; b < d->B; b++) {
        AT(int32_t, slots.budget, b, 0, 0) = heavy;
        AT(int32_t, slots.budget, b, 1, 0) = recent;
    }
    return slots;
}

/* Fills the first slots as if `held` tokens had been seen and all were kept. Rows of bytes get
 * arbitrary content. */
static inline void fill_slots(h2o_slots *slots, int64_t held, test_random *random) {
    if (slots->keys.dtype == H2O_U8) {
        memset(slots->keys.data, 1, tensor_bytes(&slots->keys));
        memset(slots->values.data, 1, tensor_bytes(&slots->values));
    } else {
        fill_tensor(&slots->keys, 0.01f, random);
        fill_tensor(&slots->values, 0.0f, random);
    }
    FILL(int64_t, slots->seen_tokens, held);
    FILL(int32_t, slots->next_slot, (int32_t)held);
    for (int64_t b = 0; b < slots->keys.shape[0]; b++) {
        for (int64_t g = 0; g < slots->keys.shape[1]; g++) {
            for (int64_t s = 0; s < held; s++) {
                AT(int32_t, slots->positions, b, g, s) = (int32_t)s;
                AT(float, slots->scores, b, g, s) = random_float(random);
            }
        }
    }
}

/* ---- Running ----------------------------------------------------------- */

typedef struct {
    h2o_worker_fn function;
    void *context;
    pthread_barrier_t start;
} meeting;

static inline void meet(int worker, int workers, void *context) {
    meeting *const m = context;
    pthread_barrier_wait(&m->start);
    m->function(worker, workers, m->context);
}

/* No worker begins before all have a thread. Otherwise the first thread has often done everything
 * before another one wakes up, and ThreadSanitizer reports only what happens, not what could. */
static inline void run_together(int workers, h2o_worker_fn function, void *context) {
    meeting m = {.function = function, .context = context};
    CHECK(pthread_barrier_init(&m.start, NULL, (unsigned)workers) == 0);
    h2o_parallel(workers, meet, &m);
    pthread_barrier_destroy(&m.start);
}

/* How a kernel is run. */
typedef struct {
    const h2o_ops *ops;
    int workers;
    int64_t workspace_limit; /* as in h2o_exec */
    bool no_subnormals;      /* see run_operation; for one worker, and operands without any */
} runner;

/* Whether this thread has computed with a subnormal number since it last forgot. Intel's processors
 * take a hundred times as long for such an operation. */
static inline bool met_subnormals(void) {
#if defined(__x86_64__)
    return _mm_getcsr() & _MM_EXCEPT_DENORM;
#else
    return false;
#endif
}

static inline void forget_subnormals(void) {
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() & ~(unsigned)_MM_EXCEPT_DENORM);
#endif
}

/* Runs an operation through all stages of a call from Python. The workspace is filled as if it had
 * been used before: with 0.747, or with subnormal numbers, with which the operation must not
 * compute. Its size must not grow with workers that have no task. */
static inline void run_operation(h2o_operation operation, void *params, const runner *with) {
    h2o_error error;
    h2o_call call = {.operation = operation,
                     .table = with->ops,
                     .exec = {.workers = with->workers,
                              .run = run_together,
                              .workspace_limit = with->workspace_limit}};
    if (h2o_open(params, &call, &error) != H2O_OK) {
        fprintf(stderr, "%s\n", error.text);
        exit(1);
    }
    const size_t bytes = with->ops->workspace(operation, params, &call.exec);
    if (bytes > 0) memset(call.exec.workspace, with->no_subnormals ? 0 : 0x3f, bytes);
    for (size_t i = 0; with->no_subnormals && i < bytes; i += 4) {
        ((char *)call.exec.workspace)[i] = 1;
    }
    forget_subnormals();
    CHECK(h2o_run(params, &call, &error) == H2O_OK);
    CHECK(!with->no_subnormals || !met_subnormals());
    const h2o_exec many = {.workers = 1 << 14}, more = {.workers = 1 << 16};
    CHECK(with->ops->workspace(operation, params, &many) ==
          with->ops->workspace(operation, params, &more));
    h2o_close(&call);
}

#endif
