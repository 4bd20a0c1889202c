/* scenes.h - a conversation through attend, evict and step, and the same through simulate, both
 * checked against plain loops in double precision. Every tensor is a separate block of memory of
 * exactly its size, so that the sanitizers can watch the kernels. Needs _GNU_SOURCE. */
#ifndef H2O_SCENES_H
#define H2O_SCENES_H

#include "policy.h"

#include "plain.h"

/* Columns begin..begin + count - 1 of a [B,n,Q,D] tensor. */
static h2o_view columns(const h2o_view *view, int64_t begin, int64_t count) {
    h2o_view part = *view;
    part.data = (char *)view->data + begin * view->stride[2] * h2o_dtype_size(view->dtype);
    part.shape[2] = count;
    return part;
}

/* ---- A conversation ---------------------------------------------------- */

typedef struct {
    h2o_dims dims; /* Q: of the whole text */
    h2o_dtype dtype;
    h2o_dtype stored;                /* in the slots, see make_slots; H2O_NONE: dtype */
    int64_t prompt, chunk_at, chunk; /* order: prompt, steps, a chunk, steps */
    int32_t heavy, recent;
    h2o_policy policy;
    float softcap;
    float scale;
    layout how;
    bool sinks;    /* heads have learned sinks */
    bool weird;    /* some values, keys and queries are not finite */
    int64_t spare; /* unused rows of the slots; the batch's follow, in reverse order */
} scene;

typedef struct {
    h2o_view query, keys, values, mask; /* of the whole text */
    h2o_view sink_logits;
} text;

typedef struct {
    h2o_view out; /* [B,Q,H,D] */
    h2o_slots slots;
} answer;

/* Sets values to NaN or infinity throughout, keys whose logits are -infinity, and near the end a
 * query and a key of NaN, after which no score is a number. */
static void spoil_text(const scene *s, const text *t, test_random *random) {
    const h2o_dims *const d = &s->dims;
    for (int64_t b = 0; b < d->B; b++) {
        for (int64_t h = 0; h < d->H; h++) {
            for (int64_t q = 0; q < d->Q; q++) store_at(&t->query, b, h, q, 0, 1.0f);
        }
        for (int64_t i = 0; i < d->Q / 8; i++) {
            const int64_t q = random_int(random, 0, d->Q - 1), g = random_int(random, 0, d->G - 1);
            if (i % 2 == 0) store_at(&t->values, b, g, q, q % d->D, i % 4 ? NAN : INFINITY);
            if (i % 2 == 1) store_at(&t->keys, b, g, q, 0, -INFINITY);
        }
        store_at(&t->query, b, 0, d->Q * 9 / 10, d->D - 1, NAN);
        store_at(&t->keys, b, d->G - 1, d->Q * 9 / 10 + 3, d->D - 1, NAN);
    }
}

static text make_text(const scene *s, test_random *random) {
    const h2o_dims *const d = &s->dims;
    text t = {.query = make_layout(s->how, s->dtype, 4, d->B, d->H, d->Q, d->D, 2),
              .keys = make_layout(s->how, s->dtype, 4, d->B, d->G, d->Q, d->D, 2),
              .values = make_layout(s->how, s->dtype, 4, d->B, d->G, d->Q, d->D, 3),
              .mask = make_layout(s->how, H2O_U8, 2, d->B, d->Q, 1, 1, 2)};
    fill_tensor(&t.query, 0.02f, random);
    fill_tensor(&t.keys, 0.01f, random);
    fill_tensor(&t.values, 0.0f, random);
    /* row 0 has no padding; in the others many steps have nothing to do */
    FILL(uint8_t, t.mask, i == 0 || (random_int(random, 0, 9) > 0 && (j < s->prompt || j % 3)));
    if (s->sinks) t.sink_logits = make_sinks(d->H, random);
    if (s->weird) spoil_text(s, &t, random);
    return t;
}

static void free_text(const text *t) {
    free(t->query.data);
    free(t->keys.data);
    free(t->values.data);
    free(t->mask.data);
    free(t->sink_logits.data);
}

