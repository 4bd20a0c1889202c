/* check.c - checks a call's operands before a kernel sees them: see operands.h.
 *
 * The rows of an operation state what each tensor must be: its shape in letters, its dtype, and
 * whether it is written. A letter gets its size from the first tensor that has it, and every
 * later tensor must agree. counts.c checks the values in tensors that kernels use as indices or
 * counts.
 *
 * Overlap is found by address ranges. The range of a written tensor, from its first to its last
 * byte, must not touch that of any other tensor of the call. There is one exception: two tensors
 * may step from row to row by the same number of bytes if their rows share none, so that pages
 * can hold all fields of a row side by side. The check also rejects some tensors that are
 * interleaved without sharing an element.
 */
#include "operands.h"
#include "policy.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- Rules ------------------------------------------------------------- */

/* An operand's tensor, and what its row of the operation requires in this call. */
typedef struct {
    h2o_view *view;
    char letters[H2O_MAX_DIMS + 1];
    h2o_dtype dtype;
    unsigned flags;
} rule;

typedef struct {
    uintptr_t first, last; /* addresses of the first and the last byte */
    uint64_t step, reach;  /* bytes from row to row, and bytes that each row spans */
} range;

static const char *device_text(const h2o_view *view, char text[40]) {
    static const char *const names[] = {[1] = "CPU",   [2] = "CUDA",  [8] = "Metal",
                                        [10] = "ROCm", [13] = "CUDA", [14] = "oneAPI"};
    const int32_t type = view->device_type;
    if (type >= 0 && type < (int32_t)(sizeof names / sizeof names[0]) && names[type] != NULL) {
        snprintf(text, 40, "%s device %d", names[type], (int)view->device_id);
    } else {
        snprintf(text, 40, "DLPack device type %d", (int)type);
    }
    return text;
}

/* "[2, 3, 4]" */
static const char *shape_text(const h2o_view *view, char text[100]) {
    int used = snprintf(text, 100, "[");
    for (int32_t i = 0; i < view->ndim && i < H2O_MAX_DIMS; i++) {
        used += snprintf(text + used, 100 - (size_t)used, i > 0 ? ", %" PRId64 : "%" PRId64,
                         view->shape[i]);
    }
    snprintf(text + used, 100 - (size_t)used, "]");
    return text;
}

/* The size that a letter stands for, NULL for other characters. T and S share an entry, since a
 * store has only one of them. */
static int64_t *size_of(h2o_dims *dims, char letter) {
    switch (letter) {
    case 'B':
        return &dims->B;
    case 'Z':
        return &dims->Z;
    case 'H':
        return &dims->H;
    case 'G':
        return &dims->G;
    case 'Q':
        return &dims->Q;
    case 'S':
    case 'T':
        return &dims->S;
    case 'D':
        return &dims->D;
    case 'P':
        return &dims->P;
    case 'F':
        return &dims->F;
    default:
        return NULL;
    }
}

/* "[B, G, Q, D] with B = 2, Q = 4": the letters, and the sizes that are known so far. */
static const char *letters_text(const char *letters, h2o_dims *dims, char text[160]) {
    int used = snprintf(text, 160, "[");
    for (int i = 0; letters[i] != '\0'; i++) {
        const char letter[2] = {letters[i], '\0'};
        used += snprintf(text + used, 160 - (size_t)used, "%s%s", i > 0 ? ", " : "",
                         letter[0] == '+' ? "G + 1" : letter);
    }
    used += snprintf(text + used, 160 - (size_t)used, "]");
    const char *joint = " with";
    for (int i = 0; letters[i] != '\0'; i++) {
        const int64_t *size = size_of(dims, letters[i]);
        if (size != NULL && *size > 0) {
            used += snprintf(text + used, 160 - (size_t)used, "%s %c = %" PRId64, joint, letters[i],
                             *size);
            joint = ",";
        }
    }
    return text;
}

