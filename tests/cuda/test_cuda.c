/* test_cuda.c - the scenes of tests/c (prompts, chunks and decode steps, compared with a plain
 * implementation), run through the emulated GPU kernels. Each scene runs with several seeds, which
 * order threads and blocks differently. Results must agree bit for bit. CAPABILITY 75 emulates a
 * device without bfloat16, whose float16 kernels differ from those of other devices. */
#define _GNU_SOURCE
#include "../c/scenes.h"
#include "cuda/plan.h"

#if defined(CAPABILITY) && CAPABILITY < 80
enum { ONE_DTYPE = true };
#else
enum { ONE_DTYPE = false };
#endif

void shim_seed(uint64_t seed);

static answer play(const h2o_ops *ops, const scene *s, const text *t, passage through) {
    const runner with = {.ops = ops, .workers = 1};
    shim_seed(0);
    const answer first = through(&with, s, t);
    for (uint64_t seed = 1; seed < (is_slow() || ONE_DTYPE ? 2 : 3); seed++) {
        shim_seed(seed);
        const answer other = through(&with, s, t);
        for_each_tensor(&first, &other, check_same);
        for_each_tensor(&other, &other, free_tensor);
    }
    return first;
}

/* Quantized rows at any address, with every alignment of a run of elements. A misaligned load ends
 * the test. tests/core/test_stores.py checks the numbers. */
static void test_quantized(h2o_dtype stored, int64_t D, h2o_policy policy) {
    const scene s = {.dims = make_dims(2, 2, 2, 60, 50, D),
                     .dtype = H2O_F16,
                     .stored = stored,
                     .prompt = 40,
                     .chunk_at = 45,
                     .chunk = 8,
                     .heavy = 18,
                     .recent = 16,
                     .policy = policy,
                     .scale = 0.1f,
                     .how = SPREAD};
    test_random random = {.state = (uint64_t)D};
    const text t = make_text(&s, &random);
    const answer conversation = play(&h2o_ops_generic, &s, &t, converse);
    for_each_tensor(&conversation, &conversation, free_tensor);
    free_text(&t);
}

/* ---- A chunk over quantized slots ---------------------------------------- */

/* A chunk of dims.Q tokens. Heads have dims.S slots with holes between them. */
typedef struct {
    h2o_dims dims;
    h2o_dtype keys, values;
    h2o_policy policy;
    float softcap;
    layout how;
    bool pads;
    bool extreme; /* values of the largest float16's size, and one NaN */
} chunk;

static void set_half(char *p, float x) { store_scalar(p, H2O_F16, x); }

/* Random bytes, with scales that make the numbers about 1. */
static void fill_rows(const h2o_view *rows, h2o_dtype stored, int64_t D, test_random *random) {
    for (int64_t i = 0; i < rows->shape[0] * rows->shape[1] * rows->shape[2]; i++) {
        const int64_t unit = i / rows->shape[2];
        char *const row =
            h2o_at(rows, unit / rows->shape[1], unit % rows->shape[1], i % rows->shape[2]);
        for (int64_t j = 0; j < rows->shape[3]; j++) row[j] = (char)random_int(random, -127, 127);
        if (stored == H2O_Q8) set_half(row + D, 0.002f + 0.01f * random_float(random));
        if (stored == H2O_S4) set_half(row + D / 2, 0.002f + 0.01f * random_float(random));
        for (int64_t j = 0; stored == H2O_Q4 && j < D / H2O_GROUP; j++) {
            set_half(row + D / 2 + 4 * j, 0.02f + 0.1f * random_float(random));
            set_half(row + D / 2 + 4 * j + 2, -random_float(random));
        }
    }
}