static answer make_answer(const scene *s) {
    const h2o_dims *const d = &s->dims;
    const h2o_dtype stored = s->stored == H2O_NONE ? s->dtype : s->stored;
    h2o_dims slots = *d;
    slots.B += s->spare;
    answer a = {make_layout(s->how, s->dtype, 4, d->B, d->Q, d->H, d->D, 2),
                make_slots(s->how, &slots, stored, s->heavy, s->recent, s->policy.value_weighted)};
    if (s->spare > 0) {
        a.slots.rows = make_layout(s->how, H2O_I32, 1, d->B, 1, 1, 1, 2);
        for (int64_t b = 0; b < d->B; b++) {
            AT(int32_t, a.slots.rows, b, 0, 0) = (int32_t)(slots.B - 1 - b);
        }
    }
    return a;
}

/* The row of the slots that batch row b uses. */
static int64_t row_of(const h2o_slots *slots, int64_t b) {
    return h2o_given(&slots->rows) ? AT(int32_t, slots->rows, b, 0, 0) : b;
}

/* Calls f with each pair of tensors of two answers. */
static void for_each_tensor(const answer *a, const answer *b,
                            void (*f)(const h2o_view *, const h2o_view *)) {
    f(&a->out, &b->out);
    f(&a->slots.keys, &b->slots.keys);
    f(&a->slots.values, &b->slots.values);
    f(&a->slots.scores, &b->slots.scores);
    f(&a->slots.positions, &b->slots.positions);
    f(&a->slots.next_slot, &b->slots.next_slot);
    f(&a->slots.seen_tokens, &b->slots.seen_tokens);
    f(&a->slots.budget, &b->slots.budget);
    f(&a->slots.evicted_score, &b->slots.evicted_score);
    if (h2o_given(&a->slots.norms)) f(&a->slots.norms, &b->slots.norms);
    if (h2o_given(&a->slots.rows)) f(&a->slots.rows, &b->slots.rows);
}

static void check_same(const h2o_view *a, const h2o_view *b) {
    CHECK(memcmp(a->data, b->data, tensor_bytes(a)) == 0);
}

static void free_tensor(const h2o_view *a, const h2o_view *unused) {
    (void)unused;
    free(a->data);
}

/* ---- Through the kernels ----------------------------------------------- */

static void take_chunk(const runner *with, const scene *s, const text *t, answer *a, int64_t begin,
                       int64_t count) {
    h2o_view mask = t->mask, out = a->out;
    mask.data = h2o_at(&mask, 0, begin, 0);
    mask.shape[1] = count;
    out.data = (char *)out.data + begin * out.stride[1] * h2o_dtype_size(out.dtype);
    out.shape[1] = count;
    h2o_dims dims = s->dims;
    dims.Q = count;
    const h2o_view scores = make_layout(s->how, H2O_F32, 3, dims.B, dims.G, count, 1, 2);
    h2o_attend_params attend = {
        .query = columns(&t->query, begin, count),
        .keys = columns(&t->keys, begin, count),
        .values = columns(&t->values, begin, count),
        .mask = mask,
        .has_slots = begin > 0,
        .slots = a->slots,
        .out = out,
        .scores = scores,
        .sink_logits = t->sink_logits,
        .scale = s->scale,
        .softcap = s->softcap,
        .policy = s->policy,
        .dims = dims,
    };
    run_operation(H2O_ATTEND, &attend, with);
    h2o_evict_params evict = {
        .keys = attend.keys,
        .values = attend.values,
        .scores = scores,
        .mask = mask,
        .slots = a->slots,
        .policy = s->policy,
        .dims = dims,
    };
    run_operation(H2O_EVICT, &evict, with);
    free(scores.data);
}

static void take_step(const runner *with, const scene *s, const text *t, answer *a, int64_t q) {
    h2o_step_params step = {
        .query = columns(&t->query, q, 1),
        .key = columns(&t->keys, q, 1),
        .value = columns(&t->values, q, 1),
        .mask = t->mask,
        .slots = a->slots,
        .out = a->out,
        .sink_logits = t->sink_logits,
        .policy = s->policy,
        .scale = s->scale,
        .softcap = s->softcap,
        .dims = s->dims,
    };
    step.mask.data = h2o_at(&step.mask, 0, q, 0);
    step.out.data = (char *)step.out.data + q * step.out.stride[1] * h2o_dtype_size(s->dtype);
    step.mask.shape[1] = step.out.shape[1] = 1;
    run_operation(H2O_STEP, &step, with);
}

