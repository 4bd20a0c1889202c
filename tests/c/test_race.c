/* test_race.c - calls while another thread writes to their tensors. Wrong answers and errors are
 * the caller's own fault, but no address may depend on what other threads can change.
 * AddressSanitizer finds mistakes. ThreadSanitizer checks only what the core promises to read and
 * write as single numbers; about the rest, where threads share keys, values and positions, it would
 * rightly complain. */
#define _GNU_SOURCE
#include "tensors.h"

#include <stdatomic.h>

enum { B = 3, G = 2, R = 2, S = 40, D = 12, F = 4, Q = 70, ROUNDS = 80 };

/* What the slots have: nothing special, norms of values, rows of bytes, keys without rotation, a
 * different number of slots for each head, or rows that the call selects by number. */
typedef enum { PLAIN, WEIGHTED, BYTES, ROLLED, UNEVEN, NUMBERED, KINDS } kind;

typedef struct {
    kind kind;
    h2o_slots slots;     /* [B,G,S], ... */
    h2o_slots as_passed; /* ... or [B,G*S] with starts */
    h2o_rotary rotary;
    h2o_view query, keys, values, mask, prompt; /* [B,n,Q,D] */
    h2o_view stored, evicted_at;
    atomic_bool stop;
    bool positions_too;
} stage;

static h2o_view first_columns(const h2o_view *view, int64_t count) {
    h2o_view part = *view;
    part.shape[view->ndim == 2 ? 1 : 2] = count;
    return part;
}

/* A tensor of B rows of G heads as one whose heads share one axis. */
static h2o_view joined(const h2o_view *view) {
    h2o_view all = *view;
    all.ndim--;
    all.shape[1] = view->shape[1] * view->shape[2];
    all.shape[2] = view->shape[3];
    all.stride[1] = view->stride[2];
    all.stride[2] = view->stride[3];
    return all;
}

static void make_slots_of(stage *st, const h2o_dims *d) {
    h2o_slots *const slots = &st->slots;
    *slots =
        make_slots(DENSE, d, st->kind == BYTES ? H2O_Q8 : H2O_F32, 12, 8, st->kind == WEIGHTED);
    if (st->kind == BYTES) {
        st->stored = make_tensor(H2O_U8, 4, B, G, Q, h2o_row_bytes(H2O_Q8, D));
    }
    if (st->kind == ROLLED) {
        st->rotary.table = make_tensor(H2O_F32, 3, S, 2, F, 1);
        st->rotary.ranks = make_tensor(H2O_I32, 3, B, G, S, 1);
        FILL(float, st->rotary.table, 0.7f);
    }
    if (st->kind == NUMBERED) slots->rows = make_tensor(H2O_I32, 1, B, 1, 1, 1);
    st->as_passed = *slots;
    if (st->kind == UNEVEN) {
        slots->starts = make_tensor(H2O_I32, 1, G + 1, 1, 1, 1);
        st->as_passed.starts = slots->starts;
        st->as_passed.keys = joined(&slots->keys);
        st->as_passed.values = joined(&slots->values);
        st->as_passed.scores = joined(&slots->scores);
        st->as_passed.positions = joined(&slots->positions);
    }
}

static void make_stage(stage *st) {
    const h2o_dims d = make_dims(B, G, R, Q, S, D);
    test_random random = {.state = 3};
    make_slots_of(st, &d);
    st->query = make_tensor(H2O_F32, 4, B, G * R, Q, D);
    st->keys = make_tensor(H2O_F32, 4, B, G, Q, D);
    st->values = make_tensor(H2O_F32, 4, B, G, Q, D);
    st->mask = make_tensor(H2O_U8, 2, B, Q, 1, 1);
    st->prompt = make_tensor(H2O_I32, 1, B, 1, 1, 1);
    st->evicted_at = make_tensor(H2O_I32, 3, B, G, Q, 1);
    fill_tensor(&st->query, 0.02f, &random);
    fill_tensor(&st->keys, 0.02f, &random);
    fill_tensor(&st->values, 0.02f, &random);
    FILL(uint8_t, st->mask, 1);
    FILL(int32_t, st->prompt, 5);
}

