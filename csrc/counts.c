/* counts.c - copies the small tensors of a call into h2o_counts, and checks their values.
 *
 * lengths [B], budget [B,2] or [B,G,2], free [B,G], starts [G+1], prompt [B] and mask [B,Q] decide
 * how much a kernel reads and where it writes. Another thread may change them meanwhile, so each
 * number is loaded once, here; kernels use the copies only.
 */
#include "operations.h"
#include "policy.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>

/* ---- Reading ----------------------------------------------------------- */

/* One load each: a compiler may not read again what the caller may have changed. */
static int32_t i32_at(const h2o_view *view, int64_t i, int64_t j, int64_t k) {
    return __atomic_load_n((const int32_t *)h2o_at(view, i, j, k), __ATOMIC_RELAXED);
}

static int64_t i64_at(const h2o_view *view, int64_t i) {
    return __atomic_load_n((const int64_t *)h2o_at(view, i, 0, 0), __ATOMIC_RELAXED);
}

static bool is_token(const h2o_view *mask, int64_t b, int64_t q) {
    return __atomic_load_n((const uint8_t *)h2o_at(mask, b, q, 0), __ATOMIC_RELAXED) != 0;
}

/* ---- Memory ------------------------------------------------------------ */

/* The memory of h2o_counts: rows first, which have the strictest alignment, heads, columns. */
typedef struct {
    h2o_row *rows;    /* [B], then [B] of the dense part */
    h2o_head *heads;  /* [B][G] */
    int32_t *columns; /* [B][Q] */
} memory_parts;

static size_t rows_bytes(const h2o_dims *dims) { return 2 * (size_t)dims->B * sizeof(h2o_row); }

static size_t heads_bytes(const h2o_dims *dims) {
    return (size_t)(dims->B * dims->G) * sizeof(h2o_head);
}

size_t h2o_counts_bytes(const h2o_dims *dims, const h2o_view *mask) {
    const size_t columns = h2o_given(mask) ? (size_t)(dims->B * dims->Q) : 0;
    return rows_bytes(dims) + heads_bytes(dims) + columns * sizeof(int32_t);
}

static memory_parts divide(void *memory, const h2o_dims *dims) {
    char *const heads = (char *)memory + rows_bytes(dims);
    return (memory_parts){memory, (h2o_head *)(void *)heads,
                          (int32_t *)(void *)(heads + heads_bytes(dims))};
}

/* The rows' new tokens; every other field is 0. */
static void count_tokens(const memory_parts *parts, const h2o_dims *dims, const h2o_view *mask) {
    for (int64_t b = 0; b < dims->B; b++) {
        h2o_row *const row = &parts->rows[b];
        *row = (h2o_row){.tokens = dims->Q};
        if (h2o_given(mask)) {
            int32_t *const columns = parts->columns + b * dims->Q;
            row->tokens = 0;
            for (int64_t q = 0; q < dims->Q; q++) {
                if (is_token(mask, b, q)) {
                    columns[row->tokens++] = (int32_t)q;
                }
            }
            row->columns = columns;
        }
    }
}

/* ---- Checking ---------------------------------------------------------- */

/* "[b]" where a row's heads have one budget, "[b, g]" where each has its own. */
static const char *budget_index(const h2o_view *budget, int64_t b, int64_t g, char text[48]) {
    const bool per_head = budget->ndim == 3;
    snprintf(text, 48, per_head ? "[%" PRId64 ", %" PRId64 "]" : "[%" PRId64 "]", b, g);
    return text;
}

static int count_budget(const h2o_view *budget, int64_t b, int64_t g, const h2o_policy *policy,
                        h2o_head *head, h2o_error *error) {
    const bool per_head = budget->ndim == 3;
    char index[48];
    head->heavy = per_head ? i32_at(budget, b, g, 0) : i32_at(budget, b, 0, 0);
    head->recent = per_head ? i32_at(budget, b, g, 1) : i32_at(budget, b, 1, 0);
    if (head->heavy < 0 || head->recent < 0) {
        return h2o_fail(error, H2O_EVALUE, "%s%s: is (%d, %d), wanted at least 0", budget->name,
                        budget_index(budget, b, g, index), (int)head->heavy, (int)head->recent);
    }
    head->budget = h2o_policy_budget(policy, head->heavy, head->recent);
    if (head->budget == 0) {
        return h2o_fail(error, H2O_EVALUE,
                        "%s%s: sinks + heavy + recent is 0, wanted at least 1 token", budget->name,
                        budget_index(budget, b, g, index));
    }
    return H2O_OK;
}

/* Where each head's slots are. All rows have the same; dims->S becomes the most that
 * any head has. */