static answer converse(const runner *with, const scene *s, const text *t) {
    answer a = make_answer(s);
    take_chunk(with, s, t, &a, 0, s->prompt);
    for (int64_t q = s->prompt; q < s->dims.Q; q++) {
        if (q == s->chunk_at) {
            take_chunk(with, s, t, &a, q, s->chunk);
            q += s->chunk - 1;
        } else {
            take_step(with, s, t, &a, q);
        }
    }
    return a;
}

/* The answer of simulate. Its positions are the rows at which keys are evicted. */
static answer simulate(const runner *with, const scene *s, const text *t) {
    answer a = make_answer(s);
    const h2o_view prompt = make_layout(s->how, H2O_I32, 1, s->dims.B, 1, 1, 1, 2);
    FILL(int32_t, prompt, 0);
    for (int64_t i = 0; i < s->dims.B * s->prompt; i++) {
        const int64_t b = i / s->prompt, q = i % s->prompt;
        AT(int32_t, prompt, b, 0, 0) += AT(uint8_t, t->mask, b, q, 0);
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
        .sink_logits = t->sink_logits,
        .policy = s->policy,
        .scale = s->scale,
        .softcap = s->softcap,
        .dims = s->dims,
    };
    run_operation(H2O_SIMULATE, &params, with);
    free(prompt.data);
    return a;
}

/* Turns rows of eviction into positions, as if each token had a slot. */
static void list_survivors(const scene *s, const text *t, const answer *a) {
    const int64_t Q = s->dims.Q;
    for (int64_t unit = 0; unit < s->dims.B * s->dims.G; unit++) {
        const int64_t b = unit / s->dims.G, g = unit % s->dims.G;
        int32_t position = 0;
        for (int64_t q = 0; q < Q; q++) {
            int32_t *const row = &AT(int32_t, a->slots.positions, b, g, q);
            const bool real = AT(uint8_t, t->mask, b, q, 0);
            *row = real && *row == Q ? position : -1;
            position += real;
        }
    }
}

/* ---- Through plain loops ----------------------------------------------- */

typedef struct {
    int64_t count;
    float *scores, *norms;
    int32_t *positions, *columns;
} kept_keys;

/* Computes the weights that query q of head r gives to each kept key, and its output. sink: of that
 * head. */
static void attend_plainly(const scene *s, const plain_unit *u, double sink, int64_t r, int64_t q,
                           const kept_keys *kept, double *weights, double *out) {
    const double *const query = u->query + (r * s->dims.Q + q) * s->dims.D;
    for (int64_t i = 0; i < kept->count; i++) {
        const double *const key = u->keys + kept->columns[i] * s->dims.D;
        weights[i] = plain_logit(query, key, s->dims.D, s->scale, s->softcap);
    }
    plain_softmax(weights, kept->count, sink);
    memset(out, 0, (size_t)s->dims.D * sizeof *out);
    for (int64_t i = 0; i < kept->count; i++) {
        const double *const value = u->values + kept->columns[i] * s->dims.D;
        for (int64_t j = 0; j < s->dims.D; j++) out[j] += weights[i] * value[j];
    }
}

/* Drops the keys that exceed the budget after `length` tokens. */
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

/* Checks that the slots hold the keys that the plain loops have kept. */
static void check_slots(const answer *a, int64_t b, int64_t g, const kept_keys *kept) {
    const h2o_slots *const slots = &a->slots;
    const int64_t row = row_of(slots, b);
    int64_t found = 0;
    for (int64_t slot = 0; slot < slots->positions.shape[2]; slot++) {
        const int32_t position = AT(int32_t, slots->positions, row, g, slot);
        for (int64_t i = 0; position >= 0 && i < kept->count; i++) {
            if (kept->positions[i] == position) {
                CHECK(
                    is_near(AT(float, slots->scores, row, g, slot), (double)kept->scores[i], 2e-5));
                found++;
            }
        }
    }
    CHECK(found == kept->count);
}

/* The answers of all levels. The plain loops, which take most of the time, run once for all. */
typedef struct {
    answer by[LEVELS];
    size_t count;
} answers;