/* Element d of a row, as defined in quantize.h. */
static float quantized_element(const char *row, h2o_dtype stored, int64_t d, int64_t D) {
    if (stored == H2O_Q8) return load_scalar(row + D, H2O_F16) * (float)(int8_t)row[d];
    const char *const scale = row + D / 2 + d / H2O_GROUP * 4;
    const int byte = (uint8_t)row[d / H2O_GROUP * (H2O_GROUP / 2) + d % (H2O_GROUP / 2)];
    const int number = d % H2O_GROUP < H2O_GROUP / 2 ? byte & 15 : byte >> 4;
    if (stored == H2O_S4) return load_scalar(row + D / 2, H2O_F16) * (float)(16 * number - 120);
    return load_scalar(scale + 2, H2O_F16) + load_scalar(scale, H2O_F16) * (float)number;
}

/* A copy of a tensor [.,.,.,D] in float32. */
static h2o_view in_floats(const h2o_view *x, int64_t D) {
    const int64_t *const n = x->shape;
    const h2o_view floats = make_tensor(H2O_F32, 4, n[0], n[1], n[2], D);
    for (int64_t i = 0; i < n[0] * n[1] * n[2] * D; i++) {
        const int64_t a = i / D / n[2] / n[1], b = i / D / n[2] % n[1], c = i / D % n[2];
        const float element =
            x->dtype == H2O_U8
                ? quantized_element(h2o_at(x, a, b, c), h2o_stored_type(x, D), i % D, D)
                : load_at(x, a, b, c, i % D);
        store_at(&floats, a, b, c, i % D, element);
    }
    return floats;
}

static h2o_view copy_of(const h2o_view *x) {
    h2o_view copy = *x;
    copy.data = test_alloc(tensor_bytes(x));
    memcpy(copy.data, x->data, tensor_bytes(x));
    return copy;
}

static h2o_slots make_chunk_slots(const chunk *c, test_random *random) {
    const h2o_dims *const d = &c->dims;
    h2o_slots slots = make_slots(c->how, d, H2O_Q8, 1, 1, false);
    h2o_view *const rows[] = {&slots.keys, &slots.values};
    for (int i = 0; i < 2; i++) {
        const h2o_dtype type = i == 0 ? c->keys : c->values;
        free(rows[i]->data);
        *rows[i] = make_layout(c->how, H2O_U8, 4, d->B, d->G, d->S, h2o_row_bytes(type, d->D), 1);
        fill_rows(rows[i], type, d->D, random);
    }
    for (int64_t i = 0; i < d->B * d->G * d->S; i++) {
        const int64_t b = i / d->S / d->G, g = i / d->S % d->G, s = i % d->S;
        char *const value = h2o_at(&slots.values, b, g, s);
        if (s % 32 == g) { /* empty: its NaN must not be read */
            memset(h2o_at(&slots.keys, b, g, s), 0xff, (size_t)slots.keys.shape[3]);
            memset(value, 0xff, (size_t)slots.values.shape[3]);
            continue;
        }
        AT(int32_t, slots.positions, b, g, s) = (int32_t)s;
        AT(float, slots.scores, b, g, s) = random_float(random);
        if (c->extreme && s == 3) { /* 65532, which is how 65504 is stored: beyond float16 */
            memset(value, 0, (size_t)d->D);
            value[d->D - 1] = 127;
            set_half(value + d->D, 516.0f);
        }
        if (c->extreme && s == 70 && g == 1) set_half(value + d->D, NAN);
    }
    return slots;
}

static h2o_attend_params make_chunk(const chunk *c, h2o_dtype dtype, test_random *random) {
    const h2o_dims *const d = &c->dims;
    h2o_attend_params p = {
        .query = make_layout(c->how, dtype, 4, d->B, d->H, d->Q, d->D, 1),
        .keys = make_layout(c->how, dtype, 4, d->B, d->G, d->Q, d->D, 1),
        .values = make_layout(c->how, dtype, 4, d->B, d->G, d->Q, d->D, 1),
        .out = make_layout(c->how, dtype, 4, d->B, d->Q, d->H, d->D, 1),
        .scores = make_tensor(H2O_F32, 3, d->B, d->G, d->Q, 1),
        .has_slots = true,
        .slots = make_chunk_slots(c, random),
        .scale = 0.2f,
        .softcap = c->softcap,
        .policy = c->policy,
    };
    fill_tensor(&p.query, 0.02f, random);
    fill_tensor(&p.keys, 0.01f, random);
    fill_tensor(&p.values, 0.0f, random);
    if (c->pads) {
        p.mask = make_tensor(H2O_U8, 2, d->B, d->Q, 1, 1);
        FILL(uint8_t, p.mask, i > 0 || (j > 3 && random_int(random, 0, 9) > 0));
    }
    return p;
}

