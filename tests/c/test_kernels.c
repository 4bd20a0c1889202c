/* test_kernels.c - a conversation through attend, evict and step, and the same
 * through simulate, at every level, against plain loops in double precision, and
 * with several lanes, which may not change a bit. Under the sanitizers this is
 * what watches the kernels: every tensor is a block of its own, as large as it
 * has to be. */
#define _GNU_SOURCE
#include "cpu/half.h"
#include "h2o.h"
#include "policy.h"

#include "test.h"

#include <math.h>
#include <pthread.h>

/* ---- Tensors ----------------------------------------------------------- */

static int64_t element_size(h2o_dtype dtype) {
    return dtype == H2O_U8 ? 1 : dtype == H2O_I64 || dtype == H2O_F64 ? 8 : dtype_size(dtype);
}

static h2o_view make_tensor(h2o_dtype dtype, int ndim, int64_t a, int64_t b, int64_t c,
                            int64_t d) {
    h2o_view view = {.shape = {a, b, c, d}, .dtype = dtype, .ndim = ndim, .device_type = 1};
    int64_t count = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        view.stride[i] = count;
        count *= view.shape[i];
    }
    view.data = test_alloc((size_t)(count * element_size(dtype)));
    return view;
}

static size_t tensor_bytes(const h2o_view *view) {
    return (size_t)(view->shape[0] * view->stride[0] * element_size(view->dtype));
}

/* The first q columns of a [B,n,Q,D] tensor. */
static h2o_view columns(const h2o_view *view, int64_t begin, int64_t count) {
    h2o_view part = *view;
    part.data = (char *)view->data + begin * view->stride[2] * dtype_size(view->dtype);
    part.shape[2] = count;
    return part;
}

static const char *row_of(const h2o_view *view, int64_t a, int64_t b, int64_t c) {
    const int64_t offset = a * view->stride[0] + b * view->stride[1] + c * view->stride[2];
    return (const char *)view->data + offset * dtype_size(view->dtype);
}

/* ---- A conversation ---------------------------------------------------- */

typedef struct {
    h2o_dims dims; /* Q: of the whole text */
    h2o_dtype dtype;
    int64_t prompt, chunk_at, chunk; /* prompt, steps, a chunk, steps */
    int32_t heavy, recent;
    h2o_policy policy;
    float softcap;
} scene;

typedef struct {
    h2o_view query, keys, values, mask; /* of the whole text */
} text;

typedef struct {
    h2o_view out; /* [B,Q,H,D] */
    h2o_slots slots;
} answer;

static void fill(h2o_view *view, float drift, test_random *random) {
    const int64_t D = view->shape[3], rows = view->shape[0] * view->shape[1];
    char *at = view->data;
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t q = 0; q < view->shape[2]; q++) {
            const float weight = random_float(random) * 2.0f; /* uneven importance of keys */
            for (int64_t d = 0; d < D; d++, at += dtype_size(view->dtype)) {
                const float turning = sinf(drift * (float)q + (float)d);
                store_scalar(at, view->dtype, weight * turning + random_float(random) - 0.5f);
            }
        }
    }
}

static text make_text(const scene *s, test_random *random) {
    const h2o_dims *const d = &s->dims;
    text t = {.query = make_tensor(s->dtype, 4, d->B, d->H, d->Q, d->D),
              .keys = make_tensor(s->dtype, 4, d->B, d->G, d->Q, d->D),
              .values = make_tensor(s->dtype, 4, d->B, d->G, d->Q, d->D),
              .mask = make_tensor(H2O_U8, 2, d->B, d->Q, 1, 1)};
    fill(&t.query, 0.02f, random);
    fill(&t.keys, 0.01f, random);
    fill(&t.values, 0.0f, random);
    for (int64_t i = 0; i < d->B * d->Q; i++) {
        ((uint8_t *)t.mask.data)[i] = i < d->Q || random_int(random, 0, 9) > 0; /* row 0 is whole */
    }
    return t;
}

static void free_text(const text *t) {
    free(t->query.data);
    free(t->keys.data);
    free(t->values.data);
    free(t->mask.data);
}

