/* test_attend.c - single calls of attend, at every level, on shapes that reach each way of dividing
 * the work: several waves of heads with a last one that is not full, heads of both kinds in one
 * call, panels, long stores, few rows. Results are compared with plain loops, and several workers
 * must produce the same bits. */
#define _GNU_SOURCE
#include "plain.h"

typedef struct {
    int64_t B, G, R, stored, Q, D;
    h2o_dtype dtype;
    bool masked; /* each row has its own padding; the last row is almost all padding */
    float decay, softcap, scale;
    int64_t workspace_limit; /* as in h2o_exec */
    bool sinks;              /* heads have learned sinks */
} shape;

/* Filled slots with holes between them. */
static h2o_slots make_store(const shape *s, const h2o_dims *d, test_random *random) {
    h2o_slots slots = make_slots(SPREAD, d, s->dtype, 1, 1, false);
    fill_tensor(&slots.keys, 0.01f, random);
    fill_tensor(&slots.values, 0.0f, random);
    for (int64_t b = 0; b < d->B; b++) {
        for (int64_t g = 0; g < d->G; g++) {
            for (int64_t i = 0; i < s->stored; i++) {
                const int64_t slot = i + i / 50 + g; /* of every 51 slots one is empty */
                AT(int32_t, slots.positions, b, g, slot) = (int32_t)i;
                AT(float, slots.scores, b, g, slot) = random_float(random);
            }
        }
    }
    return slots;
}

static h2o_attend_params make_call(const shape *s, test_random *random) {
    const h2o_dims d = make_dims(s->B, s->G, s->R, s->Q, s->stored + s->stored / 50 + s->G, s->D);
    h2o_attend_params p = {
        .query = make_layout(SPREAD, s->dtype, 4, d.B, d.H, d.Q, d.D, 1),
        .keys = make_layout(SPREAD, s->dtype, 4, d.B, d.G, d.Q, d.D, 1),
        .values = make_layout(SPREAD, s->dtype, 4, d.B, d.G, d.Q, d.D, 1),
        .out = make_layout(SPREAD, s->dtype, 4, d.B, d.Q, d.H, d.D, 1),
        .scores = make_layout(SPREAD, H2O_F32, 3, d.B, d.G, d.Q, 1, 2),
        .has_slots = s->stored > 0,
        .scale = s->scale,
        .policy = {.decay = s->decay},
        .softcap = s->softcap,
    };
    fill_tensor(&p.query, 0.02f, random);
    fill_tensor(&p.keys, 0.01f, random);
    fill_tensor(&p.values, 0.0f, random);
    if (s->sinks) p.sink_logits = make_sinks(d.H, random);
    if (s->stored > 0) p.slots = make_store(s, &d, random);
    if (s->masked) {
        p.mask = make_layout(SPREAD, H2O_U8, 2, d.B, d.Q, 1, 1, 2);
        FILL(uint8_t, p.mask, i == d.B - 1 ? j >= d.Q - 5 : random_int(random, 0, 9) > 0);
    }
    return p;
}

static void copy_scores(const h2o_attend_params *p, h2o_view *to) {
    *to = p->slots.scores;
    to->data = test_alloc(tensor_bytes(to));
    memcpy(to->data, p->slots.scores.data, tensor_bytes(to));
}

static void free_call(const h2o_attend_params *p) {
    const h2o_view *const views[] = {&p->query,           &p->keys,
                                     &p->values,          &p->out,
                                     &p->scores,          &p->mask,
                                     &p->slots.keys,      &p->slots.values,
                                     &p->slots.scores,    &p->slots.positions,
                                     &p->slots.next_slot, &p->slots.seen_tokens,
                                     &p->slots.budget,    &p->slots.evicted_score,
                                     &p->sink_logits};
    for (size_t i = 0; i < sizeof views / sizeof *views; i++) free(views[i]->data);
}

/* The keys that the last query of a head sees: stored keys, then new tokens. */
typedef struct {
    int64_t stored, fresh;
    int64_t *slots, *columns;
    double *scores;
} visible;

static visible list_visible(const h2o_attend_params *p, const h2o_view *scores, int64_t b,
                            int64_t g) {
    const int64_t S = p->has_slots ? p->slots.keys.shape[2] : 0, Q = p->keys.shape[2];
    visible v = {.slots = test_alloc((size_t)S * 8),
                 .columns = test_alloc((size_t)Q * 8),
                 .scores = test_alloc((size_t)(S + Q) * 8)};
    for (int64_t s = 0; s < S; s++) {
        if (AT(int32_t, p->slots.positions, b, g, s) >= 0) {
            v.scores[v.stored] = (double)AT(float, *scores, b, g, s);
            v.slots[v.stored++] = s;
        }
    }
    for (int64_t q = 0; q < Q; q++) {
        if (!h2o_given(&p->mask) || AT(uint8_t, p->mask, b, q, 0)) v.columns[v.fresh++] = q;
    }
    return v;
}

