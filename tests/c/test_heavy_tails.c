/* test_heavy_tails.c - reduced precision at every level, on inputs on which it fails first:
 * attention sinks, channels of queries, keys or values that are far larger than the others, and
 * such rows. With bfloat16 queries over stored rows of each kind, the error must be at most twice
 * that of the float path, which is the same attention in float32 over the same rows with the output
 * rounded to bfloat16. Neither batch rows nor workers may change a bit. (tests/torch/heavy_tails.py
 * has the same inputs.) */
#define _GNU_SOURCE
#include "quantize.h"

#include "plain.h"

enum { G = 2, CHUNK = 21 };

typedef struct {
    int64_t B, R, n, D;
    h2o_dtype keys, values; /* as stored: H2O_Q8, H2O_S4 or H2O_Q4; H2O_NONE: as given */
    int64_t fresh;          /* tokens of the call: 1 is a decode step, n a prompt */
} shape;

typedef struct {
    h2o_view query;        /* [B, G * R, fresh, D] */
    h2o_view keys, values; /* [B, G, n, D] */
} text;

/* ---- Inputs ------------------------------------------------------------ */

/* Roughly Gaussian: the sum of four uniform numbers, which ends at 3.5. */
static float gaussian(test_random *random) {
    const uint64_t bits = random_bits(random);
    const uint64_t sum =
        (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
    return ((float)sum * 0x1p-16f - 2.0f) * 1.7320508f;
}

/* A loop over the elements of a tensor with four dimensions. */
#define EACH_ELEMENT(view, b, h, q, d)                                                             \
    for (int64_t b = 0; b < (view)->shape[0]; b++)                                                 \
        for (int64_t h = 0; h < (view)->shape[1]; h++)                                             \
            for (int64_t q = 0; q < (view)->shape[2]; q++)                                         \
                for (int64_t d = 0; d < (view)->shape[3]; d++)

/* Gaussian. The queries of a group point in about the same direction, which aim() gives to keys. */
static text gaussian_text(const shape *s, test_random *random) {
    const text t = {make_tensor(H2O_F32, 4, s->B, G * s->R, s->fresh, s->D),
                    make_tensor(H2O_F32, 4, s->B, G, s->n, s->D),
                    make_tensor(H2O_F32, 4, s->B, G, s->n, s->D)};
    const h2o_view way = make_tensor(H2O_F32, 4, s->B, G, 1, s->D);
    EACH_ELEMENT(&way, b, g, q, d) store_at(&way, b, g, q, d, gaussian(random));
    EACH_ELEMENT(&t.query, b, h, q, d) {
        store_at(&t.query, b, h, q, d, load_at(&way, b, h / s->R, 0, d) + 0.3f * gaussian(random));
    }
    EACH_ELEMENT(&t.keys, b, g, q, d) store_at(&t.keys, b, g, q, d, gaussian(random));
    EACH_ELEMENT(&t.values, b, g, q, d) store_at(&t.values, b, g, q, d, gaussian(random));
    free(way.data);
    return t;
}

/* Changes x in a channel to x * factor + more. */
static void change_channel(const h2o_view *view, int64_t channel, float factor, float more) {
    float *const x = view->data;
    for (int64_t i = channel; i < view->shape[0] * view->stride[0]; i += view->shape[3]) {
        x[i] = x[i] * factor + more;
    }
}

/* Scales every `step`-th row from `first` on. */
static void scale_rows(const h2o_view *view, int64_t first, int64_t step, float factor) {
    for (int64_t i = 0; i < view->shape[0] * view->shape[1]; i++) {
        for (int64_t q = first; q < view->shape[2]; q += step) {
            float *const row = h2o_at(view, i / view->shape[1], i % view->shape[1], q);
            for (int64_t d = 0; d < view->shape[3]; d++) row[d] *= factor;
        }
    }
}

/* Replaces every `step`-th key from `first` on: each query gets about this logit for it. */
static void aim(const text *t, int64_t first, int64_t step, float logit) {
    const int64_t R = t->query.shape[1] / G, rows = R * t->query.shape[2], D = t->keys.shape[3];
    float *const way = test_alloc((size_t)D * sizeof *way);
    for (int64_t i = 0; i < t->keys.shape[0] * G; i++) {
        const float *const query = h2o_at(&t->query, i / G, i % G * R, 0);
        float square = 0.0f;
        for (int64_t d = 0; d < D; d++) {
            way[d] = 0.0f;
            for (int64_t j = 0; j < rows; j++) way[d] += query[j * D + d] / (float)rows;
            square += way[d] * way[d];
        }
        for (int64_t q = first; q < t->keys.shape[2]; q += step) {
            float *const key = h2o_at(&t->keys, i / G, i % G, q);
            for (int64_t d = 0; d < D; d++) key[d] = way[d] / square * logit * sqrtf((float)D);
        }
    }
    free(way);
}

enum { ONCE = 1 << 20 }; /* a step beyond all rows */

static void plain(const text *t) { (void)t; }

static void sink(const text *t) {
    aim(t, 0, ONCE, 12.0f);
    scale_rows(&t->values, 0, ONCE, 0.0003f);
}

static void unseen(const text *t) {
    sink(t);
    aim(t, 5, ONCE, -20.0f);
    scale_rows(&t->values, 5, ONCE, 3000.0f);
}

static void query_channels(const text *t) {
    change_channel(&t->query, 3, 0.0f, 300.0f);
    change_channel(&t->query, 40, 100.0f, 0.0f);
    change_channel(&t->keys, 3, 0.02f, 0.0f);
    change_channel(&t->keys, 40, 0.02f, 0.0f);
}

static void key_channels(const text *t) {
    change_channel(&t->keys, 3, 1.0f, 40.0f);
    change_channel(&t->keys, 40, 1.0f, -25.0f);
}

static void both_channels(const text *t) {
    key_channels(t);
    change_channel(&t->query, 3, 1.0f, 30.0f);
}

static void value_channels(const text *t) {
    change_channel(&t->values, 3, 30.0f, 0.0f);
    change_channel(&t->values, 40, 1.0f, 100.0f);
}

static void value_rows(const text *t) {
    aim(t, 5, 17, -8.0f);
    scale_rows(&t->values, 5, 17, 300.0f);
    scale_rows(&t->values, 3, 11, 0.001f);
}

/* One element of some values. */
static void value_elements(const text *t) {
    float *const x = t->values.data;
    for (int64_t i = 0; i < t->values.shape[0] * t->values.shape[1]; i++) {
        for (int64_t q = 5; q < t->values.shape[2]; q += 17) {
            x[(i * t->values.shape[2] + q) * t->values.shape[3] + 7] = 20000.0f;
        }
    }
}

static void key_rows(const text *t) { aim(t, 5, 17, -60.0f); }

static void everything(const text *t) {
    key_channels(t);
    value_rows(t);
    value_channels(t);
    sink(t);
}

/* The tensor rounded to bfloat16; frees the original. */
static h2o_view rounded(h2o_view x) {
    const h2o_view to = make_tensor(H2O_BF16, 4, x.shape[0], x.shape[1], x.shape[2], x.shape[3]);
    EACH_ELEMENT(&x, b, h, q, d) store_at(&to, b, h, q, d, load_at(&x, b, h, q, d));
    free(x.data);
    return to;
}

/* ---- Through the kernels ----------------------------------------------- */

typedef struct {
    h2o_slots slots;
    h2o_view out; /* [B, fresh, G * R, D] */
} answer;

static h2o_view tokens(const h2o_view *view, int64_t begin, int64_t end) {
    h2o_view part = *view;
    part.data = (char *)view->data + begin * view->stride[2] * h2o_dtype_size(view->dtype);
    part.shape[2] = end - begin;
    return part;
}

static h2o_view row_alone(h2o_view view, int64_t b) {
    view.data = (char *)view.data + b * view.stride[0] * h2o_dtype_size(view.dtype);
    view.shape[0] = 1;
    return view;
}

static void hold(const runner *with, const shape *s, const text *t, h2o_slots *slots) {
    const int64_t held = s->n - s->fresh;
    h2o_evict_params evict = {
        .keys = tokens(&t->keys, 0, held),
        .values = tokens(&t->values, 0, held),
        .scores = make_tensor(H2O_F32, 3, t->keys.shape[0], G, held, 1),
        .slots = *slots,
        .policy = {.decay = 1.0f},
    };
    run_operation(H2O_EVICT, &evict, with);
    free(evict.scores.data);
}

/* Runs the call; the slots hold all tokens except those of the call. */
static answer run(const runner *with, const shape *s, const text *t) {
    const int64_t B = t->keys.shape[0], held = s->n - s->fresh;
    const h2o_dims d = make_dims(B, G, s->R, s->fresh, s->n, s->D);
    answer a = {.out = make_tensor(H2O_BF16, 4, B, s->fresh, d.H, s->D)};
    const h2o_dtype stored = s->keys == H2O_NONE ? H2O_BF16 : s->keys;
    a.slots = make_slots(DENSE, &d, stored, (int32_t)s->n, 0, false);
    if (s->values != s->keys) {
        free(a.slots.values.data);
        a.slots.values = make_tensor(H2O_U8, 4, B, G, s->n, h2o_row_bytes(s->values, s->D));
    }
    if (held > 0) hold(with, s, t, &a.slots);
    const h2o_view keys = tokens(&t->keys, held, s->n), values = tokens(&t->values, held, s->n);
    const float scale = 1.0f / sqrtf((float)s->D);
    if (s->fresh == 1) {
        h2o_step_params step = {.query = t->query,
                                .key = keys,
                                .value = values,
                                .slots = a.slots,
                                .out = a.out,
                                .policy = {.decay = 1.0f},
                                .scale = scale};
        run_operation(H2O_STEP, &step, with);
    } else {
        h2o_attend_params attend = {.query = t->query,
                                    .keys = keys,
                                    .values = values,
                                    .has_slots = held > 0,
                                    .slots = a.slots,
                                    .out = a.out,
                                    .scores = make_tensor(H2O_F32, 3, B, G, s->fresh, 1),
                                    .policy = {.decay = 1.0f},
                                    .scale = scale};
        run_operation(H2O_ATTEND, &attend, with);
        free(attend.scores.data);
    }
    return a;
}

static void free_answer(const answer *a) {
    const h2o_view *const views[] = {
        &a->slots.keys,      &a->slots.values,        &a->slots.scores,
        &a->slots.positions, &a->slots.next_slot,     &a->slots.seen_tokens,
        &a->slots.budget,    &a->slots.evicted_score, &a->out};
    for (size_t i = 0; i < sizeof views / sizeof *views; i++) free(views[i]->data);
}

/* ---- Errors ------------------------------------------------------------ */

static double element(const char *row, h2o_dtype stored, int64_t d, int64_t D) {
    if (stored == H2O_Q8) return (double)load_scalar(row + D, H2O_F16) * (int8_t)row[d];
    if (stored == H2O_S4) return (double)load_scalar(row + D / 2, H2O_F16) * s4_byte(row, d);
    const int byte = (uint8_t)row[q4_elements(d) + d % (H2O_GROUP / 2)];
    const char *const at = row + q4_scale(d, D);
    return (double)load_scalar(at + 2, H2O_F16) +
           (double)load_scalar(at, H2O_F16) *
               (d % H2O_GROUP < H2O_GROUP / 2 ? byte & 15 : byte >> 4);
}

/* [n, D]: the rows of the text, with those that were held as the slots store them. */
static double *seen(const shape *s, const h2o_view *given, const h2o_view *slots, h2o_dtype stored,
                    int64_t b, int64_t g) {
    const int64_t held = s->fresh == 1 ? s->n : s->n - s->fresh;
    double *const rows = plain_rows(given, b, g);
    for (int64_t i = 0; stored != H2O_NONE && i < held * s->D; i++) {
        rows[i] = element(h2o_at(slots, b, g, i / s->D), stored, i % s->D, s->D);
    }
    return rows;
}

/* Attention of one query over n keys, each number rounded to float32 if `narrow`. */
static void attend_to(const double *query, const double *keys, const double *values, int64_t n,
                      int64_t D, bool narrow, double *weights, double *out) {
#define ROUNDED(x) (narrow ? (double)(float)(x) : (x))
    double most = -INFINITY, total = 0.0;
    for (int64_t i = 0; i < n; i++) {
        double sum = 0.0;
        for (int64_t d = 0; d < D; d++) sum = ROUNDED(sum + ROUNDED(query[d] * keys[i * D + d]));
        weights[i] = ROUNDED(sum / sqrt((double)D));
        most = fmax(weights[i], most);
    }
    for (int64_t i = 0; i < n; i++) {
        weights[i] = ROUNDED(exp(ROUNDED(weights[i] - most)));
        total = ROUNDED(total + weights[i]);
    }
    memset(out, 0, (size_t)D * sizeof *out);
    for (int64_t i = 0; i < n; i++) {
        weights[i] = ROUNDED(weights[i] / total);
        for (int64_t d = 0; d < D; d++) {
            out[d] = ROUNDED(out[d] + ROUNDED(weights[i] * values[i * D + d]));
        }
    }
#undef ROUNDED
}

static double as_bf16(double x) {
    uint16_t half;
    store_scalar((char *)&half, H2O_BF16, (float)x);
    return (double)load_scalar((char *)&half, H2O_BF16);
}

/* Rows, one for each query: exact, from the kernels, and from the float path. */
typedef struct {
    int64_t count, width;
    double *exact, *kernel, *floats;
} rows;

static rows make_rows(int64_t count, int64_t width) {
    const size_t bytes = (size_t)(count * width) * sizeof(double);
    return (rows){count, width, test_alloc(bytes), test_alloc(bytes), test_alloc(bytes)};
}

static void free_rows(const rows *r) { free(r->exact), free(r->kernel), free(r->floats); }

/* The root of the mean squared relative error of rows. With `channels`, each channel is measured by
 * its own size, so that an outlier channel hides nothing. */
static double error_of(const rows *r, const double *x, bool channels) {
    double total = 0.0, *const unit = test_alloc((size_t)r->width * sizeof *unit);
    for (int64_t d = 0; d < r->width; d++) {
        for (int64_t i = 0; i < r->count; i++) {
            const double exact = r->exact[i * r->width + d];
            unit[d] += channels ? exact * exact / (double)r->count : 1.0 / (double)r->count;
        }
    }
    for (int64_t i = 0; i < r->count; i++) {
        double apart = 0.0, size = 0.0;
        for (int64_t d = i * r->width; d < (i + 1) * r->width; d++) {
            apart += (x[d] - r->exact[d]) * (x[d] - r->exact[d]) / unit[d % r->width];
            size += r->exact[d] * r->exact[d] / unit[d % r->width];
        }
        total += apart / size / (double)r->count;
    }
    free(unit);
    return sqrt(total);
}

static void judge(const char *what, const char *kind, const char *level, const shape *s,
                  const rows *r, bool channels) {
    const double kernel = error_of(r, r->kernel, channels),
                 floats = error_of(r, r->floats, channels);
    if (!(kernel <= 2.0 * floats)) {
        fprintf(stderr, "%s, %s of %s: D %d, R %d, %d of %d tokens, %s %s: %g, floats %g\n", level,
                what, kind, (int)s->D, (int)s->R, (int)s->fresh, (int)s->n, h2o_dtype_name(s->keys),
                h2o_dtype_name(s->values), kernel, floats);
        exit(1);
    }
}

/* Computes the exact answer and the float path's: outputs of all queries, scores of a step. */
static void fill_rows(const shape *s, const text *t, const answer *a, rows *out, rows *scores) {
    double *const weights = test_alloc((size_t)s->n * sizeof *weights);
    for (int64_t i = 0; i < s->B * G; i++) {
        const int64_t b = i / G, g = i % G;
        double *const keys = seen(s, &t->keys, &a->slots.keys, s->keys, b, g);
        double *const values = seen(s, &t->values, &a->slots.values, s->values, b, g);
        for (int64_t j = 0; j < s->R * s->fresh; j++) {
            const int64_t h = g * s->R + j / s->fresh, q = j % s->fresh,
                          n = s->n - s->fresh + q + 1, at = (i * s->R * s->fresh + j) * s->D;
            const h2o_view token = tokens(&t->query, q, q + 1);
            double *const query = plain_rows(&token, b, h);
            for (int narrow = 0; narrow < 2; narrow++) {
                double *const to = narrow ? scores->floats : scores->exact;
                attend_to(query, keys, values, n, s->D, narrow, weights,
                          (narrow ? out->floats : out->exact) + at);
                for (int64_t k = 0; s->fresh == 1 && k < n; k++) {
                    to[i * s->n + k] += narrow ? as_bf16(weights[k]) : weights[k];
                }
            }
            for (int64_t d = 0; d < s->D; d++) {
                out->floats[at + d] = as_bf16(out->floats[at + d]);
                out->kernel[at + d] = (double)load_at(&a->out, b, q, h, d);
            }
            free(query);
        }
        for (int64_t k = 0; s->fresh == 1 && k < s->n; k++) {
            scores->kernel[i * s->n + k] = (double)AT(float, a->slots.scores, b, g, k);
        }
        free(keys), free(values);
    }
    free(weights);
}

/* Checks that neither the number of workers nor other batch rows change the answer. */
static void check_same(const h2o_ops *ops, const shape *s, const text *t, const answer *a) {
    const runner several = {ops, 5, 0, false}, one = {ops, 1, 0, false};
    const answer other = run(&several, s, t);
    const text last = {row_alone(t->query, s->B - 1), row_alone(t->keys, s->B - 1),
                       row_alone(t->values, s->B - 1)};
    const answer alone = run(&one, s, &last);
    const size_t row = tensor_bytes(&alone.out), scores = tensor_bytes(&alone.slots.scores);
    CHECK(memcmp(other.out.data, a->out.data, tensor_bytes(&a->out)) == 0);
    CHECK(memcmp(other.slots.scores.data, a->slots.scores.data, tensor_bytes(&a->slots.scores)) ==
          0);
    CHECK(memcmp(alone.out.data, (char *)a->out.data + (size_t)(s->B - 1) * row, row) == 0);
    CHECK(memcmp(alone.slots.scores.data,
                 (char *)a->slots.scores.data + (size_t)(s->B - 1) * scores, scores) == 0);
    free_answer(&other);
    free_answer(&alone);
}

#if defined(H2O_LEVEL_AMX)
/* Checks that a matrix unit computes the same sums of integers. */
static void check_as_by_vectors(const h2o_ops *ops, const shape *s, const text *t,
                                const answer *a) {
    const bool by_unit = strncmp(ops->name, "avx512amx", 9) == 0;
    if (!by_unit || s->fresh > 1 || s->keys == H2O_NONE || s->values == H2O_NONE) return;
    const runner by_vectors = {&h2o_ops_avx512bf16, 1, 0, false};
    const answer other = run(&by_vectors, s, t);
    CHECK(memcmp(other.out.data, a->out.data, tensor_bytes(&a->out)) == 0);
    CHECK(memcmp(other.slots.scores.data, a->slots.scores.data, tensor_bytes(&a->slots.scores)) ==
          0);
    free_answer(&other);
}
#else
static void check_as_by_vectors(const h2o_ops *ops, const shape *s, const text *t,
                                const answer *a) {
    (void)ops, (void)s, (void)t, (void)a;
}
#endif

static void judge_answer(const h2o_ops *ops, const shape *s, const char *kind, const text *t,
                         const answer *a) {
    rows out = make_rows(s->B * G * s->R * s->fresh, s->D), scores = make_rows(s->B * G, s->n);
    fill_rows(s, t, a, &out, &scores);
    judge("output", kind, ops->name, s, &out, true);
    if (s->fresh == 1) judge("scores", kind, ops->name, s, &scores, false);
    free_rows(&out);
    free_rows(&scores);
}

static void test_shape(const h2o_ops *ops, const shape *s, const char *kind,
                       void (*change)(const text *)) {
    test_random random = {.state = (uint64_t)(s->D + s->R)};
    text t = gaussian_text(s, &random);
    change(&t);
    t = (text){rounded(t.query), rounded(t.keys), rounded(t.values)};
    const runner one = {ops, 1, 0, change == plain};
    const answer a = run(&one, s, &t);
    check_same(ops, s, &t, &a);
    check_as_by_vectors(ops, s, &t, &a);
    if (JUDGED) judge_answer(ops, s, kind, &t, &a);
    free_answer(&a);
    free(t.query.data), free(t.keys.data), free(t.values.data);
}

int main(void) {
    static const struct {
        const char *name;
        void (*change)(const text *);
    } kinds[] = {{"plain", plain},
                 {"sink", sink},
                 {"unseen", unseen},
                 {"query channels", query_channels},
                 {"key channels", key_channels},
                 {"both channels", both_channels},
                 {"value channels", value_channels},
                 {"value rows", value_rows},
                 {"value elements", value_elements},
                 {"key rows", key_rows},
                 {"everything", everything}};
    /* steps with each number of heads of a pass over rows, and with two passes; chunks; a prompt */
    static const shape shapes[] = {
        {6, 1, 150, 64, H2O_Q8, H2O_Q8, 1},      {6, 2, 150, 128, H2O_Q8, H2O_Q4, 1},
        {2, 3, 520, 192, H2O_Q8, H2O_Q8, 1},     {6, 4, 150, 128, H2O_Q8, H2O_Q4, 1},
        {6, 4, 150, 64, H2O_Q8, H2O_Q8, 1},      {2, 5, 300, 512, H2O_Q8, H2O_Q4, 1},
        {6, 4, 150, 128, H2O_NONE, H2O_NONE, 1}, {6, 1, 150, 64, H2O_NONE, H2O_NONE, 1},
        {2, 9, 300, 96, H2O_NONE, H2O_NONE, 1},  {2, 2, 150, 64, H2O_Q8, H2O_Q4, CHUNK},
        {1, 2, 80, 64, H2O_NONE, H2O_NONE, 80},  {6, 3, 150, 128, H2O_S4, H2O_Q4, 1},
        {2, 33, 150, 64, H2O_S4, H2O_Q4, 1},     {2, 2, 150, 96, H2O_S4, H2O_Q4, CHUNK},
    };
    h2o_error error;
    CHECK(setenv("H2O_THREADS", "3", 1) == 0 && h2o_init(&error) == H2O_OK);
    for (size_t l = 0; l < LEVELS; l++) {
        for (size_t i = 0; has_level(levels[l]->name) && i < sizeof shapes / sizeof *shapes; i++) {
            for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
                if (JUDGED ? is_slow() && (k + i) % 2 : k != i) continue;
                test_shape(levels[l], &shapes[i], kinds[k].name, kinds[k].change);
            }
        }
    }
    return 0;
}
