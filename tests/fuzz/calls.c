/* calls.c - fuzz target: calls of every operation, checks and kernels included, with tensors of any
 * shape, layout and content. Each call must be rejected, or run within the memory that the tensors
 * span. Built by `make fuzz`. */
#define _GNU_SOURCE
#include "fuzz.h"
#include "policy.h"

enum { MOST_TENSORS = 22 };

/* ---- Tensors ----------------------------------------------------------- */

typedef struct {
    input in;
    h2o_dims dims;
    h2o_dtype dtype;
    void *memory[MOST_TENSORS];
    int used;
} bench;

static int64_t letter_size(const h2o_dims *d, char letter) {
    switch (letter) {
    case 'B':
        return d->B;
    case 'H':
        return d->H;
    case 'G':
        return d->G;
    case 'Q':
        return d->Q;
    case 'S':
        return d->S;
    case 'D':
        return d->D;
    case 'P':
        return d->S + 1;
    case 'F':
        return d->D > 1 ? d->D / 2 : 1;
    case 'T':
        return d->S * d->G;
    case '+':
        return d->G + 1;
    case 'K': /* bytes of a quantized key, and of a quantized value */
        return h2o_row_bytes(d->D % H2O_GROUP || d->Q % 2 ? H2O_Q8 : H2O_S4, d->D);
    case 'V':
        return h2o_row_bytes(d->D % H2O_GROUP ? H2O_Q8 : H2O_Q4, d->D);
    default:
        return letter - '0';
    }
}

/* Strides without gaps, with gaps, with the dimensions in another order, or of any kind. */
static void choose_strides(input *in, h2o_view *view) {
    const int64_t how = choose(in, 8);
    int order[H2O_MAX_DIMS] = {0, 1, 2, 3};
    if (how == 2 && view->ndim > 2) { /* [B, n, heads, D] as [B, heads, n, D] */
        order[1] = 2, order[2] = 1;
    }
    int64_t count = how == 3 ? 1 + choose(in, 3) : 1;
    for (int i = view->ndim - 1; i >= 0; i--) {
        const int at = order[i];
        view->stride[at] = count;
        if (__builtin_mul_overflow(count, view->shape[at], &count) || count > MOST_BYTES) count = 1;
        count += (how == 1 || how == 3 ? choose(in, 4) : 0);
    }
    if (how == 4) view->stride[choose(in, view->ndim)] *= -1;
    if (how == 5) view->stride[choose(in, view->ndim)] = 0;
    if (how == 6) view->stride[choose(in, view->ndim)] = choose(in, 256) - 128;
    if (how == 7 && rarely(in)) view->stride[choose(in, view->ndim)] = INT64_MAX / 2;
}

/* A tensor whose shape mostly fits the letters. */
static h2o_view choose_tensor(bench *w, const char *name, const char *letters, h2o_dtype dtype) {
    input *const in = &w->in;
    h2o_view view = {
        .name = name, .dtype = dtype, .device_type = 1, .ndim = (int32_t)strlen(letters)};
    for (int i = 0; i < view.ndim; i++) view.shape[i] = letter_size(&w->dims, letters[i]);
    if (rarely(in)) {
        switch (choose(in, 7)) {
        case 0:
            return (h2o_view){.name = name};
        case 1:
            view.shape[choose(in, view.ndim)] += choose(in, 5) - 2;
            break;
        case 2:
            view.shape[choose(in, view.ndim)] = INT64_MAX >> choose(in, 64);
            break;
        case 3:
            view.dtype = (h2o_dtype)(1 + choose(in, H2O_U8));
            break;
        case 4:
            view.ndim = (int32_t)choose(in, 7);
            break;
        case 5:
            view.device_type = (int32_t)choose(in, 20) - 2;
            break;
        case 6:
            view.readonly = true;
            break;
        }
    }
    int64_t below, above;
    const int64_t size = h2o_dtype_size(view.dtype);
    if (view.ndim < 1 || view.ndim > H2O_MAX_DIMS) return view; /* rejected before it is read */
    choose_strides(in, &view);
    if (!find_reach(view.shape, view.stride, view.ndim, size, &below, &above)) {
        memset(view.stride, 0, sizeof view.stride);
        view.shape[0] = INT64_MAX; /* rejected too; no tensor of that size can be made here */
        return view;
    }
    const int64_t bytes = above - below;
    uint8_t *const memory = w->memory[w->used++] = test_alloc((size_t)bytes);
    fill_bytes(memory, bytes, view.dtype, choose(in, 8));
    view.data = memory - below;
    return view;
}

/* Whether there are few enough elements for a loop. Broadcasting may make too many. */
static bool is_countable(const h2o_view *view, h2o_dtype dtype, int ndim) {
    bool small = view->data != NULL && view->dtype == dtype && view->ndim == ndim;
    for (int i = 0; i < ndim; i++) small &= view->shape[i] <= 1000;
    return small;
}

