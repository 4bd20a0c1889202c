/* operations.h - the operations: what each computes, its parameters, and their list. Whatever must
 * exist for each operation is generated from the list (tables.h, kernels of CPU and devices). */
#ifndef H2O_OPERATIONS_H
#define H2O_OPERATIONS_H

#include "h2o.h"

/* ---- Parameters -------------------------------------------------------- */

/* sink_logits, if given, adds one term per query head to the denominator of every softmax,
 * beside the logits of the keys (learned attention sinks; OpenAI, "gpt-oss-120b &
 * gpt-oss-20b Model Card", 2025, arXiv:2508.10925). The term has no value, so a row's weights
 * sum to less than 1. -infinity means no sink; with +infinity all weights are 0. */

/* attend: new query i sees every stored key and the new keys j <= i that are not padding.
 * Writes out and the scores of the new keys, and updates slots.scores in place to
 * decay^n * score + the attention from the n real new queries (or to the larger of the two).
 * If log_sums is given, only log_sums is written: the logarithm of each query's softmax
 * denominator, for callers that want the weights of a few keys only. CPUs only.
 * If known_log_sums is given, computed by another attention together with its outputs, GPUs leave
 * out unchanged and write scores only. CPUs ignore it: they compute and write everything. */
typedef struct {
    h2o_view query;  /* [B,H,Q,D] */
    h2o_view keys;   /* [B,G,Q,D] new keys */
    h2o_view values; /* [B,G,Q,D] new values */
    h2o_view mask;   /* [B,Q] u8, optional */
    bool has_slots;  /* slots are given; attend uses their fields that are H2O_ATTENDED */
    h2o_slots slots;
    h2o_view out;            /* [B,Q,H,D], 0 if the query is padding */
    h2o_view scores;         /* [B,G,Q] f32, 0 if the key is padding */
    h2o_view sink_logits;    /* [H] f32, optional */
    h2o_view log_sums;       /* [B,H,Q] f32, optional, 0 if the query is padding */
    h2o_view known_log_sums; /* [B,H,Q] f32, optional; padding is ignored, +infinity means NaN */
    float scale;             /* logits = softcap(scale * q.k) */
    float softcap;           /* 0: none; else cap * tanh(logit / cap) */
    h2o_policy policy;       /* only score_by and decay are used */
    h2o_dims dims;
    h2o_counts counts;
} h2o_attend_params;

/* evict: stores the new keys, with the scores that attend gave them, and drops the keys, stored or
 * new, that exceed the budget. A stored key that is kept stays in its slot, unless that slot lies
 * beyond the last one in use. Advances seen_tokens, adds the dropped scores to evicted_score and
 * sets next_slot. S must be at least min(k, held + new) for every row. */
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

/* Cache-relative positions: keys are stored before their rotary embedding and rotated whenever
 * they are read, by their rank among the held keys. Elements i < F and F + i of a row rotate by
 * angle i; elements from 2 F on stay unchanged. */
typedef struct {
    h2o_view table; /* [P,2,F] f32, cosines and sines of the angles of each rank; optional */
    h2o_view ranks; /* [B,G,S] i32, -1: empty; given if the table is, and updated by the step */
} h2o_rotary;

/* step: one decode step in one call. Writes the new key and value into the free slot, attends over
 * all held slots including the new one, and adds the weights to the scores. If the row then
 * exceeds its budget, the slot that the policy chooses is emptied and becomes the free one. A row
 * whose token is masked does not change, and its output is 0. */
typedef struct {
    h2o_view query; /* [B,H,1,D] */
    h2o_view key;   /* [B,G,1,D] */
    h2o_view value; /* [B,G,1,D] */
    h2o_view mask;  /* [B,1] u8, optional */
    h2o_slots slots;
    h2o_view out;         /* [B,1,H,D] */
    h2o_rotary rotary;    /* optional; query and key then come without rotary embedding */
    h2o_view sink_logits; /* [H] f32, optional, as in attend */
    h2o_policy policy;
    float scale;
    float softcap;
    h2o_dims dims;
    h2o_counts counts;
} h2o_step_params;

/* simulate: the outputs of a cache that is fed prompt[b] tokens at once and the rest one by one,
 * computed in one call over the whole text. evicted_at[b,g,j] is the first row (column number,
 * counting padding) that no longer sees key j: Q if there is none, 0 for padding. scores are those
 * at the end of the text, or at eviction. */
typedef struct {
    h2o_view query;         /* [B,H,Q,D] the whole text */
    h2o_view keys;          /* [B,G,Q,D] */
    h2o_view values;        /* [B,G,Q,D] */
    h2o_view mask;          /* [B,Q] u8, optional */
    h2o_view prompt;        /* [B] i32, real tokens before the first eviction, >= 1 */
    h2o_view budget;        /* [B,2] or [B,G,2] i32: heavy, recent */
    h2o_view stored_keys;   /* optional: each token's rows in a quantized store, */
    h2o_view stored_values; /* [B,G,Q] rows of quantize.h, by position, not by column */
    h2o_view offsets;       /* [B,G,D] f16, optional: of stored_keys, */
    h2o_view smoothing;     /* [B,G,D] f16, optional: likewise */
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

/* A call of attend over the tokens before the first eviction. The caller sets counts. */
H2O_INLINE h2o_attend_params h2o_dense_part(const h2o_simulate_params *p) {
    const h2o_attend_params dense = {
        .query = p->query,
        .keys = p->keys,
        .values = p->values,
        .mask = p->mask,
        .out = p->out,
        .scores = p->scores,
        .sink_logits = p->sink_logits,
        .scale = p->scale,
        .softcap = p->softcap,
        .policy = p->policy,
        .dims = p->dims,
    };
    return dense;
}

/* ---- The list ---------------------------------------------------------- */

/* X(name, NAME): h2o_<name>_params, H2O_<NAME>; its file is <name>.c. */
#define H2O_EACH_OPERATION(X)                                                                      \
    X(attend, ATTEND)                                                                              \
    X(evict, EVICT)                                                                                \
    X(step, STEP)                                                                                  \
    X(simulate, SIMULATE)

#define H2O_ENUM(name, NAME) H2O_##NAME,
typedef enum { H2O_EACH_OPERATION(H2O_ENUM) H2O_OPERATIONS } h2o_operation;
#undef H2O_ENUM

/* Memory for the parameters of any operation. */
#define H2O_MEMBER(name, NAME) h2o_##name##_params name;
typedef union {
    H2O_EACH_OPERATION(H2O_MEMBER)
} h2o_params;
#undef H2O_MEMBER

#endif
