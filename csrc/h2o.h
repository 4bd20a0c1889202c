/* h2o.h - the internal contract of the C core.
 *
 * Status codes, the error record, the tensor view, the records of slots and policy, one
 * parameter struct per operation; operations.h has the tables that a call goes by, run.h
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
 *   B batch rows    H query heads   G key/value heads   R = H / G
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
    H2O_EBUFFER,  /* BufferError: memory that cannot be exported or used */
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
} h2o_dims; /* S: of a head with the most, once the counts are there */

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
 * starts[g]..starts[g+1]-1 of it, and [B,G,S...] below reads [B,T...].
 *
 * Invariants, for a row b that has seen lengths[b] real tokens and whose
 * budget is k = sinks + heavy + recent: held = min(lengths[b], k) slots are
 * filled; they lie within slots 0..held; if the hole among these held + 1 is
 * not the last one it is free[b,g]. So the step that fills free[b,g] finds
 * slots 0..held all filled. Empty slots have position -1.
 * X(name, shape, dtype, flags of operations.h), in the order of h2o.slots.Slots. */
#define H2O_SLOTS_FIELDS(X)                                                                        \
    /* rows f32/f16/bf16, or u8 rows of quantise.h */                                              \
    X(keys, "BGSD", H2O_NONE, H2O_PER_SLOT | H2O_ATTENDED | H2O_STORED | H2O_DENSE | H2O_WRITTEN)  \
    /* the same; absent where the keys are the values too: once checked they are those views */    \
    X(values, "BGSD", H2O_NONE,                                                                    \
      H2O_PER_SLOT | H2O_ATTENDED | H2O_STORED | H2O_OPTIONAL | H2O_DENSE | H2O_WRITTEN)           \
    /* what attention each key has received */                                                     \
    X(scores, "BGS", H2O_F32, H2O_PER_SLOT | H2O_ATTENDED | H2O_SCORED | H2O_DENSE | H2O_WRITTEN)  \
    /* index in the row without pads, -1 empty */                                                  \
    X(positions, "BGS", H2O_I32, H2O_PER_SLOT | H2O_ATTENDED | H2O_DENSE | H2O_WRITTEN)            \
    /* the slot that the next token takes */                                                       \
    X(free, "BG", H2O_I32, H2O_WRITTEN)                                                            \
    /* real tokens that the row has seen */                                                        \
    X(lengths, "B", H2O_I64, H2O_WRITTEN)                                                          \
    /* heavy, recent */                                                                            \
    X(budget, "BG2", H2O_I32, H2O_PER_HEAD)                                                        \
    /* sum of the scores of evicted keys */                                                        \
    X(lost, "BG", H2O_F64, H2O_WRITTEN)                                                            \
    /* L2 norm of each value; given if value_weighted only */                                      \
    X(norms, "BGS", H2O_F32, H2O_PER_SLOT | H2O_OPTIONAL | H2O_DENSE | H2O_WRITTEN)                \
    /* where the slots of each head begin, and where the last one's end */                         \
    X(starts, "+", H2O_I32, H2O_ATTENDED | H2O_OPTIONAL)                                           \
    /* log of a slot's number of keys; given if keys merge only */                                 \
    X(bias, "BGS", H2O_F32, H2O_PER_SLOT | H2O_ATTENDED | H2O_OPTIONAL | H2O_DENSE | H2O_WRITTEN)

#define H2O_FIELD(name, letters, dtype, flags) h2o_view name;
typedef struct {
    H2O_SLOTS_FIELDS(H2O_FIELD)
} h2o_slots;

typedef enum { H2O_RANK_SUM = 0, H2O_RANK_MEAN = 1, H2O_RANK_MAX = 2 } h2o_rank_by;

/* Budgets are per row and live in the slots. What each field means, policy.h knows; how it is
 * spelt and what it may be, h2o_policy_fields of operations.h. */
