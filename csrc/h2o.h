/* h2o.h - the internal contract of the C core.
 *
 * Status codes, the error record, the tensor view, the records of slots and policy;
 * operations.h has the operations, tables.h the tables that a call goes by, run.h
 * what carries it out. A call travels
 *
 *     arguments.c (parse) -> exchange.c (views) -> call.c: check.c, counts.c -> kernel
 *
 * and only the last step runs without the GIL. Kernels trust what check.c and counts.c have
 * let through; nothing else validates. But the caller's other threads may write to its tensors
 * at any time: whatever decides on an address comes from counts.c, which reads it once, or
 * from memory of the call's own.
 *
 * Shape letters, used at every pointer:
 *   B batch rows    Z rows of slots, as many unless slots.rows is given
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

/* error.c. Fills *error with a formatted text, which names the argument, what came and what was
 * wanted, and returns status: `return h2o_fail(error, H2O_EVALUE, "...")`. */
int h2o_fail(h2o_error *error, h2o_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- Tensors ----------------------------------------------------------- */

enum { H2O_MAX_DIMS = 4, H2O_DEVICE_CPU = 1 /* DLPack's number */ };

/* A borrowed tensor: never outlives the call. data has any byte offset
 * applied. Strides count elements and may be negative or 0 for inputs. A view
 * with dtype H2O_NONE stands for an optional argument that was not given. */
typedef struct {
    void *data;
    int64_t shape[H2O_MAX_DIMS];
    int64_t stride[H2O_MAX_DIMS];
    const char *name; /* argument name, for messages */
    h2o_dtype dtype;
    int32_t ndim;
    int32_t device_type; /* DLPack's numbers */
    int32_t device_id;
    bool readonly;
} h2o_view;

H2O_INLINE bool h2o_given(const h2o_view *view) { return view->dtype != H2O_NONE; }

/* The address of element [a, b, c, 0] of a tensor, of [a, b, 0] and so on. */
H2O_INLINE void *h2o_at(const h2o_view *view, int64_t a, int64_t b, int64_t c) {
    const int64_t offset = a * view->stride[0] + b * view->stride[1] + c * view->stride[2];
    return (char *)view->data + offset * h2o_dtype_size(view->dtype);
}

/* Filled in by check.c, so that kernels need not look at shapes again.
 * Those that an operation does not have are 0. */
typedef struct {
    int64_t B, H, G, R, Q, S, D, P, F;
    int64_t Z; /* 0 unless slots.rows is given */
} h2o_dims;    /* S: of a head with the most, once the counts are there */

/* ---- State and policy -------------------------------------------------- */

/* How the rows of stored keys or values hold D elements: bytes tell by their number,
 * H2O_NONE if by none. */
H2O_INLINE h2o_dtype h2o_stored_type(const h2o_view *rows, int64_t D) {
    if (rows->dtype != H2O_U8) return rows->dtype;
    return h2o_row_type(rows->shape[rows->ndim - 1], D);
}

/* What one layer holds. A token's slot is its index on axis S.
 *
 * Heads may have numbers of slots of their own: then starts is given, a row's
 * slots lie one head after the other on one axis T, those of head g are
 * starts[g]..starts[g+1]-1 of it, or starts[row,g]..starts[row,g+1]-1 where
 * rows differ too, and [Z,G,S...] below reads [Z,T...].
 *
 * Row b of a call's batch is row b of the slots; or row rows[b] where rows is given, so that a
 * call takes some of many rows, wherever they lie.
 *
 * Invariants, for a row b that has seen seen_tokens[b] real tokens and whose
 * budget is k = sinks + heavy + recent: held = min(seen_tokens[b], k) slots are
 * filled; they lie within slots 0..held; if the hole among these held + 1 is
 * not the last one it is next_slot[b,g]. So the step that fills next_slot[b,g] finds
 * slots 0..held all filled. Empty slots have position -1.
 * X(name, shape, dtype, flags of tables.h), in the order of h2o.slots.Slots. */
#define H2O_SLOTS_FIELDS(X)                                                                        \
    /* rows f32/f16/bf16, or u8 rows of quantize.h */                                              \
    X(keys, "ZGSD", H2O_NONE, H2O_PER_SLOT | H2O_ATTENDED | H2O_STORED | H2O_DENSE | H2O_WRITTEN)  \
    /* the same; absent where the keys are the values too: once checked they are those views */    \
    X(values, "ZGSD", H2O_NONE,                                                                    \
      H2O_PER_SLOT | H2O_ATTENDED | H2O_STORED | H2O_OPTIONAL | H2O_DENSE | H2O_WRITTEN)           \
    /* what attention each key has received */                                                     \
    X(scores, "ZGS", H2O_F32, H2O_PER_SLOT | H2O_ATTENDED | H2O_SCORED | H2O_DENSE | H2O_WRITTEN)  \
    /* index in the row without pads, -1 empty */                                                  \
    X(positions, "ZGS", H2O_I32, H2O_PER_SLOT | H2O_ATTENDED | H2O_DENSE | H2O_WRITTEN)            \
    /* the slot that the next token takes */                                                       \
    X(next_slot, "ZG", H2O_I32, H2O_WRITTEN)                                                       \
    /* real tokens that the row has seen */                                                        \
    X(seen_tokens, "Z", H2O_I64, H2O_WRITTEN)                                                      \
    /* heavy, recent */                                                                            \
    X(budget, "ZG2", H2O_I32, H2O_PER_HEAD)                                                        \
    /* sum of the scores of evicted keys */                                                        \
    X(evicted_score, "ZG", H2O_F64, H2O_WRITTEN)                                                   \
    /* L2 norm of each value; given if value_weighted only */                                      \
    X(norms, "ZGS", H2O_F32, H2O_PER_SLOT | H2O_OPTIONAL | H2O_DENSE | H2O_WRITTEN)                \
    /* where the slots of each head begin, and where the last one's end */                         \
    X(starts, "Z+", H2O_I32, H2O_PER_ROW | H2O_ATTENDED | H2O_OPTIONAL)                            \
    /* which row of the fields above each row of the batch is */                                   \
    X(rows, "B", H2O_I32, H2O_ATTENDED | H2O_OPTIONAL)

#define H2O_FIELD(name, letters, dtype, flags) h2o_view name;
typedef struct {
    H2O_SLOTS_FIELDS(H2O_FIELD)
} h2o_slots;

typedef enum { H2O_SCORE_SUM = 0, H2O_SCORE_MEAN = 1, H2O_SCORE_MAX = 2 } h2o_score_by;

/* Budgets are per row and live in the slots. What each field means, policy.h knows; how it is
 * spelled and what it may be, h2o_policy_fields of tables.h. */
typedef struct {
    int32_t sinks;
    h2o_score_by score_by;
    float decay; /* in [0, 1] */
    bool value_weighted;
} h2o_policy;

/* ---- What the small tensors say ---------------------------------------- */

/* A row of the batch when the call began. */
typedef struct {
    int64_t length;         /* real tokens that it had seen; simulate: 0 */
    int64_t tokens;         /* new ones, pads not counted */
    const int32_t *columns; /* [tokens] where they stand on axis Q; NULL: 0, 1, 2, ... */
} h2o_row;

/* One of its key/value heads. attend fills in only where the slots are. */
typedef struct {
    int64_t row;    /* of the slots */
    int64_t offset; /* index on the second axis of the store where its slots begin */
    int64_t slots;  /* how many */
    int32_t heavy, recent;
    int64_t budget;    /* k */
    int64_t held;      /* slots 0..held of the store, one of them empty, are in use */
    int64_t next_slot; /* step: the empty one */
} h2o_head;

typedef struct {
    const h2o_row *rows;   /* [B] */
    const h2o_head *heads; /* [B][G] */
    const h2o_row *dense;  /* [B] simulate: the same, of the tokens before any is evicted */
} h2o_counts;

/* The column of a row's i-th new token. */
H2O_INLINE int64_t h2o_column(const h2o_row *row, int64_t i) {
    return row->columns ? row->columns[i] : i;
}

#endif