/* Scores of all keys must be as close as scores of floats. */
static void check_chunk_scores(const h2o_attend_params *p, const h2o_attend_params *floats) {
    const int64_t B = p->query.shape[0], G = p->keys.shape[1], Q = p->keys.shape[2];
    const int64_t S = p->slots.scores.shape[2];
    for (int64_t i = 0; i < B * G * (S + Q); i++) {
        const int64_t b = i / (S + Q) / G, g = i / (S + Q) % G, j = i % (S + Q), q = j - S;
        if (q < 0 && AT(int32_t, p->slots.positions, b, g, j) < 0) continue;
        const h2o_view *const got = q < 0 ? &p->slots.scores : &p->scores;
        const h2o_view *const wanted = q < 0 ? &floats->slots.scores : &floats->scores;
        const int64_t at = q < 0 ? j : q;
        CHECK(is_near(AT(float, *got, b, g, at), (double)AT(float, *wanted, b, g, at), 1e-5));
    }
}

static bool is_token_of(const h2o_view *mask, int64_t b, int64_t q) {
    return !h2o_given(mask) || AT(uint8_t, *mask, b, q, 0);
}

/* Logarithm of the softmax denominator of each query, [B,H,Q]; NaN at padding. */
static h2o_view log_sums_of(const h2o_attend_params *floats) {
    const int64_t B = floats->query.shape[0], H = floats->query.shape[1];
    const int64_t Q = floats->query.shape[2], D = floats->query.shape[3];
    const int64_t G = floats->keys.shape[1], S = floats->slots.keys.shape[2];
    const h2o_view log_sums = make_layout(SPREAD, H2O_F32, 3, B, H, Q, 1, 1);
    double *const logits = test_alloc((size_t)(S + Q) * sizeof *logits);
    for (int64_t i = 0; i < B * H; i++) {
        const int64_t b = i / H, h = i % H, g = h / (H / G);
        const plain_unit u = make_plain(&floats->query, &floats->keys, &floats->values, b, g);
        double *const stored = plain_rows(&floats->slots.keys, b, g);
        for (int64_t q = 0; q < Q; q++) {
            const double *const query = u.query + (h % (H / G) * Q + q) * D;
            int64_t n = 0;
            for (int64_t j = 0; j < S + q + 1; j++) {
                const bool is_key = j < S ? AT(int32_t, floats->slots.positions, b, g, j) >= 0
                                          : is_token_of(&floats->mask, b, j - S);
                const double *const key = j < S ? stored + j * D : u.keys + (j - S) * D;
                if (is_key) {
                    logits[n++] = plain_logit(query, key, D, floats->scale, floats->softcap);
                }
            }
            const double log_sum = plain_log_sum(logits, n, (double)-INFINITY);
            AT(float, log_sums, b, h, q) = is_token_of(&floats->mask, b, q) ? (float)log_sum : NAN;
        }
        free(stored);
        free_plain(&u);
    }
    free(logits);
    return log_sums;
}

/* Known log sums must give the same scores, and nothing else may be written. An infinite log sum,
 * which flash attention returns for a softmax that is NaN, must make the scores of the visible keys
 * NaN. */