static int count_slots(const h2o_slots *slots, h2o_dims *dims, h2o_head *heads, h2o_error *error) {
    const h2o_view *const starts = &slots->starts;
    const int64_t all = dims->S;
    int64_t most = h2o_given(starts) ? 0 : all;
    for (int64_t g = 0; g < dims->G; g++) {
        heads[g] = (h2o_head){.offset = g, .slots = all};
        if (h2o_given(starts)) {
            const int64_t begin = i32_at(starts, g, 0, 0), end = i32_at(starts, g + 1, 0, 0);
            if (begin < 0 || end <= begin || end > all) {
                return h2o_fail(error, H2O_EVALUE,
                                "%s[%" PRId64 "]: slots %" PRId64 "..%" PRId64
                                ", wanted at least one of 0..%" PRId64,
                                starts->name, g, begin, end - 1, all - 1);
            }
            heads[g].offset = begin;
            heads[g].slots = end - begin;
            most = heads[g].slots > most ? heads[g].slots : most;
            if (g > 0 && begin < heads[g - 1].offset + heads[g - 1].slots) {
                return h2o_fail(error, H2O_EVALUE,
                                "%s: heads %" PRId64 " and %" PRId64 " share slots, wanted none",
                                starts->name, g - 1, g);
            }
        }
    }
    for (int64_t i = dims->G; i < dims->B * dims->G; i++) {
        heads[i] = heads[i % dims->G];
    }
    dims->S = most;
    return H2O_OK;
}

static int count_length(const h2o_view *lengths, int64_t b, h2o_row *row, h2o_error *error) {
    row->length = i64_at(lengths, b);
    if (row->length < 0 || row->length > INT32_MAX - row->tokens) {
        return h2o_fail(error, H2O_EVALUE,
                        "%s[%" PRId64 "]: is %" PRId64 ", wanted 0..%d less the new tokens",
                        lengths->name, b, row->length, INT32_MAX);
    }
    return H2O_OK;
}

/* A row of the store and its heads: what they hold before the call. */
static int count_row(const h2o_slots *slots, const h2o_policy *policy, const h2o_dims *dims,
                     int64_t b, const memory_parts *parts, h2o_error *error) {
    h2o_row *const row = &parts->rows[b];
    int status = count_length(&slots->lengths, b, row, error);
    for (int64_t g = 0; g < dims->G && status == H2O_OK; g++) {
        h2o_head *const head = &parts->heads[b * dims->G + g];
        status = count_budget(&slots->budget, b, g, policy, head, error);
        head->held = h2o_policy_held(head->budget, row->length);
    }
    return status;
}

/* Slots 0..held hold what lengths and budget say: otherwise evict would have more
 * keys than are to be kept. */
static int check_filled(const h2o_slots *slots, int64_t b, int64_t g, const h2o_head *head,
                        h2o_error *error) {
    const int32_t *const positions = h2o_at(&slots->positions, b, head->offset, 0); /* [slots] */
    const int64_t held = head->held;
    int64_t filled = 0, early = 0;
    for (int64_t s = 0; s < head->slots; s++) {
        filled += positions[s] >= 0;
        early += positions[s] >= 0 && s <= held;
    }
    if (filled == held && early == held) {
        return H2O_OK;
    }
    return h2o_fail(error, H2O_EVALUE,
                    "%s[%" PRId64 ", %" PRId64 "]: %" PRId64 " of the slots are filled, %" PRId64
                    " of these among the first %" PRId64
                    ", but lengths and budget say that %" PRId64 " are",
                    slots->positions.name, b, g, filled, early, held + 1, held);
}

/* ---- Operations -------------------------------------------------------- */

int h2o_count_attend(void *operands, void *memory, h2o_error *error) {
    h2o_attend_params *const params = operands;
    const memory_parts parts = divide(memory, &params->dims);
    count_tokens(&parts, &params->dims, &params->mask);
    params->counts = (h2o_counts){.rows = parts.rows, .heads = parts.heads};
    if (!params->has_slots) return H2O_OK;
    return count_slots(&params->slots, &params->dims, parts.heads, error);
}