static void free_stage(const stage *st) {
    const h2o_view *const views[] = {&st->query,           &st->keys,
                                     &st->values,          &st->mask,
                                     &st->prompt,          &st->evicted_at,
                                     &st->slots.keys,      &st->slots.values,
                                     &st->slots.scores,    &st->slots.positions,
                                     &st->slots.next_slot, &st->slots.seen_tokens,
                                     &st->slots.budget,    &st->slots.evicted_score,
                                     &st->slots.norms,     &st->slots.starts,
                                     &st->slots.rows,      &st->rotary.table,
                                     &st->rotary.ranks,    &st->stored};
    for (size_t i = 0; i < sizeof views / sizeof *views; i++) free(views[i]->data);
}

/* ---- The thread that disturbs --------------------------------------------- */

#define DISTURB(type, view, i, j, k, x)                                                            \
    __atomic_store_n(&AT(type, view, i, j, k), (type)(x), __ATOMIC_RELAXED)

/* Writes to numbers of a slot that the core reads and writes without checking. */
static void disturb_slot(stage *st, int64_t b, int64_t g, int64_t s, int64_t any) {
    const h2o_slots *const slots = &st->slots;
    const int64_t no_number = 0x7fc00000, large = any * 1000003;
    DISTURB(int32_t, slots->positions, b, g, s, any);
    DISTURB(int32_t, slots->scores, b, g, s, any == 0 ? no_number : large);
    if (st->kind == WEIGHTED) DISTURB(int32_t, slots->norms, b, g, s, no_number);
    if (st->kind == ROLLED) DISTURB(int32_t, st->rotary.ranks, b, g, s, any % 2 ? any : large);
}

static void *disturb(void *argument) {
    stage *const st = argument;
    test_random random = {.state = 11};
    while (!st->stop) {
        const int64_t b = random_int(&random, 0, B - 1), g = random_int(&random, 0, G - 1);
        const int64_t any = random_int(&random, -1, 200); /* mostly more than there are slots */
        DISTURB(int32_t, st->slots.next_slot, b, g, 0, any);
        DISTURB(int64_t, st->slots.seen_tokens, b, 0, 0, random_int(&random, 0, 60));
        DISTURB(int32_t, st->slots.budget, b, random_int(&random, 0, 1), 0,
                random_int(&random, 0, 60));
        DISTURB(uint8_t, st->mask, b, random_int(&random, 0, Q - 1), 0, random_int(&random, 0, 1));
        DISTURB(int32_t, st->prompt, b, 0, 0, random_int(&random, 1, 90));
        if (st->kind == UNEVEN && any % 16 == 0) {
            DISTURB(int32_t, st->slots.starts, random_int(&random, 0, G), 0, 0, any);
        }
        if (st->kind == NUMBERED && any % 4 == 0)
            DISTURB(int32_t, st->slots.rows, b, 0, 0, any % B);
        if (st->kind == NUMBERED && any % 16 == 0) DISTURB(int32_t, st->slots.rows, b, 0, 0, any);
        for (int i = 0; st->positions_too && i < 8; i++) {
            disturb_slot(st, b, g, random_int(&random, 0, S - 1), any);
        }
    }
    return NULL;
}

/* ---- The threads that call ------------------------------------------------- */

static void try_operation(h2o_operation operation, void *params) {
    h2o_error error;
    h2o_call call = {.operation = operation, .exec = {.workers = 2}};
    if (h2o_open(params, &call, &error) == H2O_OK) {
        CHECK(h2o_run(params, &call, &error) == H2O_OK);
    }
    h2o_close(&call);
}

/* Restores slots with which a step or an eviction can begin; otherwise hardly any call would pass
 * the checks. The budget is one that they reach, or one that exceeds the slots. */
static void mend(stage *st, test_random *random) {
    const int64_t held = random_int(random, 0, 20), heavy = random_int(random, 0, 1) ? 12 : S + 9;
    for (int64_t g = 0; g <= G && st->kind == UNEVEN; g++) {
        const int64_t start = g * S;
        DISTURB(int32_t, st->slots.starts, g, 0, 0, start);
    }
    for (int64_t b = 0; b < B; b++) {
        if (st->kind == NUMBERED) DISTURB(int32_t, st->slots.rows, b, 0, 0, B - 1 - b);
        DISTURB(int64_t, st->slots.seen_tokens, b, 0, 0, held);
        DISTURB(int32_t, st->slots.budget, b, 0, 0, heavy);
        DISTURB(int32_t, st->slots.budget, b, 1, 0, 8);
        for (int64_t g = 0; g < G; g++) {
            DISTURB(int32_t, st->slots.next_slot, b, g, 0, held);
            for (int64_t s = 0; s < S; s++) {
                DISTURB(int32_t, st->slots.positions, b, g, s, s < held ? s : -1);
            }
        }
    }
}