static int fail_shape(const rule *rule, h2o_dims *dims, h2o_error *error) {
    char shape[100], wanted[160];
    letters_text(rule->letters, dims, wanted);
    if (rule->view->ndim > H2O_MAX_DIMS) {
        return h2o_fail(error, H2O_EVALUE, "%s: has %d dimensions, wanted %s", rule->view->name,
                        (int)rule->view->ndim, wanted);
    }
    return h2o_fail(error, H2O_EVALUE, "%s: has shape %s, wanted %s", rule->view->name,
                    shape_text(rule->view, shape), wanted);
}

/* Sizes must fit into int32, the type of positions, slots and rows. */
static int check_shape(const rule *rule, h2o_dims *dims, h2o_error *error) {
    h2o_view *view = rule->view;
    const bool bytes = rule->flags & H2O_STORED && view->dtype == H2O_U8;
    if (view->ndim != (int32_t)strlen(rule->letters)) return fail_shape(rule, dims, error);
    for (int32_t i = 0; i < view->ndim; i++) {
        const char letter = rule->letters[i];
        const int64_t got = view->shape[i];
        const int64_t number = letter == '+' ? dims->G + 1 : letter - '0';
        int64_t *size = size_of(dims, letter);
        if (bytes && i == view->ndim - 1) {
            size = NULL; /* h2o_check_rows checks it */
        } else if (size == NULL ? got != number : *size != 0 && got != *size) {
            return fail_shape(rule, dims, error);
        }
        if (got < 1 || got > INT32_MAX) {
            char shape[100];
            return h2o_fail(error, H2O_EVALUE, "%s: has shape %s; every size must lie in 1..%d",
                            view->name, shape_text(view, shape), INT32_MAX);
        }
        if (size != NULL) {
            *size = got;
        }
    }
    return H2O_OK;
}

static int check_dtype(const rule *rule, h2o_dtype *floating, const char *leader,
                       h2o_error *error) {
    const h2o_view *view = rule->view;
    const bool narrow = view->dtype == H2O_F32 && view->device_type != H2O_DEVICE_CPU;
    if (rule->flags & H2O_STORED && view->dtype == H2O_U8) return H2O_OK;
    if (rule->dtype != H2O_NONE) {
        if (view->dtype == rule->dtype) return H2O_OK;
        if (rule->dtype == H2O_F64 && narrow) return H2O_OK; /* some devices have no f64 */
        return h2o_fail(error, H2O_ETYPE, "%s: has dtype %s, wanted %s", view->name,
                        h2o_dtype_name(view->dtype), h2o_dtype_name(rule->dtype));
    }
    if (*floating == H2O_NONE) {
        if (view->dtype != H2O_F32 && view->dtype != H2O_F16 && view->dtype != H2O_BF16) {
            return h2o_fail(error, H2O_ETYPE,
                            "%s: has dtype %s, wanted float32, float16 or bfloat16", view->name,
                            h2o_dtype_name(view->dtype));
        }
        *floating = view->dtype;
    } else if (view->dtype != *floating) {
        return h2o_fail(error, H2O_ETYPE, "%s: has dtype %s, wanted %s like %s", view->name,
                        h2o_dtype_name(view->dtype), h2o_dtype_name(*floating), leader);
    }
    return H2O_OK;
}

static int check_device(const h2o_view *view, const h2o_view *leader, h2o_error *error) {
    char device[40], other[40];
    if (view->device_type != leader->device_type || view->device_id != leader->device_id) {
        return h2o_fail(error, H2O_EVALUE, "%s: is on %s, but %s on %s", view->name,
                        device_text(view, device), leader->name, device_text(leader, other));
    }
    return H2O_OK;
}

int h2o_fail_kernels(const h2o_view *leader, h2o_error *error) {
    char device[40];
    return h2o_fail(error, H2O_EBACKEND,
                    "%s: is on %s, for which this build of h2o has no kernels; move the tensors to "
                    "the CPU, or pass torch tensors",
                    leader->name, device_text(leader, device));
}

/* Gives dimensions of size 1, whose stride means nothing, the stride of C order, so that kernels
 * need to look at strides only. */