static answer make_answer(const scene *s) {
    const h2o_dims *const d = &s->dims;
    answer a = {.out = make_tensor(s->dtype, 4, d->B, d->Q, d->H, d->D)};
    h2o_slots *const slots = &a.slots;
    slots->keys = make_tensor(s->dtype, 4, d->B, d->G, d->S, d->D);
    slots->values = make_tensor(s->dtype, 4, d->B, d->G, d->S, d->D);
    slots->scores = make_tensor(H2O_F32, 3, d->B, d->G, d->S, 1);
    slots->positions = make_tensor(H2O_I32, 3, d->B, d->G, d->S, 1);
    slots->free = make_tensor(H2O_I32, 2, d->B, d->G, 1, 1);
    slots->lengths = make_tensor(H2O_I64, 1, d->B, 1, 1, 1);
    slots->budget = make_tensor(H2O_I32, 2, d->B, 2, 1, 1);
    slots->lost = make_tensor(H2O_F64, 2, d->B, d->G, 1, 1);
    if (s->policy.value_weighted) {
        slots->norms = make_tensor(H2O_F32, 3, d->B, d->G, d->S, 1);
    }
    memset(slots->positions.data, 0xff, tensor_bytes(&slots->positions)); /* -1 */
    memset(slots->scores.data, 0xff, tensor_bytes(&slots->scores));       /* NaN: never read */
    for (int64_t b = 0; b < d->B; b++) {
        ((int32_t *)slots->budget.data)[2 * b] = s->heavy;
        ((int32_t *)slots->budget.data)[2 * b + 1] = s->recent;
    }
    return a;
}

/* Calls f with every tensor of an answer. */
static void for_each_tensor(const answer *a, const answer *b,
                            void (*f)(const h2o_view *, const h2o_view *)) {
    f(&a->out, &b->out);
    f(&a->slots.keys, &b->slots.keys);
    f(&a->slots.values, &b->slots.values);
    f(&a->slots.scores, &b->slots.scores);
    f(&a->slots.positions, &b->slots.positions);
    f(&a->slots.free, &b->slots.free);
    f(&a->slots.lengths, &b->slots.lengths);
    f(&a->slots.budget, &b->slots.budget);
    f(&a->slots.lost, &b->slots.lost);
    if (h2o_given(&a->slots.norms)) f(&a->slots.norms, &b->slots.norms);
}

static void check_same(const h2o_view *a, const h2o_view *b) {
    CHECK(memcmp(a->data, b->data, tensor_bytes(a)) == 0);
}

static void free_tensor(const h2o_view *a, const h2o_view *unused) {
    (void)unused;
    free(a->data);
}

/* ---- Through the kernels ----------------------------------------------- */

typedef struct {
    h2o_lane_fn function;
    void *context;
    pthread_barrier_t start;
} meeting;

static void meet(int lane, int lanes, void *context) {
    meeting *const m = context;
    pthread_barrier_wait(&m->start);
    m->function(lane, lanes, m->context);
}

/* No lane begins before all have a thread. Else the first thread has often done
 * everything before another is awake, and ThreadSanitizer judges what happens,
 * not what might. */
static void run_together(int lanes, h2o_lane_fn function, void *context) {
    meeting m = {.function = function, .context = context};
    CHECK(pthread_barrier_init(&m.start, NULL, (unsigned)lanes) == 0);
    h2o_parallel(lanes, meet, &m);
    pthread_barrier_destroy(&m.start);
}

static h2o_exec make_exec(int lanes, size_t bytes) {
    return (h2o_exec){lanes, run_together, h2o_scratch_acquire(bytes)};
}

static void take_chunk(const h2o_ops *ops, const scene *s, const text *t, answer *a, int64_t begin,
                       int64_t count, int lanes) {
    h2o_error error;
    h2o_view mask = t->mask, out = a->out;
    mask.data = (uint8_t *)mask.data + begin;
    mask.shape[1] = count;
    out.data = (char *)out.data + begin * out.stride[1] * dtype_size(out.dtype);
    out.shape[1] = count;
    h2o_dims dims = s->dims;
    dims.Q = count;
    const h2o_view scores = make_tensor(H2O_F32, 3, dims.B, dims.G, count, 1);
    const h2o_attend_params attend = {
        .query = columns(&t->query, begin, count),
        .keys = columns(&t->keys, begin, count),
        .values = columns(&t->values, begin, count),
        .mask = mask,
        .has_slots = begin > 0,
        .slots = a->slots,
        .out = out,
        .scores = scores,
        .scale = 0.1f,
        .decay = s->policy.decay,
        .softcap = s->softcap,
        .dims = dims,
    };
    h2o_exec exec = make_exec(lanes, ops->attend_workspace(&attend, lanes));
    CHECK(ops->attend(&attend, &exec, &error) == H2O_OK);
    h2o_scratch_release(exec.workspace);
    const h2o_evict_params evict = {
        .keys = attend.keys,
        .values = attend.values,
        .scores = scores,
        .mask = mask,
        .slots = a->slots,
        .policy = s->policy,
        .dims = dims,
    };
    exec = make_exec(lanes, ops->evict_workspace(&evict, lanes));
    CHECK(ops->evict(&evict, &exec, &error) == H2O_OK);
    h2o_scratch_release(exec.workspace);
    free(scores.data);
}

