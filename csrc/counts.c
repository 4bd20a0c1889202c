/* counts.c - copies the small tensors of a call into h2o_counts and checks their values: see
 * operands.h.
 *
 * seen_tokens [Z], budget [Z,2] or [Z,G,2], next_slot [Z,G], starts [G+1] or [Z,G+1], rows [B],
 * prompt [B] and mask [B,Q] determine how much a kernel reads and where it writes. Another thread
 * may change them meanwhile, so each number is loaded once, here or in the operation's file, and
 * kernels use only the copies.
 */
#include "operands.h"
#include "policy.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* ---- Memory ------------------------------------------------------------ */

static size_t rows_bytes(const h2o_dims *dims) { return 2 * (size_t)dims->B * sizeof(h2o_row); }

static size_t heads_bytes(const h2o_dims *dims) {
    return (size_t)(dims->B * dims->G) * sizeof(h2o_head);
}

static size_t taken_bytes(const h2o_dims *dims) { return ((size_t)dims->Z + 63) / 64 * 8; }

size_t h2o_counts_bytes(const h2o_dims *dims, const h2o_view *mask) {
    const size_t columns = h2o_given(mask) ? (size_t)(dims->B * dims->Q) : 0;
    return rows_bytes(dims) + heads_bytes(dims) + taken_bytes(dims) + columns * sizeof(int32_t);
}

/* The parts are in order of decreasing alignment. */
static h2o_counts_memory divide(void *memory, const h2o_dims *dims) {
    char *const heads = (char *)memory + rows_bytes(dims);
    char *const taken = heads + heads_bytes(dims);
    return (h2o_counts_memory){memory, (h2o_head *)(void *)heads, (uint64_t *)(void *)taken,
                               (int32_t *)(void *)(taken + taken_bytes(dims))};
}

h2o_counts_memory h2o_count_tokens(void *memory, const h2o_dims *dims, const h2o_view *mask) {
    const h2o_counts_memory counted = divide(memory, dims);
    for (int64_t b = 0; b < dims->B; b++) {
        h2o_row *const row = &counted.rows[b];
        *row = (h2o_row){.tokens = dims->Q};
        if (h2o_given(mask)) {
            int32_t *const columns = counted.columns + b * dims->Q;
            row->tokens = 0;
            for (int64_t q = 0; q < dims->Q; q++) {
                const uint8_t *const token = h2o_at(mask, b, q, 0);
                if (__atomic_load_n(token, __ATOMIC_RELAXED)) columns[row->tokens++] = (int32_t)q;
            }
            row->columns = columns;
        }
    }
    return counted;
}

/* ---- Checking ---------------------------------------------------------- */

/* "[b]" if a row's heads share one budget, "[b, g]" if each has its own. */
static const char *budget_index(const h2o_view *budget, int64_t b, int64_t g, char text[48]) {
    const bool per_head = budget->ndim == 3;
    snprintf(text, 48, per_head ? "[%" PRId64 ", %" PRId64 "]" : "[%" PRId64 "]", b, g);
    return text;
}