/* Fills a tensor of integers with mostly small ones. */
static void choose_numbers(bench *w, const h2o_view *view, int64_t most) {
    if (view->ndim > 2 || !is_countable(view, view->dtype, view->ndim)) return;
    for (int64_t i = 0; i < view->shape[0]; i++) {
        for (int64_t j = 0; j < (view->ndim > 1 ? view->shape[1] : 1); j++) {
            const int64_t x =
                rarely(&w->in) ? INT64_MIN >> choose(&w->in, 64) : choose(&w->in, most + 1);
            void *const at = h2o_at(view, i, j, 0);
            if (view->dtype == H2O_I32) *(int32_t *)at = (int32_t)x;
            if (view->dtype == H2O_I64) *(int64_t *)at = x;
            if (view->dtype == H2O_U8) *(uint8_t *)at = (uint8_t)(x != 0);
        }
    }
}

static h2o_view choose_mask(bench *w, const char *letters) {
    if (choose(&w->in, 2) == 0) return (h2o_view){.name = "mask"};
    const h2o_view mask = choose_tensor(w, "mask", letters, H2O_U8);
    choose_numbers(w, &mask, 3);
    return mask;
}

static h2o_view choose_budget(bench *w) {
    const bool own = choose(&w->in, 4) == 0;
    const h2o_view budget = choose_tensor(w, "budget", own ? "BG2" : "B2", H2O_I32);
    choose_numbers(w, &budget, w->dims.S);
    return budget;
}

/* Starts of the heads, mostly with equal numbers of slots. */
static h2o_view choose_starts(bench *w, bool sound) {
    const h2o_view starts = choose_tensor(w, "starts", "+", H2O_I32);
    choose_numbers(w, &starts, w->dims.S * w->dims.G);
    if (sound && is_countable(&starts, H2O_I32, 1)) {
        for (int64_t g = 0; g < starts.shape[0]; g++)
            *(int32_t *)h2o_at(&starts, g, 0, 0) = (int32_t)(g * w->dims.S);
    }
    return starts;
}

/* Rows of a store that has as many rows as the batch. Mostly each row occurs once, in reverse
 * order. Chosen last, like learned sinks. */
static h2o_view choose_rows(bench *w) {
    if (choose(&w->in, 3) != 1) return (h2o_view){.name = "rows"};
    const h2o_view rows = choose_tensor(w, "rows", "B", H2O_I32);
    choose_numbers(w, &rows, w->dims.B);
    if (!rarely(&w->in) && is_countable(&rows, H2O_I32, 1)) {
        for (int64_t b = 0; b < rows.shape[0]; b++)
            *(int32_t *)h2o_at(&rows, b, 0, 0) = (int32_t)(rows.shape[0] - 1 - b);
    }
    return rows;
}

/* Starts of the heads in each row, mostly equal in all rows. Also chosen last. */
static void choose_starts_by_row(bench *w, h2o_slots *slots) {
    if (!h2o_given(&slots->starts) || choose(&w->in, 3) != 1) return;
    const h2o_view all = slots->starts;
    slots->starts = choose_tensor(w, "starts", "B+", H2O_I32);
    choose_numbers(w, &slots->starts, w->dims.S * w->dims.G);
    if (rarely(&w->in) || !is_countable(&all, H2O_I32, 1)) return;
    if (!is_countable(&slots->starts, H2O_I32, 2)) return;
    for (int64_t b = 0; b < slots->starts.shape[0]; b++) {
        for (int64_t g = 0; g < slots->starts.shape[1] && g < all.shape[0]; g++)
            *(int32_t *)h2o_at(&slots->starts, b, g, 0) = *(const int32_t *)h2o_at(&all, g, 0, 0);
    }
}

/* Logarithms of row sums, rarely given. Also chosen last. */
static h2o_view choose_log_sums(bench *w, const char *name) {
    if (choose(&w->in, 4) != 1) return (h2o_view){.name = name};
    return choose_tensor(w, name, "BHQ", H2O_F32);
}