static void take_step(const h2o_ops *ops, const scene *s, const text *t, answer *a, int64_t q,
                      int lanes) {
    h2o_error error;
    h2o_step_params step = {
        .query = columns(&t->query, q, 1),
        .key = columns(&t->keys, q, 1),
        .value = columns(&t->values, q, 1),
        .mask = t->mask,
        .slots = a->slots,
        .out = a->out,
        .policy = s->policy,
        .scale = 0.1f,
        .softcap = s->softcap,
        .dims = s->dims,
    };
    step.mask.data = (uint8_t *)step.mask.data + q;
    step.out.data = (char *)step.out.data + q * step.out.stride[1] * dtype_size(s->dtype);
    step.dims.Q = 1;
    const h2o_exec exec = make_exec(lanes, ops->step_workspace(&step, lanes));
    CHECK(ops->step(&step, &exec, &error) == H2O_OK);
    h2o_scratch_release(exec.workspace);
}

static answer converse(const h2o_ops *ops, const scene *s, const text *t, int lanes) {
    answer a = make_answer(s);
    take_chunk(ops, s, t, &a, 0, s->prompt, lanes);
    for (int64_t q = s->prompt; q < s->dims.Q; q++) {
        if (q == s->chunk_at) {
            take_chunk(ops, s, t, &a, q, s->chunk, lanes);
            q += s->chunk - 1;
        } else {
            take_step(ops, s, t, &a, q, lanes);
        }
    }
    return a;
}

/* What simulate says of the text: as positions the rows that evict the keys. */
static answer simulate(const h2o_ops *ops, const scene *s, const text *t, int lanes) {
    h2o_error error;
    answer a = make_answer(s);
    const h2o_view prompt = make_tensor(H2O_I32, 1, s->dims.B, 1, 1, 1);
    for (int64_t i = 0; i < s->dims.B * s->prompt; i++) {
        const int64_t b = i / s->prompt, q = i % s->prompt;
        ((int32_t *)prompt.data)[b] += ((uint8_t *)t->mask.data)[b * s->dims.Q + q];
    }
    h2o_simulate_params params = {
        .query = t->query,
        .keys = t->keys,
        .values = t->values,
        .mask = t->mask,
        .prompt = prompt,
        .budget = a.slots.budget,
        .out = a.out,
        .evicted_at = a.slots.positions,
        .scores = a.slots.scores,
        .policy = s->policy,
        .scale = 0.1f,
        .softcap = s->softcap,
        .dims = s->dims,
    };
    params.dims.S = 0;
    const h2o_exec exec = make_exec(lanes, ops->simulate_workspace(&params, lanes));
    CHECK(ops->simulate(&params, &exec, &error) == H2O_OK);
    h2o_scratch_release(exec.workspace);
    free(prompt.data);
    return a;
}

/* Rows of eviction to positions, as if each token had its slot. */
static void list_survivors(const scene *s, const text *t, const answer *a) {
    const int64_t Q = s->dims.Q;
    for (int64_t unit = 0; unit < s->dims.B * s->dims.G; unit++) {
        const uint8_t *const mask = (const uint8_t *)t->mask.data + unit / s->dims.G * Q;
        int32_t *const rows = (int32_t *)a->slots.positions.data + unit * Q, position = 0;
        for (int64_t q = 0; q < Q; q++) {
            rows[q] = mask[q] && rows[q] == Q ? position : -1;
            position += mask[q];
        }
    }
}

/* ---- Through plain loops ----------------------------------------------- */

typedef struct {
    int64_t count;
    float *scores, *norms;
    int32_t *positions, *columns;
} kept_keys;

static double dot(const char *a, const char *b, h2o_dtype dtype, int64_t D) {
    double sum = 0.0;
    for (int64_t d = 0; d < D; d++) {
        sum += (double)load_scalar(a + d * dtype_size(dtype), dtype) *
               (double)load_scalar(b + d * dtype_size(dtype), dtype);
    }
    return sum;
}