static void normalize_strides(h2o_view *view) {
    uint64_t inner = 1;
    for (int32_t i = view->ndim - 1; i >= 0; i--) {
        if (view->shape[i] == 1) {
            view->stride[i] = (int64_t)inner;
        }
        inner *= (uint64_t)view->shape[i];
    }
}

/* The bytes that a tensor spans. Returns false on overflow. */
static bool find_range(const h2o_view *view, range *bytes) {
    const int64_t size = h2o_dtype_size(view->dtype);
    int64_t count = size, below = 0, above = size - 1, reach;
    for (int32_t i = 0; i < view->ndim; i++) {
        if (__builtin_mul_overflow(count, view->shape[i], &count) ||
            __builtin_mul_overflow(view->shape[i] - 1, view->stride[i], &reach) ||
            __builtin_mul_overflow(reach, size, &reach) ||
            __builtin_add_overflow(reach < 0 ? below : above, reach, reach < 0 ? &below : &above)) {
            return false;
        }
    }
    const uintptr_t data = (uintptr_t)view->data;
    const uintptr_t before = 0 - (uintptr_t)below;
    const int64_t last_row = (view->shape[0] - 1) * view->stride[0] * size;
    const uint64_t rows = last_row < 0 ? 0 - (uint64_t)last_row : (uint64_t)last_row;
    bytes->step = (uint64_t)view->stride[0] * (uint64_t)size;
    bytes->reach = (uint64_t)above - (uint64_t)below - rows + 1;
    bytes->first = data - before;
    return data >= before && !__builtin_add_overflow(data, (uintptr_t)above, &bytes->last) &&
           bytes->last <= (uintptr_t)INTPTR_MAX;
}

/* Whether no two elements of the tensor share memory: from the smallest stride up, each stride must
 * step over everything that the smaller ones reach. */
static bool is_injective(const h2o_view *view) {
    bool done[H2O_MAX_DIMS] = {false};
    int64_t reach = 0;
    for (int32_t round = 0; round < view->ndim; round++) {
        int32_t next = -1;
        for (int32_t i = 0; i < view->ndim; i++) {
            if (!done[i] && (next < 0 || view->stride[i] < view->stride[next])) {
                next = i;
            }
        }
        done[next] = true;
        if (view->shape[next] > 1) {
            if (view->stride[next] <= reach) return false;
            reach += (view->shape[next] - 1) * view->stride[next];
        }
    }
    return true;
}

static int check_layout(const rule *rule, range *bytes, h2o_error *error) {
    h2o_view *view = rule->view;
    normalize_strides(view);
    if (!find_range(view, bytes)) {
        char shape[100];
        return h2o_fail(error, H2O_EVALUE, "%s: shape %s is larger than any memory", view->name,
                        shape_text(view, shape));
    }
    if (rule->flags & H2O_WRITTEN) {
        if (view->readonly) {
            return h2o_fail(error, H2O_EVALUE,
                            "%s: is written, but its memory is read-only or a copy", view->name);
        }
        if (!is_injective(view)) {
            return h2o_fail(error, H2O_EVALUE,
                            "%s: is written, so its strides must be positive and its elements "
                            "must not share memory",
                            view->name);
        }
    }
    if ((rule->flags & H2O_DENSE) && view->stride[view->ndim - 1] != 1) {
        return h2o_fail(error, H2O_EVALUE,
                        "%s: the stride of the last dimension is %" PRId64
                        ", wanted 1 (make it contiguous)",
                        view->name, view->stride[view->ndim - 1]);
    }
    return H2O_OK;
}

/* Whether two tensors share no byte. If both step forward from row to row by the same number of
 * bytes, each row lies within one period, and the tensors are apart if neither's rows reach the
 * other's within a period. */
static bool is_apart(const range *a, const range *b) {
    if (a->last < b->first || b->last < a->first) return true;
    if (a->step != b->step || (int64_t)a->step <= 0) return false;
    if (b->first < a->first) return is_apart(b, a);
    const uint64_t behind = (b->first - a->first) % a->step;
    return a->reach <= behind && b->reach <= a->step - behind;
}