int h2o_count_evict(void *operands, void *memory, h2o_error *error) {
    h2o_evict_params *const params = operands;
    h2o_dims *const dims = &params->dims;
    const h2o_slots *const slots = &params->slots;
    const memory_parts parts = divide(memory, dims);
    count_tokens(&parts, dims, &params->mask);
    int status = count_slots(slots, dims, parts.heads, error);
    for (int64_t b = 0; b < dims->B && status == H2O_OK; b++) {
        status = count_row(slots, &params->policy, dims, b, &parts, error);
        for (int64_t g = 0; g < dims->G && status == H2O_OK; g++) {
            const h2o_head *const head = &parts.heads[b * dims->G + g];
            const int64_t keeps = h2o_policy_held(head->budget, head->held + parts.rows[b].tokens);
            if (keeps > head->slots) {
                return h2o_fail(error, H2O_EVALUE,
                                "%s: has %" PRId64 " slots, but row %" PRId64 " is to keep %" PRId64
                                " tokens; make larger slots",
                                slots->keys.name, head->slots, b, keeps);
            }
            status = check_filled(slots, b, g, head, error);
        }
    }
    params->counts = (h2o_counts){.rows = parts.rows, .heads = parts.heads};
    return status;
}

static int count_free(const h2o_slots *slots, int64_t b, int64_t g, h2o_head *head,
                      h2o_error *error) {
    const int32_t free_slot = i32_at(&slots->free, b, g, 0);
    head->free = free_slot;
    if (free_slot < 0 || free_slot > head->held) {
        return h2o_fail(error, H2O_EVALUE,
                        "%s[%" PRId64 ", %" PRId64 "]: is %d, wanted 0..%" PRId64
                        ", as the row holds %" PRId64 " tokens",
                        slots->free.name, b, g, (int)free_slot, head->held, head->held);
    }
    return H2O_OK;
}

int h2o_count_step(void *operands, void *memory, h2o_error *error) {
    h2o_step_params *const params = operands;
    h2o_dims *const dims = &params->dims;
    const h2o_slots *const slots = &params->slots;
    const memory_parts parts = divide(memory, dims);
    count_tokens(&parts, dims, &params->mask);
    int status = count_slots(slots, dims, parts.heads, error);
    for (int64_t b = 0; b < dims->B && status == H2O_OK; b++) {
        status = count_row(slots, &params->policy, dims, b, &parts, error);
        for (int64_t g = 0; g < dims->G && status == H2O_OK && parts.rows[b].tokens > 0; g++) {
            h2o_head *const head = &parts.heads[b * dims->G + g];
            if (head->held >= head->slots) {
                return h2o_fail(error, H2O_EVALUE,
                                "%s: all %" PRId64 " slots of row %" PRId64
                                " are taken; make larger slots",
                                slots->keys.name, head->slots, b);
            }
            if (h2o_given(&params->rotary.table) && head->held >= dims->P) {
                return h2o_fail(error, H2O_EVALUE,
                                "%s: has angles of %" PRId64 " ranks, but row %" PRId64
                                " holds %" PRId64 " tokens and gets one more",
                                params->rotary.table.name, dims->P, b, head->held);
            }
            status = count_free(slots, b, g, head, error);
        }
    }
    params->counts = (h2o_counts){.rows = parts.rows, .heads = parts.heads};
    return status;
}

/* Until the budget of some head is full nothing is evicted, however short the prompt. But in a
 * quantised store (stored) the tokens after the prompt see what is stored. */
static int64_t dense_tokens(const h2o_row *row, const h2o_head *heads, int64_t G, int64_t prompt,
                            bool stored) {
    int64_t budget = stored ? 0 : heads[0].budget;
    for (int64_t g = 1; g < G; g++) {
        budget = heads[g].budget < budget ? heads[g].budget : budget;
    }
    return h2o_policy_held(budget > prompt ? budget : prompt, row->tokens);
}

int h2o_count_simulate(void *operands, void *memory, h2o_error *error) {
    h2o_simulate_params *const params = operands;
    const h2o_dims *const dims = &params->dims;
    const memory_parts parts = divide(memory, dims);
    count_tokens(&parts, dims, &params->mask);
    for (int64_t b = 0; b < dims->B; b++) {
        h2o_head *const heads = parts.heads + b * dims->G;
        const int32_t prompt = i32_at(&params->prompt, b, 0, 0);
        if (prompt < 1) {
            return h2o_fail(error, H2O_EVALUE, "%s[%" PRId64 "]: is %d, wanted at least 1",
                            params->prompt.name, b, (int)prompt);
        }
        for (int64_t g = 0; g < dims->G; g++) {
            heads[g] = (h2o_head){0};
            const int status =
                count_budget(&params->budget, b, g, &params->policy, &heads[g], error);
            if (status != H2O_OK) return status;
        }
        parts.rows[dims->B + b] = parts.rows[b];
        parts.rows[dims->B + b].tokens =
            dense_tokens(&parts.rows[b], heads, dims->G, prompt, h2o_given(&params->stored_keys));
    }
    params->counts = (h2o_counts){parts.rows, parts.heads, parts.rows + dims->B};
    return H2O_OK;
}
