/* h2o.h - the internal contract of the C core.
 *
 * Status codes, the error record, the tensor view, and the records of slots and policy.
 * The operations are in operations.h, the tables that describe them in tables.h, and what
 * executes them in run.h. A call travels
 *
 *     arguments.c (parse) -> exchange.c (views) -> call.c: check.c, counts.c -> kernel
 *
 * and only the last step runs without the GIL. Kernels validate nothing: they trust what
 * check.c and counts.c have accepted. But the caller's other threads may write to its tensors
 * at any time, so whatever determines an address comes from counts.c, which reads it once, or
 * from memory that belongs to the call.
 *
 * Shape letters, used at every pointer:
 *   B batch rows    Z rows of slots; equal to B unless slots.rows is given
 *   H query heads   G key/value heads   R = H / G
 *   Q new tokens    S slots         D head dimension    N tokens of a text
 *   T slots of all heads of a row    P ranks of keys    F rotary frequencies
 */
#ifndef H2O_H
#define H2O_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "types.h"

/* ---- Status and errors ------------------------------------------------- */

typedef enum {
    H2O_OK = 0,
    H2O_EVALUE,   /* ValueError: right kind of thing, wrong value or shape */
    H2O_ETYPE,    /* TypeError: wrong kind of thing, wrong dtype */
    H2O_EBACKEND, /* RuntimeError: device without a backend in this build */
    H2O_EMEMORY   /* MemoryError */
} h2o_status;

typedef struct {
    h2o_status status;
    char text[512];
} h2o_error;

/* error.c. Formats a message into *error and returns status, so that callers can write
 * `return h2o_fail(error, H2O_EVALUE, "...")`. A message names the argument, what was passed and
 * what was expected. */