static void *call_all(void *argument) {
    stage *const st = argument;
    test_random random = {.state = (uint64_t)(uintptr_t)&random};
    const h2o_view out = make_tensor(H2O_F32, 4, B, Q, G * R, D);
    const h2o_view scores = make_tensor(H2O_F32, 3, B, G, Q, 1);
    const h2o_policy policy = {.sinks = 2,
                               .decay = 0.9f,
                               .score_by = H2O_SCORE_MEAN,
                               .value_weighted = st->kind == WEIGHTED};
    for (int i = 0; i < ROUNDS; i++) {
        const int64_t n = random_int(&random, 1, Q);
        h2o_attend_params attend = {.query = first_columns(&st->query, n),
                                    .keys = first_columns(&st->keys, n),
                                    .values = first_columns(&st->values, n),
                                    .mask = first_columns(&st->mask, n),
                                    .has_slots = st->positions_too,
                                    .slots = st->as_passed,
                                    .out = out,
                                    .scores = scores,
                                    .scale = 0.3f,
                                    .policy = {.decay = 0.9f}};
        attend.out.shape[1] = attend.scores.shape[2] = n;
        try_operation(H2O_ATTEND, &attend);
        mend(st, &random);
        h2o_evict_params evict = {.keys = attend.keys,
                                  .values = attend.values,
                                  .scores = attend.scores,
                                  .mask = attend.mask,
                                  .slots = st->as_passed,
                                  .policy = policy};
        try_operation(H2O_EVICT, &evict);
        h2o_step_params step = {.query = first_columns(&st->query, 1),
                                .key = first_columns(&st->keys, 1),
                                .value = first_columns(&st->values, 1),
                                .mask = first_columns(&st->mask, 1),
                                .slots = st->as_passed,
                                .out = first_columns(&out, 1),
                                .rotary = st->rotary,
                                .policy = policy,
                                .scale = 0.3f};
        step.out = out;
        step.out.shape[1] = 1;
        mend(st, &random);
        try_operation(H2O_STEP, &step);
        h2o_simulate_params simulate = {.query = st->query,
                                        .keys = st->keys,
                                        .values = st->values,
                                        .mask = st->mask,
                                        .prompt = st->prompt,
                                        .budget = st->slots.budget,
                                        .stored_keys = st->stored,
                                        .stored_values = st->stored,
                                        .out = out,
                                        .scores = scores,
                                        .evicted_at = st->evicted_at,
                                        .policy = policy,
                                        .scale = 0.3f};
        if (i % 4 == 0) try_operation(H2O_SIMULATE, &simulate);
    }
    free(out.data);
    free(scores.data);
    return NULL;
}

/* Runs `callers` threads that share the slots, and one thread that disturbs them. */
static void play(kind kind, int callers, bool positions_too) {
    stage st = {.kind = kind, .positions_too = positions_too};
    pthread_t disturber, caller[2];
    make_stage(&st);
    CHECK(pthread_create(&disturber, NULL, disturb, &st) == 0);
    for (int i = 0; i < callers; i++) CHECK(pthread_create(&caller[i], NULL, call_all, &st) == 0);
    for (int i = 0; i < callers; i++) CHECK(pthread_join(caller[i], NULL) == 0);
    st.stop = true;
    CHECK(pthread_join(disturber, NULL) == 0);
    free_stage(&st);
}

int main(void) {
    h2o_error error;
    CHECK(h2o_init(&error) == H2O_OK);
    for (kind kind = 0; kind < KINDS; kind++) {
        play(kind, 1, false);
        if (THREAD_SANITIZER) continue;
        play(kind, 1, true);
        play(kind, 2, true);
    }
    return 0;
}