/* A store whose fields mostly agree: the first slots of each head are held. */
static h2o_slots choose_slots(bench *w, bool weighted) {
    input *const in = &w->in;
    const int64_t held = choose(in, w->dims.S + 1);
    const bool uneven = choose(in, 3) == 0, bytes = choose(in, 3) == 0;
    const h2o_dtype type = bytes ? H2O_U8 : w->dtype;
    const char *const rows = uneven ? (bytes ? "BTK" : "BTD") : bytes ? "BGSK" : "BGSD";
    const char *const others = uneven ? (bytes ? "BTV" : "BTD") : bytes ? "BGSV" : "BGSD";
    const char *const numbers = uneven ? "BT" : "BGS";
    h2o_slots s = {
        .keys = choose_tensor(w, "keys", rows, type),
        .values = choose_tensor(w, "values", others, type),
        .scores = choose_tensor(w, "scores", numbers, H2O_F32),
        .positions = choose_tensor(w, "positions", numbers, H2O_I32),
        .next_slot = choose_tensor(w, "next_slot", "BG", H2O_I32),
        .seen_tokens = choose_tensor(w, "seen_tokens", "B", H2O_I64),
        .budget = choose_budget(w),
        .evicted_score = choose_tensor(w, "evicted_score", "BG", H2O_F64),
        .norms = {.name = "norms"},
        .starts = {.name = "starts"},
        .rows = {.name = "rows"},
    };
    if (weighted) s.norms = choose_tensor(w, "norms", numbers, H2O_F32);
    const bool sound = !rarely(in);
    if (uneven) s.starts = choose_starts(w, sound);
    choose_numbers(w, &s.next_slot, w->dims.S + 1);
    choose_numbers(w, &s.seen_tokens, 2 * w->dims.S);
    const h2o_view *const p = &s.positions;
    if (sound && is_countable(&s.seen_tokens, H2O_I64, 1)) {
        for (int64_t b = 0; b < s.seen_tokens.shape[0]; b++)
            *(int64_t *)h2o_at(&s.seen_tokens, b, 0, 0) = held;
    }
    if (sound && is_countable(&s.next_slot, H2O_I32, 2)) {
        for (int64_t b = 0; b < s.next_slot.shape[0]; b++) {
            for (int64_t g = 0; g < s.next_slot.shape[1]; g++)
                *(int32_t *)h2o_at(&s.next_slot, b, g, 0) = (int32_t)held;
        }
    }
    if (sound && uneven && is_countable(p, H2O_I32, 2)) {
        for (int64_t i = 0; i < p->shape[0] * p->shape[1]; i++) {
            const int64_t slot = i % p->shape[1] % w->dims.S;
            *(int32_t *)h2o_at(p, i / p->shape[1], i % p->shape[1], 0) =
                slot < held ? (int32_t)slot : -1;
        }
    }
    if (sound && !uneven && is_countable(p, H2O_I32, 3)) {
        for (int64_t i = 0; i < p->shape[0] * p->shape[1] * p->shape[2]; i++) {
            const int64_t slot = i % p->shape[2], head = i / p->shape[2];
            int32_t *const at = h2o_at(p, head / p->shape[1], head % p->shape[1], slot);
            *at = slot < held ? (int32_t)slot : -1;
        }
    }
    return s;
}

/* None, or a table of angles with ranks of the keys. */
static h2o_rotary choose_rotary(bench *w) {
    h2o_rotary rotary = {.table = {.name = "table"}, .ranks = {.name = "ranks"}};
    if (choose(&w->in, 2) == 0) return rotary;
    rotary.table = choose_tensor(w, "table", "P2F", H2O_F32);
    rotary.ranks = choose_tensor(w, "ranks", "BGS", H2O_I32);
    return rotary;
}

/* Mostly none. Chosen last, so that older inputs still make the same calls. */
static h2o_view choose_sinks(bench *w) {
    if (choose(&w->in, 3) != 1) return (h2o_view){.name = "sink_logits"};
    return choose_tensor(w, "sink_logits", "H", H2O_F32);
}

/* ---- Numbers ----------------------------------------------------------- */

static float choose_float(input *in) {
    static const float some[] = {0.1f,  1.0f,  0.0f,     -0.1f,     0.5f, 0.99f,  30.0f, 1e-30f,
                                 3e38f, -1.0f, INFINITY, -INFINITY, NAN,  1e-45f, 2.0f,  1e30f};
    return some[choose(in, sizeof some / sizeof *some)];
}

static h2o_policy choose_policy(input *in) {
    return (h2o_policy){.sinks = (int32_t)(rarely(in) ? choose(in, 256) - 128 : choose(in, 4)),
                        .score_by = (h2o_score_by)choose(in, 3),
                        .decay = choose(in, 4) ? 1.0f : choose_float(in),
                        .value_weighted = choose(in, 4) == 3};
}

/* ---- Calls ------------------------------------------------------------- */

static void call_with(h2o_operation operation, void *params, h2o_call call) {
    h2o_error error;
    call.operation = operation;
    if (h2o_open(params, &call, &error) == H2O_OK) {
        CHECK(h2o_run(params, &call, &error) == H2O_OK);
    } else {
        CHECK(strlen(error.text) > 0);
    }
    h2o_close(&call);
}