static int check_overlap(const rule *rules, const range *ranges, int count, h2o_error *error) {
    for (int i = 0; i < count; i++) {
        for (int j = i + 1; j < count; j++) {
            const bool apart =
                is_apart(&ranges[i], &ranges[j]) || !rules[i].view->data || !rules[j].view->data;
            if (!apart && ((rules[i].flags | rules[j].flags) & H2O_WRITTEN)) {
                const bool first = rules[i].flags & H2O_WRITTEN;
                return h2o_fail(error, H2O_EVALUE, "%s: is written and shares memory with %s",
                                rules[first ? i : j].view->name, rules[first ? j : i].view->name);
            }
        }
    }
    return H2O_OK;
}

/* Checks all tensors of a call and fills in dims. */
static int check_tensors(const rule *all, int count, h2o_dims *dims, h2o_error *error) {
    rule rules[H2O_MOST_TENSORS]; /* of the tensors that are given */
    range ranges[H2O_MOST_TENSORS];
    h2o_dtype floating = H2O_NONE;
    int present = 0;
    for (int i = 0; i < count; i++) {
        const rule *rule = &all[i];
        int status;
        if (!h2o_given(rule->view)) {
            if (rule->flags & H2O_OPTIONAL) continue;
            char wanted[160];
            return h2o_fail(error, H2O_ETYPE, "%s: is None, wanted a tensor %s", rule->view->name,
                            letters_text(rule->letters, dims, wanted));
        }
        if ((status = check_device(rule->view, all[0].view, error)) ||
            (status = check_dtype(rule, &floating, all[0].view->name, error)) ||
            (status = check_shape(rule, dims, error)) ||
            (status = check_layout(rule, &ranges[present], error))) {
            return status;
        }
        rules[present++] = *rule;
    }
    if (dims->H != 0) {
        if (dims->H % dims->G != 0) {
            return h2o_fail(error, H2O_EVALUE,
                            "%s: has %" PRId64 " heads, which is not a multiple of the %" PRId64
                            " key/value heads of %s",
                            all[0].view->name, dims->H, dims->G, all[1].view->name);
        }
        dims->R = dims->H / dims->G;
    }
    return check_overlap(rules, ranges, present, error);
}

/* ---- Scalars ----------------------------------------------------------- */

int h2o_check_logits(float scale, float softcap, h2o_error *error) {
    static const float LARGEST = FLT_MAX / 1.5f;
    if (!(fabsf(scale) <= LARGEST)) {
        return h2o_fail(error, H2O_EVALUE, "scale: is %g, wanted a number of magnitude at most %g",
                        (double)scale, (double)LARGEST);
    }
    if (!(softcap >= 0.0f && softcap <= LARGEST)) {
        return h2o_fail(error, H2O_EVALUE,
                        "softcap: is %g, wanted 0 (none) or a positive number of at most %g",
                        (double)softcap, (double)LARGEST);
    }
    if (softcap > 0.0f && !isfinite(scale / softcap)) {
        return h2o_fail(error, H2O_EVALUE, "softcap: is %g, too small for a scale of %g",
                        (double)softcap, (double)scale);
    }
    return H2O_OK;
}

/* A number of the policy. Choices and booleans are valid once they are parsed. */
static double policy_number(const h2o_policy *policy, const h2o_policy_field *field) {
    const void *const at = (const char *)policy + field->offset;
    switch (field->kind) {
    case H2O_FIELD_INT32:
        return *(const int32_t *)at;
    case H2O_FIELD_FLOAT:
        return (double)*(const float *)at;
    default:
        return field->least;
    }
}

static int check_policy(const h2o_policy *policy, h2o_error *error) {
    for (int i = 0; i < H2O_POLICY_COUNT; i++) {
        const h2o_policy_field *const field = &h2o_policy_fields[i];
        const double number = policy_number(policy, field);
        const bool within = number >= field->least && number <= field->most;
        if (!within && field->wanted != NULL) {
            return h2o_fail(error, H2O_EVALUE, "%s: is %.*g, wanted %s", field->name,
                            field->kind == H2O_FIELD_INT32 ? 10 : 6, number, field->wanted);
        }
    }
    return H2O_OK;
}