static void check_known(const h2o_attend_params *p, const h2o_attend_params *floats,
                        const h2o_view *before) {
    const runner with = {.ops = &h2o_ops_generic, .workers = 1};
    h2o_attend_params call = *p;
    call.known_log_sums = log_sums_of(floats);
    call.out = copy_of(&p->out);
    call.scores = copy_of(&p->scores);
    call.slots.scores = copy_of(before);
    const h2o_view known = call.known_log_sums, out = call.out, scores = call.slots.scores;
    memset(out.data, 0xa5, tensor_bytes(&out));
    h2o_attend_params checked = call; /* a call sets dims and unused strides */
    run_operation(H2O_ATTEND, &checked, &with);
    check_chunk_scores(&call, floats);
    for (size_t i = 0; i < tensor_bytes(&out); i++) {
        CHECK(((const unsigned char *)out.data)[i] == 0xa5);
    }
    const int64_t last = known.shape[2] - 1, slot = 5;
    AT(float, known, 0, 0, last) = INFINITY;
    run_operation(H2O_ATTEND, &call, &with);
    if (is_token_of(&p->mask, 0, last)) {
        CHECK(isnan(AT(float, call.scores, 0, 0, last)) && isnan(AT(float, scores, 0, 0, slot)));
        CHECK(!isnan(AT(float, scores, 0, 1, slot)));
    }
    free(known.data), free(out.data), free(call.scores.data), free(scores.data);
}

/* Runs the chunk on tensor cores, and in float32 on the numbers that the rows encode, without
 * tensor cores. Logits and scores must be as close as with floats, outputs as close as 16 bits
 * allow. */
static void test_chunk(const chunk *c, h2o_dtype dtype) {
    const int64_t D = c->dims.D;
    const runner with = {.ops = &h2o_ops_generic, .workers = 1};
    test_random random = {.state = (uint64_t)D};
    h2o_attend_params p = make_chunk(c, dtype, &random), floats = p;
    h2o_view *const in[] = {&floats.query,      &floats.keys,         &floats.values,
                            &floats.slots.keys, &floats.slots.values, &floats.out};
    for (size_t i = 0; i < sizeof in / sizeof *in; i++) *in[i] = in_floats(in[i], D);
    floats.scores = copy_of(&p.scores);
    floats.slots.scores = copy_of(&p.slots.scores);
    const h2o_view before = copy_of(&p.slots.scores);
    run_operation(H2O_ATTEND, &floats, &with);

    h2o_view first[3] = {0};
    for (uint64_t seed = 0; seed < (is_slow() || ONE_DTYPE ? 2 : 3); seed++) {
        const h2o_view written[] = {p.out, p.scores, p.slots.scores};
        h2o_attend_params call = p; /* a call sets dims and unused strides */
        memcpy(p.slots.scores.data, before.data, tensor_bytes(&before));
        shim_seed(seed);
        run_operation(H2O_ATTEND, &call, &with);
        for (size_t i = 0; i < 3; i++) {
            if (seed == 0) first[i] = copy_of(&written[i]);
            check_same(&first[i], &written[i]);
        }
        cuda_plan plan;
        cuda_plan_call(H2O_ATTEND, &call, &plan);
        for (int i = 1; i < 3; i++) CHECK(strstr(cuda_kernel_names[plan.launch[i].kernel], "f16"));
    }
    for (int64_t i = 0; i < c->dims.B * c->dims.Q * c->dims.H * D; i++) {
        const int64_t h = i / D % c->dims.H, q = i / D / c->dims.H % c->dims.Q;
        const int64_t b = i / D / c->dims.H / c->dims.Q;
        CHECK(is_near(load_at(&p.out, b, q, h, i % D), (double)load_at(&floats.out, b, q, h, i % D),
                      unit_roundoff(dtype)));
    }
    check_chunk_scores(&p, &floats);
    check_known(&p, &floats, &before);
    check_known(&floats, &floats, &before);
    const h2o_slots *const s = &p.slots;
    const h2o_view *const all[] = {
        &p.query,   &p.keys,           &p.values,      &p.out,
        &p.scores,  &p.mask,           &s->keys,       &s->values,
        &s->scores, &s->positions,     &s->next_slot,  &s->seen_tokens,
        &s->budget, &s->evicted_score, &floats.scores, &floats.slots.scores,
        &before,    &first[0],         &first[1],      &first[2]};
    for (size_t i = 0; i < sizeof in / sizeof *in; i++) free(in[i]->data);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]->data);
}