static void call_operation(bench *w) {
    input *const in = &w->in;
    const h2o_operation operation = (h2o_operation)choose(in, H2O_OPERATIONS);
    const h2o_ops *const table = levels[choose(in, LEVELS)];
    const h2o_call call = {.table = has_level(table->name) ? table : NULL,
                           .exec = {.workers = 1 + (int)choose(in, 4),
                                    .run = in_turns,
                                    .workspace_limit = choose(in, 2)}};
    static const h2o_dtype dtypes[] = {H2O_F32, H2O_BF16, H2O_F16};
    w->dtype = dtypes[choose(in, 3)];
    w->dims = (h2o_dims){.B = 1 + choose(in, 3),
                         .G = 1 + choose(in, 3),
                         .R = 1 + choose(in, 3),
                         .Q = operation == H2O_STEP ? 1 : 1 + choose(in, 200),
                         .S = 1 + choose(in, 150),
                         .D = 1 + choose(in, 40)};
    w->dims.H = w->dims.G * w->dims.R;
    const h2o_policy policy = choose_policy(in);
    const float scale = choose_float(in), softcap = choose(in, 2) ? choose_float(in) : 0.0f;
    const h2o_view mask = choose_mask(w, operation == H2O_STEP ? "B1" : "BQ");
    const char *const fresh = operation == H2O_STEP ? "BG1D" : "BGQD";
    const h2o_view keys = choose_tensor(w, "keys", fresh, w->dtype);
    const h2o_view values = choose_tensor(w, "values", fresh, w->dtype);
    h2o_view query = {0}, out = {0}, scores = {0};
    if (operation != H2O_EVICT) {
        query = choose_tensor(w, "query", operation == H2O_STEP ? "BH1D" : "BHQD", w->dtype);
        out = choose_tensor(w, "out", operation == H2O_STEP ? "B1HD" : "BQHD", w->dtype);
    }
    if (operation != H2O_STEP) scores = choose_tensor(w, "scores", "BGQ", H2O_F32);
    switch (operation) {
    case H2O_ATTEND: {
        h2o_attend_params p = {.query = query,
                               .keys = keys,
                               .values = values,
                               .mask = mask,
                               .out = out,
                               .scores = scores,
                               .scale = scale,
                               .softcap = softcap,
                               .policy = policy};
        p.has_slots = choose(in, 2);
        if (p.has_slots) p.slots = choose_slots(w, false);
        p.sink_logits = choose_sinks(w);
        if (p.has_slots) p.slots.rows = choose_rows(w);
        if (p.has_slots) choose_starts_by_row(w, &p.slots);
        p.log_sums = choose_log_sums(w, "log_sums");
        p.known_log_sums = choose_log_sums(w, "known_log_sums");
        call_with(H2O_ATTEND, &p, call);
        break;
    }
    case H2O_EVICT: {
        h2o_evict_params p = {.keys = keys,
                              .values = values,
                              .scores = scores,
                              .mask = mask,
                              .policy = policy,
                              .slots = choose_slots(w, policy.value_weighted)};
        p.slots.rows = choose_rows(w);
        choose_starts_by_row(w, &p.slots);
        call_with(H2O_EVICT, &p, call);
        break;
    }
    case H2O_STEP: {
        h2o_step_params p = {.query = query,
                             .key = keys,
                             .value = values,
                             .mask = mask,
                             .out = out,
                             .policy = policy,
                             .scale = scale,
                             .softcap = softcap,
                             .slots = choose_slots(w, policy.value_weighted),
                             .rotary = choose_rotary(w)};
        p.sink_logits = choose_sinks(w);
        p.slots.rows = choose_rows(w);
        choose_starts_by_row(w, &p.slots);
        call_with(H2O_STEP, &p, call);
        break;
    }
    default: {
        h2o_simulate_params p = {.query = query,
                                 .keys = keys,
                                 .values = values,
                                 .mask = mask,
                                 .out = out,
                                 .scores = scores,
                                 .policy = policy,
                                 .scale = scale,
                                 .softcap = softcap,
                                 .budget = choose_budget(w),
                                 .prompt = choose_tensor(w, "prompt", "B", H2O_I32),
                                 .evicted_at = choose_tensor(w, "evicted_at", "BGQ", H2O_I32)};
        if (choose(&w->in, 4) == 0) {
            p.stored_keys = choose_tensor(w, "stored_keys", "BGQK", H2O_U8);
            p.stored_values = choose_tensor(w, "stored_values", "BGQV", H2O_U8);
        }
        choose_numbers(w, &p.prompt, p.dims.Q);
        p.sink_logits = choose_sinks(w);
        call_with(H2O_SIMULATE, &p, call);
    }
    }
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    h2o_error error;
    (void)argc, (void)argv;
    CHECK(h2o_init(&error) == H2O_OK);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    bench w = {.in = {data, size}};
    call_operation(&w);
    for (int i = 0; i < w.used; i++) free(w.memory[i]);
    return 0;
}