/* What query q of head h gives each kept key, and its output. */
static void attend_plainly(const scene *s, const text *t, int64_t b, int64_t h, int64_t q,
                           const kept_keys *kept, double *weights, double *out) {
    const h2o_dims *const d = &s->dims;
    double most = -INFINITY, total = 0.0;
    for (int64_t i = 0; i < kept->count; i++) {
        const char *const key = row_of(&t->keys, b, h / d->R, kept->columns[i]);
        double logit = 0.1f * dot(row_of(&t->query, b, h, q), key, s->dtype, d->D);
        if (s->softcap > 0.0f) logit = s->softcap * tanh(logit / s->softcap);
        weights[i] = logit;
        most = logit > most ? logit : most;
    }
    for (int64_t i = 0; i < kept->count; i++) total += weights[i] = exp(weights[i] - most);
    memset(out, 0, (size_t)d->D * sizeof *out);
    for (int64_t i = 0; i < kept->count; i++) {
        const char *const value = row_of(&t->values, b, h / d->R, kept->columns[i]);
        weights[i] /= total;
        for (int64_t j = 0; j < d->D; j++) {
            out[j] += weights[i] * (double)load_scalar(value + j * dtype_size(s->dtype), s->dtype);
        }
    }
}

/* Drops what the budget has no room for, after the tokens up to column q. */
static void evict_plainly(const scene *s, int64_t length, kept_keys *kept) {
    const int64_t n = kept->count;
    uint8_t *const keep = test_alloc((size_t)n);
    uint32_t *const keys = test_alloc((size_t)(2 * n) * sizeof *keys);
    const h2o_ranking ranking = h2o_policy_ranking(&s->policy, s->heavy, s->recent, length);
    h2o_policy_select(&ranking, n, kept->scores, kept->positions, kept->norms, keep, keys);
    kept->count = 0;
    for (int64_t i = 0; i < n; i++) {
        if (keep[i]) {
            const int64_t to = kept->count++;
            kept->scores[to] = kept->scores[i];
            kept->norms[to] = kept->norms[i];
            kept->positions[to] = kept->positions[i];
            kept->columns[to] = kept->columns[i];
        }
    }
    free(keep);
    free(keys);
}

static double unit_roundoff(h2o_dtype dtype) {
    return dtype == H2O_F32 ? 0x1p-18 : dtype == H2O_F16 ? 0x1p-10 : 0x1p-7;
}

static void check_output(const scene *s, const answer *a, int64_t b, int64_t q, int64_t h,
                         const double *expected) {
    const h2o_view *const out = &a->out;
    const char *const row = (const char *)out->data + (b * out->stride[0] + q * out->stride[1] +
                                                       h * out->stride[2]) * dtype_size(s->dtype);
    for (int64_t j = 0; j < s->dims.D; j++) {
        const double got = load_scalar(row + j * dtype_size(s->dtype), s->dtype);
        CHECK(fabs(got - expected[j]) <= unit_roundoff(s->dtype) * (1.0 + fabs(expected[j])));
    }
}

/* The kept keys in the slots are those of the plain loops. */
static void check_slots(const scene *s, const answer *a, int64_t b, int64_t g,
                        const kept_keys *kept) {
    const int64_t offset = (b * s->dims.G + g) * s->dims.S;
    const int32_t *const positions = (const int32_t *)a->slots.positions.data + offset;
    const float *const scores = (const float *)a->slots.scores.data + offset;
    int64_t found = 0;
    for (int64_t slot = 0; slot < s->dims.S; slot++) {
        for (int64_t i = 0; positions[slot] >= 0 && i < kept->count; i++) {
            if (kept->positions[i] == positions[slot]) {
                CHECK(fabsf(scores[slot] - kept->scores[i]) <= 2e-5f * (1.0f + kept->scores[i]));
                found++;
            }
        }
    }
    CHECK(found == kept->count);
}

/* One row and key/value head, call by call. */
static void check_unit(const scene *s, const text *t, const answer *a, int64_t b, int64_t g) {
    const h2o_dims *const d = &s->dims;
    const uint8_t *const mask = (const uint8_t *)t->mask.data + b * d->Q;
    const size_t room = (size_t)d->Q;
    kept_keys kept = {0, test_alloc(room * 4), test_alloc(room * 4), test_alloc(room * 4),
                      test_alloc(room * 4)};
    double *const weights = test_alloc(room * sizeof *weights);
    double *const out = test_alloc((size_t)d->D * sizeof *out);
    int64_t length = 0, end;
    for (int64_t begin = 0; begin < d->Q; begin = end) {
        end = begin + (begin == 0 ? s->prompt : begin == s->chunk_at ? s->chunk : 1);
        const int64_t before = length;
        for (int64_t q = begin; q < end; q++) {
            memset(out, 0, (size_t)d->D * sizeof *out);
            if (mask[q]) {
                const int64_t i = kept.count++;
                kept.scores[i] = 0.0f;
                kept.positions[i] = (int32_t)length++;
                kept.columns[i] = (int32_t)q;
                const char *const value = row_of(&t->values, b, g, q);
                kept.norms[i] = (float)sqrt(dot(value, value, s->dtype, d->D));
                for (int64_t j = 0; j <= i; j++) kept.scores[j] *= s->policy.decay;
            }
            for (int64_t h = g * d->R; h < (g + 1) * d->R; h++) {
                if (mask[q]) attend_plainly(s, t, b, h, q, &kept, weights, out);
                for (int64_t i = 0; mask[q] && i < kept.count; i++) {
                    kept.scores[i] += (float)weights[i];
                }
                check_output(s, a, b, q, h, out);
            }
        }
        if (length > before) evict_plainly(s, length, &kept);
    }
    check_slots(s, a, b, g, &kept);
    free(kept.scores);
    free(kept.norms);
    free(kept.positions);
    free(kept.columns);
    free(weights);
    free(out);
}