/* log_sums: from another call with the same operands. */
static void check_head(const shape *s, const h2o_attend_params *p, const h2o_view *scores,
                       const h2o_view *log_sums, int64_t b, int64_t g) {
    const plain_unit u = make_plain(&p->query, &p->keys, &p->values, b, g);
    const visible v = list_visible(p, scores, b, g);
    double *const keys = p->has_slots ? plain_rows(&p->slots.keys, b, g) : NULL;
    double *const values = p->has_slots ? plain_rows(&p->slots.values, b, g) : NULL;
    double *const weights = test_alloc((size_t)(v.stored + v.fresh) * sizeof *weights);
    double *const out = test_alloc((size_t)s->D * sizeof *out);
    for (int64_t i = 0, q = 0; q < s->Q; q++) {
        const bool real = i < v.fresh && v.columns[i] == q;
        const int64_t n = v.stored + i + 1;
        for (int64_t j = 0; real && j < n; j++) v.scores[j] *= (double)s->decay;
        for (int64_t r = 0; r < s->R; r++) {
            memset(out, 0, (size_t)s->D * sizeof *out);
            for (int64_t j = 0; real && j < n; j++) {
                const double *const key = j < v.stored ? keys + v.slots[j] * s->D
                                                       : u.keys + v.columns[j - v.stored] * s->D;
                weights[j] =
                    plain_logit(u.query + (r * s->Q + q) * s->D, key, s->D, s->scale, s->softcap);
            }
            const double sink = plain_sink(&p->sink_logits, g * s->R + r);
            const double log_sum = real ? plain_log_sum(weights, n, sink) : 0.0;
            CHECK(is_near(AT(float, *log_sums, b, g * s->R + r, q), log_sum, 1e-5));
            if (real) plain_softmax(weights, n, sink);
            for (int64_t j = 0; real && j < n; j++) {
                const double *const value = j < v.stored
                                                ? values + v.slots[j] * s->D
                                                : u.values + v.columns[j - v.stored] * s->D;
                for (int64_t d = 0; d < s->D; d++) out[d] += weights[j] * value[d];
                v.scores[j] += weights[j];
            }
            check_row(&p->out, b, q, g * s->R + r, out);
        }
        if (!real) CHECK(AT(float, p->scores, b, g, q) == 0.0f);
        i += real;
    }
    for (int64_t j = 0; j < v.stored; j++) {
        CHECK(is_near(AT(float, p->slots.scores, b, g, v.slots[j]), v.scores[j], 1e-5));
    }
    for (int64_t j = 0; j < v.fresh; j++) {
        CHECK(is_near(AT(float, p->scores, b, g, v.columns[j]), v.scores[v.stored + j], 1e-5));
    }
    free(keys), free(values), free(weights), free(out);
    free(v.slots), free(v.columns), free(v.scores);
    free_plain(&u);
}

/* Checks that several workers give the same answer as one. */
static void check_workers(const h2o_ops *ops, const shape *s, h2o_attend_params p,
                          const h2o_view *scores, int workers) {
    h2o_attend_params other = p;
    const runner with = {ops, workers, s->workspace_limit, false};
    other.out.data = test_alloc(tensor_bytes(&p.out));
    other.scores.data = test_alloc(tensor_bytes(&p.scores));
    memset(other.out.data, 0xa5, tensor_bytes(&p.out));
    memset(other.scores.data, 0xa5, tensor_bytes(&p.scores));
    if (p.has_slots)
        copy_scores(&(h2o_attend_params){.slots = {.scores = *scores}}, &other.slots.scores);
    run_operation(H2O_ATTEND, &other, &with);
    CHECK(memcmp(other.out.data, p.out.data, tensor_bytes(&p.out)) == 0);
    CHECK(memcmp(other.scores.data, p.scores.data, tensor_bytes(&p.scores)) == 0);
    if (p.has_slots) {
        const size_t bytes = tensor_bytes(&p.slots.scores);
        CHECK(memcmp(other.slots.scores.data, p.slots.scores.data, bytes) == 0);
        free(other.slots.scores.data);
    }
    free(other.out.data);
    free(other.scores.data);
}

/* Log sums [B,H,Q], computed by `workers` workers. Checks that out is not written. */
static h2o_view log_sums_of(const h2o_ops *ops, const shape *s, h2o_attend_params p, int workers) {
    const runner with = {ops, workers, s->workspace_limit, false};
    p.log_sums = make_layout(SPREAD, H2O_F32, 3, s->B, s->G * s->R, s->Q, 1, 1);
    p.out.data = test_alloc(tensor_bytes(&p.out));
    p.scores.data = test_alloc(tensor_bytes(&p.scores));
    memset(p.out.data, 0xa5, tensor_bytes(&p.out));
    run_operation(H2O_ATTEND, &p, &with);
    for (size_t i = 0; i < tensor_bytes(&p.out); i++) {
        CHECK(((const unsigned char *)p.out.data)[i] == 0xa5);
    }
    free(p.out.data), free(p.scores.data);
    return p.log_sums;
}