int h2o_fail(h2o_error *error, h2o_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- Tensors ----------------------------------------------------------- */

enum { H2O_MAX_DIMS = 4, H2O_DEVICE_CPU = 1 /* DLPack's number */ };

/* A borrowed tensor, which never outlives the call. data includes the byte offset, if any.
 * Strides count elements; those of inputs may be negative or 0. A view with dtype H2O_NONE
 * stands for an optional argument that was not given. */
typedef struct {
    void *data;
    int64_t shape[H2O_MAX_DIMS];
    int64_t stride[H2O_MAX_DIMS];
    const char *name; /* of the argument, for messages */
    h2o_dtype dtype;
    int32_t ndim;
    int32_t device_type; /* DLPack's numbers */
    int32_t device_id;
    bool readonly;
} h2o_view;

H2O_INLINE bool h2o_given(const h2o_view *view) { return view->dtype != H2O_NONE; }

/* The address of element [a, b, c, 0]; of [a, b, 0] if there are three dimensions, and so on. */
H2O_INLINE void *h2o_at(const h2o_view *view, int64_t a, int64_t b, int64_t c) {
    const int64_t offset = a * view->stride[0] + b * view->stride[1] + c * view->stride[2];
    return (char *)view->data + offset * h2o_dtype_size(view->dtype);
}

/* Filled in by check.c, so that kernels need not look at shapes again.
 * Sizes that an operation does not have are 0. */
typedef struct {
    int64_t B, H, G, R, Q, S, D, P, F;
    int64_t Z; /* 0 unless slots.rows is given */
} h2o_dims;    /* counts.c sets S to the largest number of slots of any head */

/* ---- State and policy -------------------------------------------------- */

/* The type of stored rows of keys or values with D elements. The number of bytes of a u8 row
 * identifies its type; H2O_NONE if no type has that many. */
H2O_INLINE h2o_dtype h2o_stored_type(const h2o_view *rows, int64_t D) {
    if (rows->dtype != H2O_U8) return rows->dtype;
    return h2o_row_type(rows->shape[rows->ndim - 1], D);
}

/* What one layer stores. A token's slot is its index on axis S.
 *
 * If starts is given, heads may have different numbers of slots. The slots of a row's heads
 * then follow one another on a single axis T: head g has slots starts[g]..starts[g+1]-1, or
 * starts[row,g]..starts[row,g+1]-1 if rows differ too. Read [Z,G,S...] below as [Z,T...].
 *
 * Row b of a call's batch is row b of the slots, or row rows[b] if rows is given. With rows, a
 * call can use any subset of many rows, in any order.
 *
 * Invariants, for a row b that has seen seen_tokens[b] real tokens and whose
 * budget is k = sinks + heavy + recent: held = min(seen_tokens[b], k) slots are
 * filled, all of them within slots 0..held. One of these held + 1 slots is therefore
 * empty; unless it is the last one, it is next_slot[b,g]. So once a step has filled
 * next_slot[b,g], slots 0..held are all filled. Empty slots have position -1.
 * A caller may raise a budget between two calls. A head then holds fewer keys, until new ones have
 * filled the difference: h2o_policy_filled.
 * X(name, shape, dtype, flags of tables.h), in the order of h2o.slots.Slots. */
#define H2O_SLOTS_FIELDS(X)                                                                        \
    /* f32/f16/bf16 rows, or u8 rows of quantize.h */                                              \
    X(keys, "ZGSD", H2O_NONE, H2O_PER_SLOT | H2O_ATTENDED | H2O_STORED | H2O_DENSE | H2O_WRITTEN)  \
    /* likewise; not given if keys serve as values: check.c then copies the view of keys */        \
    X(values, "ZGSD", H2O_NONE,                                                                    \
      H2O_PER_SLOT | H2O_ATTENDED | H2O_STORED | H2O_OPTIONAL | H2O_DENSE | H2O_WRITTEN)           \
    /* the attention that each key has received */                                                 \
    X(scores, "ZGS", H2O_F32, H2O_PER_SLOT | H2O_ATTENDED | H2O_SCORED | H2O_DENSE | H2O_WRITTEN)  \
    /* index of the token in its row without padding; -1: empty */                                 \
    X(positions, "ZGS", H2O_I32, H2O_PER_SLOT | H2O_ATTENDED | H2O_DENSE | H2O_WRITTEN)            \
    /* the slot that the next token will fill */                                                   \
    X(next_slot, "ZG", H2O_I32, H2O_WRITTEN)                                                       \
    /* real tokens that the row has seen */                                                        \
    X(seen_tokens, "Z", H2O_I64, H2O_WRITTEN)                                                      \
    /* heavy, recent */                                                                            \
    X(budget, "ZG2", H2O_I32, H2O_PER_HEAD)                                                        \
    /* sum of the scores of evicted keys */                                                        \
    X(evicted_score, "ZG", H2O_F64, H2O_WRITTEN)                                                   \
    /* L2 norm of each value; given only if value_weighted */                                      \
    X(norms, "ZGS", H2O_F32, H2O_PER_SLOT | H2O_OPTIONAL | H2O_DENSE | H2O_WRITTEN)                \
    /* where each head's slots begin, and where the last head's end */                             \
    X(starts, "Z+", H2O_I32, H2O_PER_ROW | H2O_ATTENDED | H2O_OPTIONAL)                            \
    /* the row of the fields above that each batch row uses */                                     \
    X(rows, "B", H2O_I32, H2O_ATTENDED | H2O_OPTIONAL)                                             \
    /* what is subtracted from a head's keys before they are quantized: see quantize.h */          \
    X(offsets, "ZGD", H2O_F16, H2O_ATTENDED | H2O_OPTIONAL | H2O_DENSE | H2O_WRITTEN)              \
    /* what four-bit keys with offsets are then divided by, > 0; not given: 1 */                   \
    X(smoothing, "ZGD", H2O_F16, H2O_ATTENDED | H2O_OPTIONAL | H2O_DENSE)

#define H2O_FIELD(name, letters, dtype, flags) h2o_view name;
typedef struct {
    H2O_SLOTS_FIELDS(H2O_FIELD)
} h2o_slots;

typedef enum { H2O_SCORE_SUM = 0, H2O_SCORE_MEAN = 1, H2O_SCORE_MAX = 2 } h2o_score_by;

/* Budgets are per row and are part of the slots. policy.h defines what each field means,
 * h2o_policy_fields of tables.h its name and its range. */
typedef struct {
    int32_t sinks;
    h2o_score_by score_by;
    float decay; /* in [0, 1] */
    bool value_weighted;
} h2o_policy;

/* ---- Copies of the small tensors --------------------------------------- */

/* A batch row at the start of the call. */
typedef struct {
    int64_t length;         /* real tokens seen before the call; simulate: 0 */
    int64_t tokens;         /* new tokens without padding */
    const int32_t *columns; /* [tokens] their indices on axis Q; NULL: 0, 1, 2, ... */
} h2o_row;

/* A key/value head of such a row. attend fills in only row, offset and slots. */
typedef struct {
    int64_t row;    /* of the slots */
    int64_t offset; /* index on the second axis of the store where its slots begin */
    int64_t slots;  /* number of slots */
    int32_t heavy, recent;
    int64_t budget;    /* k */
    int64_t held;      /* held of slots 0..held are filled, one is empty */
    int64_t next_slot; /* the empty slot */
} h2o_head;

typedef struct {
    const h2o_row *rows;   /* [B] */
    const h2o_head *heads; /* [B][G] */
    const h2o_row *dense;  /* [B] simulate: the tokens before the first eviction only */
} h2o_counts;

/* The padded column of a row's i-th new token. */
H2O_INLINE int64_t h2o_column(const h2o_row *row, int64_t i) {
    return row->columns ? row->columns[i] : i;
}

#endif