/* ---- Scenes ------------------------------------------------------------ */

/* Not for ThreadSanitizer: plain loops have no threads, and take minutes. */
static void check_units(const scene *s, const text *t, const answer *a) {
    for (int64_t i = 0; !THREAD_SANITIZER && i < s->dims.B * s->dims.G; i++) {
        check_unit(s, t, a, i / s->dims.G, i % s->dims.G);
    }
}

/* The answer of one lane, which is that of several. */
static answer play(const h2o_ops *ops, const scene *s, const text *t,
                   answer (*through)(const h2o_ops *, const scene *, const text *, int)) {
    static const int lanes[] = {2, 3, 5};
    const answer alone = through(ops, s, t, 1);
    for (size_t i = 0; i < sizeof lanes / sizeof *lanes; i++) {
        const answer shared = through(ops, s, t, lanes[i]);
        for_each_tensor(&alone, &shared, check_same);
        for_each_tensor(&shared, &shared, free_tensor);
    }
    return alone;
}

static void test_scene(const h2o_ops *ops, const scene *s, test_random *random) {
    const text t = make_text(s, random);
    const answer conversation = play(ops, s, &t, converse);
    check_units(s, &t, &conversation);
    for_each_tensor(&conversation, &conversation, free_tensor);

    scene whole = *s; /* without a chunk, and nothing is overwritten */
    whole.chunk_at = -1;
    whole.dims.S = whole.dims.Q;
    const answer simulation = play(ops, &whole, &t, simulate);
    list_survivors(&whole, &t, &simulation);
    check_units(&whole, &t, &simulation);
    for_each_tensor(&simulation, &simulation, free_tensor);
    free_text(&t);
}

static h2o_dims make_dims(int64_t B, int64_t G, int64_t R, int64_t Q, int64_t S, int64_t D) {
    return (h2o_dims){.B = B, .H = G * R, .G = G, .R = R, .Q = Q, .S = S, .D = D};
}

int main(void) {
    static const h2o_ops *const levels[] = {
        &h2o_ops_generic,
#if defined(__x86_64__)
        &h2o_ops_avx2, &h2o_ops_avx512, &h2o_ops_avx512bf16,
#elif defined(__aarch64__)
        &h2o_ops_neon,
#endif
    };
    static const h2o_dtype dtypes[] = {H2O_F32, H2O_F16, H2O_BF16};
    const h2o_policy plain = {.decay = 1.0f};
    const h2o_policy all = {4, H2O_RANK_MEAN, 0.99f, true};
    h2o_error error;
    CHECK(setenv("H2O_THREADS", "3", 1) == 0 && h2o_init(&error) == H2O_OK);
    for (size_t l = 0; l < sizeof levels / sizeof *levels; l++) {
        for (int i = 0; i < 3 && has_level(levels[l]->name); i++) {
            test_random random = {.state = (uint64_t)i + 1};
            /* two chunks of slots, fewer units than lanes like */
            const scene few = {make_dims(2, 1, 3, 780, 700, 64), dtypes[i], 720, 735, 12, 400,
                               180, plain, 0.0f};
            /* enough units for everyone; every parameter; no full vectors at the end */
            const scene many = {make_dims(5, 4, 5, 150, 120, 50), dtypes[i], 100, 120, 7, 60,
                                30, all, 5.0f};
            /* so many candidates that evict takes threads, and time enough for them to meet */
            const scene wide = {make_dims(4, 32, 1, 260, 100, 8), dtypes[i], 170, 175, 80, 60,
                                30, plain, 0.0f};
            test_scene(levels[l], &few, &random);
            test_scene(levels[l], &many, &random);
            test_scene(levels[l], &wide, &random);
        }
    }
    return 0;
}