/* Blocks of sums share the queries of a group if there would otherwise be fewer than
 * SUMS_BLOCKS. */
static void test_parts(void) {
    const struct {
        h2o_dims dims; /* S: slots */
        int parts;
    } cases[] = {
        {make_dims(1, 8, 4, 32768, 0, 128), 1}, {make_dims(1, 8, 4, 8192, 0, 128), 4},
        {make_dims(1, 8, 4, 4096, 0, 128), 8},  {make_dims(16, 8, 4, 4096, 0, 128), 8},
        {make_dims(1, 8, 4, 256, 8192, 64), 2}, {make_dims(1, 8, 7, 256, 0, 64), 7},
        {make_dims(1, 8, 4, 2048, 0, 128), 4},  {make_dims(1, 8, 1, 8192, 0, 128), 4},
        {make_dims(1, 1, 11, 40, 0, 64), 8},    {make_dims(1, 8, 4, 8192, 0, 256), 4},
        {make_dims(1, 2, 0, 0, 0, 64), 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        CHECK(cuda_sums_parts(&cases[i].dims, cases[i].dims.S) == cases[i].parts);
}

/* ---- A step by tensor cores ---------------------------------------------- */

typedef struct {
    h2o_dims dims;          /* S: slots, all held except one */
    h2o_dtype keys, values; /* stored types; H2O_NONE: the queries' type */
    h2o_policy policy;
    float softcap;
    bool sinks;
} one_step;

static h2o_view stored_rows(const one_step *s, h2o_dtype stored, h2o_dtype dtype,
                            test_random *random) {
    const h2o_dims *const d = &s->dims;
    const h2o_dtype type = stored == H2O_NONE ? dtype : H2O_U8;
    const int64_t width = stored == H2O_NONE ? d->D : h2o_row_bytes(stored, d->D);
    const h2o_view rows = make_tensor(type, 4, d->B, d->G, d->S, width);
    if (stored == H2O_NONE) {
        fill_tensor(&rows, 0.01f, random);
    } else {
        fill_rows(&rows, stored, d->D, random);
    }
    return rows;
}

static h2o_step_params make_step(const one_step *s, h2o_dtype dtype, test_random *random) {
    const h2o_dims *const d = &s->dims;
    h2o_step_params p = {
        .query = make_tensor(dtype, 4, d->B, d->H, 1, d->D),
        .key = make_tensor(dtype, 4, d->B, d->G, 1, d->D),
        .value = make_tensor(dtype, 4, d->B, d->G, 1, d->D),
        .slots = make_slots(DENSE, d, dtype, (int32_t)d->S / 2, (int32_t)(d->S - 1 - d->S / 2),
                            s->policy.value_weighted),
        .out = make_tensor(dtype, 4, d->B, 1, d->H, d->D),
        .scale = 0.2f,
        .softcap = s->softcap,
        .policy = s->policy,
        .dims = *d,
    };
    fill_tensor(&p.query, 0.02f, random);
    fill_tensor(&p.key, 0.01f, random);
    fill_tensor(&p.value, 0.0f, random);
    fill_slots(&p.slots, d->S - 1, random);
    free(p.slots.keys.data);
    free(p.slots.values.data);
    p.slots.keys = stored_rows(s, s->keys, dtype, random);
    p.slots.values = stored_rows(s, s->values, dtype, random);
    if (s->policy.value_weighted) FILL(float, p.slots.norms, 0.5f + random_float(random));
    if (s->sinks) p.sink_logits = make_sinks(d->H, random);
    return p;
}

enum { STEP_WRITES = 9 };

/* Tensors that a step writes. */
static void written_by(h2o_step_params *p, h2o_view *written[STEP_WRITES]) {
    h2o_slots *const s = &p->slots;
    h2o_view *const all[STEP_WRITES] = {&p->out,       &s->keys,        &s->values,
                                        &s->scores,    &s->norms,       &s->positions,
                                        &s->next_slot, &s->seen_tokens, &s->evicted_score};
    memcpy(written, all, sizeof all);
}

/* The same call on copies of the tensors that it writes. */
static h2o_step_params copy_step(const h2o_step_params *from) {
    h2o_step_params p = *from;
    h2o_view *written[STEP_WRITES];
    written_by(&p, written);
    for (int i = 0; i < STEP_WRITES; i++) {
        if (h2o_given(written[i])) *written[i] = copy_of(written[i]);
    }
    return p;
}

static void free_written(h2o_step_params *p) {
    h2o_view *written[STEP_WRITES];
    written_by(p, written);
    for (int i = 0; i < STEP_WRITES; i++) free(written[i]->data);
}

static void free_read(h2o_step_params *p) {
    h2o_view *const read[] = {&p->query, &p->key, &p->value};
    for (int i = 0; i < 3; i++) free(read[i]->data);
}

/* The call in float32, with the numbers that the rows encode after the step has stored its
 * token. */
static h2o_step_params in_float32(const h2o_step_params *from, const h2o_step_params *after) {
    h2o_step_params p = copy_step(from);
    const int64_t D = p.dims.D;
    h2o_view *const rows[] = {&p.slots.keys, &p.slots.values}, *const new[] = {&p.key, &p.value};
    const h2o_view *const stored[] = {&after->slots.keys, &after->slots.values};
    for (int i = 0; i < 2; i++) {
        free(rows[i]->data);
        *rows[i] = in_floats(stored[i], D);
        *new[i] = in_floats(new[i], D);
        for (int64_t unit = 0; unit < p.dims.B * p.dims.G; unit++) {
            const int64_t b = unit / p.dims.G, g = unit % p.dims.G;
            const int32_t slot = AT(int32_t, from->slots.next_slot, b, g, 0);
            memcpy(h2o_at(new[i], b, g, 0), h2o_at(rows[i], b, g, slot), (size_t)D * sizeof(float));
        }
    }
    p.query = in_floats(&p.query, D);
    free(p.out.data);
    p.out = in_floats(&from->out, D);
    return p;
}

/* The same numbers at an address that is only a multiple of 2. `memory` is to be freed. */
static h2o_view misaligned_copy(const h2o_view *x, char **memory) {
    h2o_view copy = *x;
    *memory = malloc(tensor_bytes(x) + 2);
    copy.data = memcpy(*memory + 2, x->data, tensor_bytes(x));
    return copy;
}

/* Runs the step on tensor cores with any order of threads and any address of the query, and compares
 * with the kernel for floats. */
static void test_step(const one_step *s, h2o_dtype dtype) {
    const h2o_dims *const d = &s->dims;
    const runner with = {.ops = &h2o_ops_generic, .workers = 1};
    test_random random = {.state = (uint64_t)d->D};
    h2o_step_params p = make_step(s, dtype, &random), first = copy_step(&p);
    for (uint64_t seed = 0; seed < (is_slow() || ONE_DTYPE ? 2 : 3); seed++) {
        h2o_step_params call = seed == 0 ? first : copy_step(&p);
        char *query = NULL;
        if (seed == 1) call.query = misaligned_copy(&p.query, &query);
        shim_seed(seed);
        run_operation(H2O_STEP, &call, &with);
        check_same(&first.out, &call.out);
        check_same(&first.slots.scores, &call.slots.scores);
        check_same(&first.slots.positions, &call.slots.positions);
        check_same(&first.slots.keys, &call.slots.keys);
        check_same(&first.slots.values, &call.slots.values);
        cuda_plan plan;
        cuda_plan_call(H2O_STEP, &call, &plan);
        CHECK(strstr(cuda_kernel_names[plan.launch[0].kernel], "f16") != NULL);
        if (seed == 0) first = call;
        if (seed > 0) free_written(&call);
        free(query);
    }
    h2o_step_params floats = in_float32(&p, &first);
    run_operation(H2O_STEP, &floats, &with);
    for (int64_t i = 0; i < d->B * d->H * d->D; i++) {
        const int64_t h = i / d->D % d->H, b = i / d->D / d->H;
        CHECK(is_near(load_at(&first.out, b, 0, h, i % d->D),
                      (double)load_at(&floats.out, b, 0, h, i % d->D), unit_roundoff(dtype)));
    }
    for (int64_t i = 0; i < d->B * d->G * d->S; i++) {
        const int64_t b = i / d->S / d->G, g = i / d->S % d->G, slot = i % d->S;
        CHECK(AT(int32_t, first.slots.positions, b, g, slot) ==
              AT(int32_t, floats.slots.positions, b, g, slot));
        CHECK(is_near(AT(float, first.slots.scores, b, g, slot),
                      (double)AT(float, floats.slots.scores, b, g, slot), 1e-5));
    }
    check_same(&first.slots.next_slot, &floats.slots.next_slot);
    check_same(&first.slots.seen_tokens, &floats.slots.seen_tokens);
    free_written(&first);
    free_written(&floats);
    free_read(&floats);
    free_read(&p);
    free(p.slots.budget.data);
    free(p.sink_logits.data);
    free_written(&p);
}

int main(void) {
    static const h2o_dtype dtypes[] = {H2O_F32, H2O_F16, H2O_BF16};
    const h2o_policy plain = {.decay = 1.0f};
    const h2o_policy all = {4, H2O_SCORE_MEAN, 0.99f, true};
    const h2o_policy largest = {4, H2O_SCORE_MAX, 0.99f, false};
    const scene scenes[] = {
        {.dims = make_dims(2, 1, 3, 480, 420, 64),
         .prompt = 420,
         .chunk_at = 435,
         .chunk = 12,
         .heavy = 200,
         .recent = 180,
         .policy = plain,
         .scale = 0.1f},
        {.dims = make_dims(2, 2, 5, 90, 80, 50),
         .spare = 2,
         .prompt = 60,
         .chunk_at = 70,
         .chunk = 7,
         .heavy = 30,
         .recent = 20,
         .policy = all,
         .softcap = 5.0f,
         .scale = 0.1f,
         .how = SPREAD,
         .sinks = true},
        /* scores that are maxima */
        {.dims = make_dims(2, 2, 3, 200, 140, 24),
         .prompt = 140,
         .chunk_at = 150,
         .chunk = 10,
         .heavy = 70,
         .recent = 50,
         .policy = largest,
         .scale = 0.1f},
        /* several blocks for a head, learned sinks, a negative scale, logits far apart */
        {.dims = make_dims(1, 1, 3, 330, 300, 16),
         .prompt = 310,
         .chunk_at = 315,
         .chunk = 5,
         .heavy = 180,
         .recent = 100,
         .policy = plain,
         .scale = -1.0f,
         .sinks = true},
        {.dims = make_dims(2, 2, 2, 120, 60, 24),
         .prompt = 40,
         .chunk_at = 50,
         .chunk = 20,
         .heavy = 20,
         .recent = 20,
         .policy = plain,
         .scale = 0.1f,
         .how = SPREAD,
         .weird = true},
        {.dims = make_dims(1, 2, 3, 60, 40, 24),
         .prompt = 40,
         .chunk_at = 45,
         .chunk = 10,
         .heavy = 15,
         .recent = 15,
         .policy = plain,
         .scale = 0.1f,
         .sinks = true,
         .weird = true},
        /* more heads than a block has warps, and several windows of a text */
        {.dims = make_dims(2, 1, 17, 60, 30, 40),
         .prompt = 20,
         .chunk_at = 30,
         .chunk = 3,
         .heavy = 10,
         .recent = 8,
         .policy = all,
         .scale = 0.1f,
         .sinks = true},
        {.dims = make_dims(1, 1, 2, 60, 30, 7),
         .prompt = 30,
         .chunk_at = 40,
         .chunk = 3,
         .heavy = 10,
         .recent = 10,
         .policy = all,
         .scale = 0.0f,
         .how = SPREAD},
    };
    /* several tiles of queries and of slots; the last ones are partial */
    const chunk chunks[] = {
        {make_dims(1, 2, 2, 70, 150, 128), H2O_Q8, H2O_Q8, plain, .how = DENSE, .extreme = true},
        {make_dims(2, 2, 1, 80, 140, 96), H2O_S4, H2O_Q4, all, .pads = true, .how = SPREAD},
        {make_dims(1, 2, 10, 30, 190, 50), H2O_Q8, H2O_Q8, largest, 5.0f, SPREAD, .pads = true},
        {make_dims(1, 2, 1, 66, 100, 192), H2O_Q8, H2O_Q4, plain, .how = DENSE},
    };
    /* one or several parts, and turns of a block's warps; rows at every alignment */
    const one_step steps[] = {
        {.dims = make_dims(2, 2, 4, 1, 301, 128), .policy = all},
        {.dims = make_dims(1, 2, 9, 1, 40, 256), .policy = plain, .softcap = 5.0f, .sinks = true},
        {make_dims(2, 3, 1, 1, 77, 128), H2O_Q8, H2O_Q8, plain, 0.0f, .sinks = true},
        {make_dims(1, 2, 3, 1, 150, 64), H2O_Q8, H2O_Q8, largest, 0.0f, false},
        {make_dims(1, 3, 2, 1, 33, 200), H2O_Q8, H2O_Q8, all, .softcap = 5.0f},
        {make_dims(1, 2, 5, 1, 131, 128), H2O_Q8, H2O_Q4, all, 0.0f, false},
        {make_dims(1, 1, 8, 1, 20, 96), H2O_Q8, H2O_Q4, largest, .sinks = true},
        {make_dims(1, 1, 2, 1, 50, 256), H2O_Q8, H2O_Q4, plain, .softcap = 3.0f},
        {make_dims(1, 2, 3, 1, 140, 96), H2O_S4, H2O_Q4, all, 0.0f, false},
        {make_dims(2, 2, 5, 1, 131, 128), H2O_S4, H2O_Q4, plain, .softcap = 3.0f},
        {make_dims(1, 1, 2, 1, 50, 192), H2O_S4, H2O_Q4, largest, .sinks = true},
    };
    h2o_error error;
    CHECK(h2o_init(&error) == H2O_OK);
    test_parts();
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        for (size_t type = 1; type < 3; type++) {
            if (is_slow() && type != 1 + i % 2) continue;
            if (!ONE_DTYPE || dtypes[type] == H2O_F16) test_step(&steps[i], dtypes[type]);
        }
    }
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        for (size_t type = 1; type < 3; type++) {
            if (is_slow() && type != 1 + i % 2) continue;
            if (!ONE_DTYPE || dtypes[type] == H2O_F16) test_chunk(&chunks[i], dtypes[type]);
        }
    }
    test_quantized(H2O_Q8, 50, plain); /* rows of 52 bytes, */
    test_quantized(H2O_Q8, 31, all);   /* of 33, */
    test_quantized(H2O_Q4, 96, all);   /* of 50 and 60 */
    /* Under ThreadSanitizer, which takes a hundred times as long, the largest scene is left out. */
    for (size_t i = THREAD_SANITIZER ? 1 : 0; i < sizeof scenes / sizeof *scenes; i++) {
        for (size_t type = 0; type < 3; type++) {
            if (is_left_out("cuda", i + 1, type)) continue;
            if (ONE_DTYPE && dtypes[type] != H2O_F16) continue;
            scene s = scenes[i];
            s.dtype = dtypes[type];
            const h2o_ops *const kernels = &h2o_ops_generic;
            test_scene(&kernels, 1, &s, type + 1, play);
        }
    }
    return 0;
}