/* Whether rows of a quantized type may be those of keys, of values, or of both. */
static bool may_hold(h2o_dtype stored, bool keys, bool values) {
    return (!keys || h2o_row_quantizes_keys(stored)) &&
           (!values || h2o_row_quantizes_values(stored));
}

/* "34 (int8) or 18 (int4)": the bytes of each such type that can hold D elements. */
static const char *rows_text(bool keys, bool values, int64_t D, char text[100]) {
    size_t used = 0;
#define ROW(name, ...)                                                                             \
    if (may_hold(H2O_##name, keys, values) && h2o_row_bytes(H2O_##name, D) > 0) {                  \
        used += (size_t)snprintf(text + used, 100 - used, "%s%" PRId64 " (%s)",                    \
                                 used > 0 ? " or " : "", h2o_row_bytes(H2O_##name, D),             \
                                 h2o_dtype_name(H2O_##name));                                      \
    }
    H2O_QUANTIZED_ROWS(ROW)
#undef ROW
    return text;
}

int h2o_check_rows(const h2o_view *keys, const h2o_view *values, const h2o_view *offsets,
                   const h2o_view *smoothing, int64_t D, h2o_error *error) {
    const h2o_view *const views[] = {keys, values};
    const bool is_shared =
        values->data == keys->data && keys->data; /* fake tensors have no memory */
    for (int i = 0; i < 2; i++) {
        const h2o_view *const view = views[i];
        const bool of_keys = i == 0 || is_shared, of_values = i == 1 || is_shared;
        if (view->dtype == H2O_U8 && view->shape[view->ndim - 1] == D) {
            return h2o_fail(error, H2O_ETYPE,
                            "%s: has dtype %s, wanted floats like the query, or quantized rows",
                            view->name, h2o_dtype_name(view->dtype));
        }
        if (view->dtype == H2O_U8 && !may_hold(h2o_stored_type(view, D), of_keys, of_values)) {
            char wanted[100];
            return h2o_fail(error, H2O_EVALUE,
                            "%s: has rows of %" PRId64 " bytes, wanted %s for %" PRId64 " elements",
                            view->name, view->shape[view->ndim - 1],
                            rows_text(of_keys, of_values, D, wanted), D);
        }
    }
    if ((keys->dtype == H2O_U8) != (values->dtype == H2O_U8)) {
        return h2o_fail(
            error, H2O_ETYPE, "%s: has dtype %s and %s has %s, wanted both quantized or neither",
            keys->name, h2o_dtype_name(keys->dtype), values->name, h2o_dtype_name(values->dtype));
    }
    if (h2o_given(offsets) && (keys->dtype != H2O_U8 || is_shared)) {
        return h2o_fail(error, H2O_EVALUE, "%s: is given, but %s %s", offsets->name, keys->name,
                        keys->dtype != H2O_U8 ? "is not quantized" : "has no values beside it");
    }
    if (h2o_given(offsets) && D > H2O_MOST_TRANSFORMED) {
        return h2o_fail(error, H2O_EVALUE,
                        "%s: is given, but rows have %" PRId64 " elements, wanted at most %d",
                        offsets->name, D, (int)H2O_MOST_TRANSFORMED);
    }
    const bool is_smoothed = h2o_given(smoothing);
    const bool fits = h2o_given(offsets) && h2o_row_is_four_bit_key(h2o_stored_type(keys, D));
    if (is_smoothed && !fits) {
        return h2o_fail(error, H2O_EVALUE, "%s: is given, but %s %s", smoothing->name,
                        h2o_given(offsets) ? keys->name : offsets->name,
                        h2o_given(offsets) ? "does not have four bits" : "is None");
    }
    return H2O_OK;
}

int h2o_share_values(h2o_view *values, const h2o_view *keys, h2o_slots *slots, h2o_error *error) {
    const bool shared = !h2o_given(values);
    if (slots != NULL && h2o_given(&slots->values) == shared) {
        const h2o_view *const none = shared ? values : &slots->values;
        return h2o_fail(error, H2O_ETYPE, "%s: is None, wanted a tensor like %s", none->name,
                        shared ? slots->values.name : values->name);
    }
    if (shared) *values = *keys;
    if (shared && slots != NULL) slots->values = slots->keys;
    return H2O_OK;
}

int h2o_check_needed(const h2o_slots *slots, const h2o_policy *policy, h2o_error *error) {
    const bool weighted = policy->value_weighted;
    if (h2o_given(&slots->norms) != weighted) {
        return h2o_fail(error, H2O_EVALUE, "%s: is %s, but value_weighted is %s", slots->norms.name,
                        weighted ? "None" : "given", weighted ? "true" : "false");
    }
    return H2O_OK;
}

/* ---- Operands ---------------------------------------------------------- */

/* The rule of a tensor, with its letters as they are in this call. slots: NULL if none are given. */
static rule rule_of(const h2o_operand *operand, h2o_view *view, unsigned flags,
                    const h2o_slots *slots) {
    rule rule = {.view = view, .dtype = operand->dtype, .flags = flags};
    const bool uneven = slots != NULL && h2o_given(&slots->starts);
    const bool numbered = slots != NULL && h2o_given(&slots->rows);
    const bool joined = operand->flags & H2O_PER_SLOT && uneven;
    const bool alike = operand->flags & H2O_PER_HEAD && view->ndim != 3;
    const bool all_rows = operand->flags & H2O_PER_ROW && view->ndim != 2;
    int count = 0;
    for (const char *at = operand->letters; *at != '\0'; at++) {
        if (*at == 'G' && (joined || alike)) continue;
        if (*at == 'Z' && all_rows) continue;
        rule.letters[count++] = *at == 'Z' && !numbered ? 'B' : *at == 'S' && joined ? 'T' : *at;
    }
    return rule;
}

/* The requirements on a field of the slots, given the flags of the operation's slots. */
static unsigned flags_of(const h2o_operand *slots, const h2o_operand *field) {
    if (!(slots->flags & H2O_ATTENDED) || field->flags & H2O_SCORED) return field->flags;
    return field->flags & ~(unsigned)H2O_WRITTEN;
}

/* Whether the slots are given; only H2O_OPTIONAL ones may be absent. */
static bool is_present(const h2o_operand *operand, const void *params) {
    if (!(operand->flags & H2O_OPTIONAL)) return true;
    return *(const bool *)((const char *)params + operand->present);
}

static int add_slots(const h2o_operand *operand, h2o_slots *slots, rule *rules) {
    int count = 0;
    for (int i = 0; i < H2O_SLOTS_COUNT; i++) {
        const h2o_operand *const field = &h2o_slots_fields[i];
        h2o_view *const view = h2o_operand_at(slots, field);
        if (operand->flags & H2O_ATTENDED & ~field->flags) continue;
        rules[count++] = rule_of(field, view, flags_of(operand, field), slots);
    }
    return count;
}

int h2o_check_operands(const h2o_operation_row *row, void *params, h2o_error *error) {
    h2o_dims *const dims = (h2o_dims *)(void *)((char *)params + row->dims);
    rule rules[H2O_MOST_TENSORS];
    int count = 0, status = H2O_OK;
    const h2o_slots *slots = NULL;
    *dims = (h2o_dims){0};
    for (int i = 0; i < row->operand_count && status == H2O_OK; i++) {
        const h2o_operand *const operand = &row->operands[i];
        void *const at = h2o_operand_at(params, operand);
        if (operand->kind == H2O_OPERAND_POLICY) status = check_policy(at, error);
        if (operand->kind == H2O_OPERAND_TENSOR) {
            rules[count++] = rule_of(operand, at, operand->flags, slots);
        }
        if (operand->kind == H2O_OPERAND_SLOTS && is_present(operand, params)) {
            count += add_slots(operand, at, rules + count);
            slots = at;
        }
    }
    return status != H2O_OK ? status : check_tensors(rules, count, dims, error);
}