/* Checks one key/value head of one row, call by call. */
static void check_unit(const scene *s, const text *t, const answers *a, int64_t b, int64_t g) {
    const h2o_dims *const d = &s->dims;
    const size_t room = (size_t)d->Q;
    const plain_unit u = make_plain(&t->query, &t->keys, &t->values, b, g);
    kept_keys kept = {0, test_alloc(room * 4), test_alloc(room * 4), test_alloc(room * 4),
                      test_alloc(room * 4)};
    double *const weights = test_alloc(room * sizeof *weights);
    double *const out = test_alloc((size_t)d->D * sizeof *out);
    const bool largest = h2o_scores_largest(&s->policy);
    int64_t length = 0, end;
    for (int64_t begin = 0; begin < d->Q; begin = end) {
        end = begin + (begin == 0 ? s->prompt : begin == s->chunk_at ? s->chunk : 1);
        const int64_t before = length;
        for (int64_t q = begin; q < end; q++) {
            const bool real = AT(uint8_t, t->mask, b, q, 0);
            memset(out, 0, (size_t)d->D * sizeof *out);
            if (real) {
                const int64_t i = kept.count++;
                const double *const value = u.values + q * d->D;
                kept.scores[i] = 0.0f;
                kept.positions[i] = (int32_t)length++;
                kept.columns[i] = (int32_t)q;
                kept.norms[i] = (float)sqrt(plain_dot(value, value, d->D));
                for (int64_t j = 0; j <= i; j++) kept.scores[j] *= s->policy.decay;
            }
            for (int64_t r = 0; r < d->R; r++) {
                const double sink = plain_sink(&t->sink_logits, g * d->R + r);
                if (real) attend_plainly(s, &u, sink, r, q, &kept, weights, out);
                for (int64_t i = 0; real && i < kept.count; i++) {
                    const float given = (float)weights[i];
                    kept.scores[i] =
                        largest ? h2o_larger(kept.scores[i], given) : kept.scores[i] + given;
                }
                for (size_t l = 0; l < a->count; l++) {
                    check_row(&a->by[l].out, b, q, g * d->R + r, out);
                }
            }
        }
        if (length > before) evict_plainly(s, length, &kept);
    }
    for (size_t l = 0; l < a->count; l++) check_slots(&a->by[l], b, g, &kept);
    free_plain(&u);
    free(kept.scores);
    free(kept.norms);
    free(kept.positions);
    free(kept.columns);
    free(weights);
    free(out);
}

/* ---- Judging ----------------------------------------------------------- */

/* Checks that rows of the slots that the batch does not use are still empty. */
static void check_spare(const scene *s, const answer *a) {
    const h2o_slots *const slots = &a->slots;
    for (int64_t row = 0; row < s->spare; row++) {
        CHECK(AT(int64_t, slots->seen_tokens, row, 0, 0) == 0);
        for (int64_t i = 0; i < s->dims.G * s->dims.S; i++) {
            const int64_t g = i / s->dims.S, slot = i % s->dims.S;
            CHECK(AT(int32_t, slots->positions, row, g, slot) == -1);
            CHECK(isnan(AT(float, slots->scores, row, g, slot)));
        }
    }
}

static void check_units(const scene *s, const text *t, const answers *a) {
    for (int64_t i = 0; i < s->dims.B * s->dims.G; i++) {
        if (is_judged(i)) check_unit(s, t, a, i / s->dims.G, i % s->dims.G);
    }
}

/* A passage takes a text through operations. A player runs it in several ways that must agree. */
typedef answer (*passage)(const runner *, const scene *, const text *);
typedef answer (*player)(const h2o_ops *ops, const scene *s, const text *t, passage through);

static void free_answers(answers *a) {
    for (size_t l = 0; l < a->count; l++) for_each_tensor(&a->by[l], &a->by[l], free_tensor);
    a->count = 0;
}

/* ops: the kernels of `count` levels. */
static void test_scene(const h2o_ops *const *ops, size_t count, const scene *s, uint64_t seed,
                       player play) {
    test_random random = {.state = seed};
    const text t = make_text(s, &random);
    answers a = {.count = 0};
    for (size_t l = 0; l < count; l++) {
        const answer conversation = play(ops[l], s, &t, converse);
        check_spare(s, &conversation);
        a.by[a.count++] = conversation;
    }
    check_units(s, &t, &a);
    free_answers(&a);

    scene whole = *s; /* without a chunk, and with a slot for every token */
    whole.chunk_at = -1;
    whole.spare = 0;
    whole.dims.S = whole.dims.Q;
    for (size_t l = 0; l < count; l++) {
        const answer simulation = play(ops[l], &whole, &t, simulate);
        list_survivors(&whole, &t, &simulation);
        a.by[a.count++] = simulation;
    }
    check_units(&whole, &t, &a);
    free_answers(&a);
    free_text(&t);
}

#endif
