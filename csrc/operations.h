/* operations.h - the operations: what each computes, its parameters, and their list, by which everything
 * else is made that is to be there for each (tables.h, kernels of CPU and devices). */
#ifndef H2O_OPERATIONS_H
#define H2O_OPERATIONS_H

#include "h2o.h"

/* ---- Parameters -------------------------------------------------------- */

/* sink_logits, where they are given, are what each query head has in the denominator of every
 * softmax beside the logits of the keys (learned attention sinks; OpenAI, "gpt-oss-120b &
 * gpt-oss-20b Model Card", 2025, arXiv:2508.10925). No value belongs to one, and a row's weights
 * sum to less than 1. -infinity: none; +infinity: all weights are 0. */

/* attend: new query i sees every stored key and new keys j <= i that are no
 * pads. Writes out, writes scores of the new keys, and updates slots.scores in
 * place to decay^n * score + what the n real new queries gave (or the larger of the two).
 * With log_sums these are all that it writes: log of what the softmax of each query divides by,
 * for who wants the weights of few keys only. On CPUs; GPUs have no such kernel. */
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
    h2o_view log_sums;    /* [B,H,Q] f32, optional, 0 where the query is a pad */
    float scale;          /* logits = softcap(scale * q.k) */
    float softcap;        /* 0: none; else cap * tanh(logit / cap) */
    h2o_policy policy;    /* of which it reads score_by and decay */
    h2o_dims dims;
    h2o_counts counts;
} h2o_attend_params;

/* evict: takes the new keys with the scores that attend gave them into the
 * slots; what the budget has no room for, stored or new, is dropped.
 * A stored key that is kept keeps its slot, unless that lies beyond the last one
 * in use. Advances seen_tokens, adds the dropped scores to evicted_score, sets next_slot. S must
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
    h2o_view stored_keys;   /* optional: what a quantized store would hold of each token, */
    h2o_view stored_values; /* [B,G,Q] rows of quantize.h, by position */
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

/* The tokens before any is evicted, as a call of attend. Whoever counts says how many there are. */
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

/* Room for the parameters of any. */
#define H2O_MEMBER(name, NAME) h2o_##name##_params name;
typedef union {
    H2O_EACH_OPERATION(H2O_MEMBER)
} h2o_params;
#undef H2O_MEMBER

#endif