/* Checks that a shape meant for several waves has them: a wave needs less memory than all heads. */
static void check_waves(const h2o_ops *ops, const shape *s, const h2o_attend_params *p) {
    const h2o_exec waves = {.workers = 1, .workspace_limit = s->workspace_limit},
                   once = {.workers = 1};
    CHECK(s->workspace_limit == 0 ||
          ops->workspace(H2O_ATTEND, p, &waves) < ops->workspace(H2O_ATTEND, p, &once));
}

static void test_shape(const h2o_ops *ops, const shape *s) {
    test_random random = {.state = 7};
    const h2o_attend_params p = make_call(s, &random);
    h2o_attend_params checked = p; /* a call changes strides that mean nothing */
    h2o_view scores = {0};
    const bool is_normal = s->dtype == H2O_F32 && s->decay == 1.0f;
    const runner one = {ops, 1, s->workspace_limit, is_normal};
    if (p.has_slots) copy_scores(&p, &scores);
    run_operation(H2O_ATTEND, &checked, &one);
    h2o_view log_sums = log_sums_of(ops, s, p, 1), by_more = log_sums_of(ops, s, p, 7);
    for (int64_t i = 0; i < s->B * s->G; i++) {
        if (is_judged(i)) check_head(s, &p, &scores, &log_sums, i / s->G, i % s->G);
    }
    CHECK(memcmp(log_sums.data, by_more.data, tensor_bytes(&log_sums)) == 0);
    free(log_sums.data), free(by_more.data);
    check_waves(ops, s, &checked);
    if (!is_slow()) check_workers(ops, s, p, &scores, 2);
    check_workers(ops, s, p, &scores, 7);
    free(scores.data);
    free_call(&p);
}

int main(void) {
    static const shape shapes[] = {
        /* many rows: several waves, with fewer heads in the last; units of several blocks */
        {1, 5, 1, 0, 2100, 8, H2O_F32, false, 1.0f, 0.0f, 0.3f, 400000, false},
        {1, 3, 3, 100, 900, 16, H2O_BF16, true, 0.999f, 0.0f, 0.3f, 1, false},
        /* batch rows with many and with few query rows */
        {3, 2, 4, 700, 200, 40, H2O_F32, true, 0.9f, 3.0f, -0.2f, 0, true},
        {3, 2, 4, 700, 200, 33, H2O_BF16, true, 1.0f, 0.0f, 0.2f, 0, false},
        /* few rows; stores of one chunk, of many, of one block more than chunks share evenly */
        {2, 2, 2, 300, 5, 64, H2O_F16, true, 1.0f, 0.0f, 0.1f, 1, false},
        {1, 3, 4, 2047, 2, 20, H2O_BF16, false, 0.5f, 0.0f, 0.2f, 0, false},
        {1, 2, 8, 2200, 17, 72, H2O_F32, false, 1.0f, 4.0f, 0.1f, 1, true},
        {1, 1, 1, 9000, 200, 8, H2O_F32, true, 0.99f, 0.0f, 0.3f, 0, false},
        /* too many rows and keys for a tile buffer per worker: several panels */
        {1, 2, 1, 16300, 300, 8, H2O_F32, false, 1.0f, 0.0f, 0.3f, 0, false},
        {2, 1, 2, 16370, 170, 16, H2O_BF16, true, 0.99f, 0.0f, 0.3f, 1, true},
        /* so many keys that chunks have their maximum length */
        {1, 1, 2, 66000, 9, 4, H2O_F32, false, 1.0f, 0.0f, 0.3f, 0, false},
        /* tiny shapes */
        {1, 1, 1, 0, 1, 1, H2O_F32, false, 1.0f, 0.0f, 1.0f, 0, false},
        {1, 1, 3, 1, 1, 5, H2O_F16, false, 0.0f, 0.0f, 1.0f, 0, false},
        {1, 1, 6, 0, 1, 3, H2O_F32, false, 1.0f, 0.0f, 1.0f, 0, true},
    };
    h2o_error error;
    CHECK(setenv("H2O_THREADS", "3", 1) == 0 && h2o_init(&error) == H2O_OK);
    for (size_t l = 0; l < LEVELS; l++) {
        for (size_t i = 0; has_level(levels[l]->name) && i < sizeof shapes / sizeof *shapes; i++) {
            if (is_as_elsewhere(levels[l]->name, shapes[i].dtype == H2O_BF16)) continue;
            test_shape(levels[l], &shapes[i]);
        }
    }
    return 0;
}