int h2o_count_budget(const h2o_view *budget, int64_t b, int64_t g, const h2o_policy *policy,
                     h2o_head *head, h2o_error *error) {
    const bool per_head = budget->ndim == 3;
    char index[48];
    head->heavy = per_head ? h2o_load_i32(budget, b, g, 0) : h2o_load_i32(budget, b, 0, 0);
    head->recent = per_head ? h2o_load_i32(budget, b, g, 1) : h2o_load_i32(budget, b, 1, 0);
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

/* Finds the row of the slots that batch row b uses. */
static int count_place(const h2o_view *rows, const h2o_dims *dims, int64_t b, uint64_t *taken,
                       int64_t *row, h2o_error *error) {
    *row = h2o_given(rows) ? h2o_load_i32(rows, b, 0, 0) : b;
    if (!h2o_given(rows)) return H2O_OK;
    if (*row < 0 || *row >= dims->Z) {
        return h2o_fail(error, H2O_EVALUE, "%s[%" PRId64 "]: is %" PRId64 ", wanted 0..%" PRId64,
                        rows->name, b, *row, dims->Z - 1);
    }
    const uint64_t bit = (uint64_t)1 << *row % 64;
    if (taken[*row / 64] & bit) {
        return h2o_fail(error, H2O_EVALUE,
                        "%s[%" PRId64 "]: is %" PRId64
                        " like an earlier entry, wanted distinct rows",
                        rows->name, b, *row);
    }
    taken[*row / 64] |= bit;
    return H2O_OK;
}

/* Where the slots of head g of a row begin; for g = G, where those of the last head end. */
static int64_t start_at(const h2o_view *starts, int64_t row, int64_t g) {
    return starts->ndim == 2 ? h2o_load_i32(starts, row, g, 0) : h2o_load_i32(starts, g, 0, 0);
}

/* Finds where the slots of each head of a row lie on an axis of `all` slots. */
static int count_extents(const h2o_view *starts, int64_t row, const h2o_dims *dims, int64_t all,
                         h2o_head *heads, h2o_error *error) {
    char of_row[24] = "";
    if (starts->ndim == 2) snprintf(of_row, sizeof of_row, "%" PRId64 ", ", row);
    for (int64_t g = 0; g < dims->G; g++) {
        heads[g] = (h2o_head){.row = row, .offset = g, .slots = all};
        if (!h2o_given(starts)) continue;
        const int64_t begin = start_at(starts, row, g), end = start_at(starts, row, g + 1);
        if (begin < 0 || end <= begin || end > all) {
            return h2o_fail(error, H2O_EVALUE,
                            "%s[%s%" PRId64 "]: slots %" PRId64 "..%" PRId64
                            ", wanted at least one within 0..%" PRId64,
                            starts->name, of_row, g, begin, end - 1, all - 1);
        }
        if (g > 0 && begin < heads[g - 1].offset + heads[g - 1].slots) {
            return h2o_fail(error, H2O_EVALUE,
                            "%s: heads %" PRId64 " and %" PRId64 " share slots, wanted none shared",
                            starts->name, g - 1, g);
        }
        heads[g].offset = begin;
        heads[g].slots = end - begin;
    }
    return H2O_OK;
}

int h2o_count_slots(const h2o_slots *slots, h2o_dims *dims, const h2o_counts_memory *memory,
                    h2o_error *error) {
    const int64_t all = dims->S;
    int64_t most = 1;
    memset(memory->taken, 0, taken_bytes(dims));
    for (int64_t b = 0; b < dims->B; b++) {
        h2o_head *const heads = memory->heads + b * dims->G;
        int64_t row;
        int status = count_place(&slots->rows, dims, b, memory->taken, &row, error);
        if (status == H2O_OK) status = count_extents(&slots->starts, row, dims, all, heads, error);
        if (status != H2O_OK) return status;
        for (int64_t g = 0; g < dims->G; g++) most = heads[g].slots > most ? heads[g].slots : most;
    }
    dims->S = most;
    return H2O_OK;
}

static int count_length(const h2o_view *lengths, int64_t b, h2o_row *row, h2o_error *error) {
    row->length = __atomic_load_n((const int64_t *)h2o_at(lengths, b, 0, 0), __ATOMIC_RELAXED);
    if (row->length < 0 || row->length > INT32_MAX - row->tokens) {
        return h2o_fail(error, H2O_EVALUE,
                        "%s[%" PRId64 "]: is %" PRId64 ", wanted 0..%d minus the new tokens",
                        lengths->name, b, row->length, INT32_MAX);
    }
    return H2O_OK;
}

int h2o_count_row(const h2o_slots *slots, const h2o_policy *policy, const h2o_dims *dims, int64_t b,
                  const h2o_counts_memory *counted, h2o_error *error) {
    h2o_row *const row = &counted->rows[b];
    int status = count_length(&slots->seen_tokens, counted->heads[b * dims->G].row, row, error);
    for (int64_t g = 0; g < dims->G && status == H2O_OK; g++) {
        h2o_head *const head = &counted->heads[b * dims->G + g];
        status = h2o_count_budget(&slots->budget, head->row, g, policy, head, error);
        head->held = h2o_policy_held(head->budget, row->length);
    }
    return status;
}