typedef struct {
    int32_t sinks;
    h2o_rank_by rank_by;
    float decay; /* in [0, 1] */
    bool value_weighted;
    float merge; /* a cosine above which an evicted key goes into another, < 1; 0: none does */
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
    int64_t offset; /* index on the second axis of the store where its slots begin */
    int64_t slots;  /* how many */
    int32_t heavy, recent;
    int64_t budget; /* k */
    int64_t held;   /* slots 0..held of the store, one of them empty, are in use */
    int64_t free;   /* step: the empty one */
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

/* ---- Operations -------------------------------------------------------- */

/* sink_logits, where they are given, are what each query head has in the denominator of every
 * softmax beside the logits of the keys (learned attention sinks; OpenAI, "gpt-oss-120b &
 * gpt-oss-20b Model Card", 2025, arXiv:2508.10925). No value belongs to one, and a row's weights
 * sum to less than 1. -infinity: none; +infinity: all weights are 0. */

/* attend: new query i sees every stored key and new keys j <= i that are no
 * pads. Writes out, writes scores of the new keys, and updates slots.scores in
 * place to decay^n * score + what the n real new queries gave (or the larger of the two). */
typedef struct {
    h2o_view query;  /* [B,H,Q,D] */
    h2o_view keys;   /* [B,G,Q,D] new keys */
    h2o_view values; /* [B,G,Q,D] new values */
    h2o_view mask;   /* [B,Q] u8, optional */
    bool has_slots;  /* of which those that are H2O_ATTENDED */
    h2o_slots slots;
    h2o_view out;         /* [B,Q,H,D], 0 where the query is a pad */
    h2o_view scores;      /* [B,G,Q] f32, 0 where the key is a pad */
    h2o_view sink_logits; /* [H] f32, optional */
    float scale;          /* logits = softcap(scale * q.k) + bias */
    float softcap;        /* 0: none; else cap * tanh(logit / cap) */
    h2o_policy policy;    /* of which it reads rank_by and decay */
    h2o_dims dims;
    h2o_counts counts;
} h2o_attend_params;

/* evict: takes the new keys with the scores that attend gave them into the
 * slots; what the budget has no room for, stored or new, is dropped, or merged.
 * A stored key that is kept keeps its slot, unless that lies beyond the last one
 * in use. Advances lengths, adds the dropped scores to lost, sets free. S must
 * be at least min(k, held + new) for every row. */
typedef struct {
    h2o_view keys;   /* [B,G,Q,D] */
    h2o_view values; /* [B,G,Q,D] */
    h2o_view scores; /* [B,G,Q] f32 */
    h2o_view mask;   /* [B,Q] u8, optional */
    h2o_slots slots;
    h2o_policy policy;
    h2o_dims dims;
    h2o_counts counts;
} h2o_evict_params;

/* Rolled positions: keys are stored before their rotary embedding, and rotated
 * by their rank among the keys held whenever they are read. Elements i < F and
 * F + i of a row turn by angle i; those from 2 F on stay as they are. */
typedef struct {
    h2o_view table; /* [P,2,F] f32, cosines and sines of the angles of each rank; optional */
    h2o_view ranks; /* [B,G,S] i32, -1 empty; given exactly with the table, kept up to date */
} h2o_rotary;

/* An evicted key; position -1: none was evicted. */
typedef struct {
    int32_t position;
    float score;
} h2o_eviction;

/* step: one decode step in one call. Writes the new key and value into the
 * free slot, attends over all held slots and itself, adds the weights to the
 * scores, and, where the row now holds more than its budget, empties the slot
 * that the policy names and makes it the free one. A row whose token is masked
 * stays as it is and its output is 0. */
typedef struct {
    h2o_view query; /* [B,H,1,D] */
    h2o_view key;   /* [B,G,1,D] */
    h2o_view value; /* [B,G,1,D] */
    h2o_view mask;  /* [B,1] u8, optional */
    h2o_slots slots;
    h2o_view out;            /* [B,1,H,D] */
    h2o_rotary rotary;       /* optional; query and key then come without theirs */
    h2o_view sink_logits;    /* [H] f32, optional, as in attend */
    h2o_eviction *evictions; /* [B*G], optional: the key that each head evicts */
    h2o_policy policy;
    float scale;
    float softcap;
    h2o_dims dims;
    h2o_counts counts;
} h2o_step_params;

/* simulate: what a cache that is fed prompt[b] tokens at once and the others
 * one by one would answer, in one call over the whole text. evicted_at[b,g,j]
 * is the first row (column number, pads counted) that no longer sees key j, Q
 * if none, 0 for a pad; scores are those at the end, or at eviction. */
typedef struct {
    h2o_view query;         /* [B,H,Q,D] the whole text */
    h2o_view keys;          /* [B,G,Q,D] */
    h2o_view values;        /* [B,G,Q,D] */
    h2o_view mask;          /* [B,Q] u8, optional */
    h2o_view prompt;        /* [B] i32, real tokens before the first eviction, >= 1 */
    h2o_view budget;        /* [B,2] or [B,G,2] i32: heavy, recent */
    h2o_view stored_keys;   /* optional: what a quantised store would hold of each token, */
    h2o_view stored_values; /* [B,G,Q] rows of quantise.h, by position */
    h2o_view sink_logits;   /* [H] f32, optional, as in attend */
    h2o_view out;           /* [B,Q,H,D] */
    h2o_view evicted_at;    /* [B,G,Q] i32 */
    h2o_view scores;        /* [B,G,Q] f32 */
    h2o_policy policy;
    float scale;
    float softcap;
    h2o_dims dims;
    h2o_counts counts;
} h2o_simulate_params;

#endif
