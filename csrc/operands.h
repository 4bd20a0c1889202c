/* operands.h - shared by the operations' files (attend.c, evict.c, step.c, simulate.c): macros for
 * rows of operands, checks that several operations make (check.c), and copies of the small tensors
 * of a call (counts.c). */
#ifndef H2O_OPERANDS_H
#define H2O_OPERANDS_H

#include "tables.h"

/* ---- Rows ---------------------------------------------------------------- */

/* An operand, by its field in h2o_<op>_params; _AS if its name differs from the field's. */
#define H2O_TENSOR(op, field, letters_, dtype_, flags_)                                            \
    H2O_TENSOR_AS(op, #field, field, letters_, dtype_, flags_)
#define H2O_TENSOR_AS(op, name_, field, letters_, dtype_, flags_)                                  \
    {.name = name_,                                                                                \
     .kind = H2O_OPERAND_TENSOR,                                                                   \
     .offset = offsetof(h2o_##op##_params, field),                                                 \
     .letters = letters_,                                                                          \
     .dtype = dtype_,                                                                              \
     .flags = flags_}
#define H2O_OPERAND(op, field, kind_)                                                              \
    {.name = #field, .kind = H2O_OPERAND_##kind_, .offset = offsetof(h2o_##op##_params, field)}

/* The row of an operation. Its file must define operands, check_<op> and count_<op> before. */
#define H2O_DEFINE_OPERATION(op)                                                                   \
    const h2o_operation_row h2o_operation_##op = {                                                 \
        .name = #op,                                                                               \
        .size = sizeof(h2o_##op##_params),                                                         \
        .dims = offsetof(h2o_##op##_params, dims),                                                 \
        .counts = offsetof(h2o_##op##_params, counts),                                             \
        .mask = offsetof(h2o_##op##_params, mask),                                                 \
        .operands = operands,                                                                      \
        .operand_count = sizeof operands / sizeof *operands,                                       \
        .check = check_##op,                                                                       \
        .count = count_##op,                                                                       \
    }

/* ---- Checks: check.c ----------------------------------------------------- */

/* Checks the policy and all tensors of a call against the rows of its operands; fills in dims. */
int h2o_check_operands(const h2o_operation_row *row, void *params, h2o_error *error);

/* Logits are computed in base 2, as log2(e) * scale * q.k or, with a softcap, as
 * log2(e) * softcap * tanh(scale / softcap * q.k). Checks that these factors are finite. */
int h2o_check_logits(float scale, float softcap, h2o_error *error);

/* Checks that keys and values are both quantized or neither, that quantized rows have the bytes of
 * some quantization of D elements, that offsets are only given for quantized keys that are not the
 * values too, and smoothing only for keys of four bits with offsets. */
int h2o_check_rows(const h2o_view *keys, const h2o_view *values, const h2o_view *offsets,
                   const h2o_view *smoothing, int64_t D, h2o_error *error);

/* Checks that norms are given if and only if the policy needs them. */
int h2o_check_needed(const h2o_slots *slots, const h2o_policy *policy, h2o_error *error);

/* If the slots have no values (latent attention), their keys serve as values, and new tokens come
 * without values: from here on both views are those of the keys. slots: NULL if there are none. */
int h2o_share_values(h2o_view *values, const h2o_view *keys, h2o_slots *slots, h2o_error *error);

/* ---- Counts: counts.c ---------------------------------------------------- */

/* The memory of h2o_counts. */
typedef struct {
    h2o_row *rows;    /* [B], then [B] of the dense part */
    h2o_head *heads;  /* [B][G] */
    uint64_t *taken;  /* [Z] bits: rows of the slots that earlier batch rows use */
    int32_t *columns; /* [B][Q] */
} h2o_counts_memory;

/* An element of a small tensor. The load is atomic so that the compiler does not repeat it: the
 * caller may have changed the element meanwhile. */
H2O_INLINE int32_t h2o_load_i32(const h2o_view *view, int64_t i, int64_t j, int64_t k) {
    return __atomic_load_n((const int32_t *)h2o_at(view, i, j, k), __ATOMIC_RELAXED);
}

/* Divides the memory of a call and fills in each row's new tokens. Other fields of rows are 0. */
h2o_counts_memory h2o_count_tokens(void *memory, const h2o_dims *dims, const h2o_view *mask);

/* Finds the row of the slots that each batch row uses, and where the slots of its heads are. No two
 * batch rows may use the same row. Sets dims->S to the largest number of slots of any head. */
int h2o_count_slots(const h2o_slots *slots, h2o_dims *dims, const h2o_counts_memory *memory,
                    h2o_error *error);

/* Fills in the budget of a head. */
int h2o_count_budget(const h2o_view *budget, int64_t b, int64_t g, const h2o_policy *policy,
                     h2o_head *head, h2o_error *error);

/* Fills in what a row of the store and its heads hold before the call. */
int h2o_count_row(const h2o_slots *slots, const h2o_policy *policy, const h2o_dims *dims, int64_t b,
                  const h2o_counts_memory *memory, h2o_error *error);

#endif
