/* policy.h - the H2O policy: which keys of a row are kept and which are evicted.
 *
 * Every eviction decision is made here, on plain arrays, for one row and one
 * key/value head at a time:
 *
 *   budget   k = sinks + heavy + recent keys are kept.
 *   spared   The first `sinks` positions, the last `recent` positions and pinned keys are never
 *            evicted.
 *   score    The attention that a key has received: the sum over queries or the largest. A score
 *            is finite or NaN; a caller sets it to infinity to pin the key.
 *   rank     Of the other keys the highest ranked are kept. The rank is the score, optionally
 *            divided by the number of queries that have seen the key and multiplied by the norm
 *            of its value.
 *   ties     The lower position is kept. NaN ranks below every number.
 *
 * Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference
 * of Large Language Models" (NeurIPS 2023), section 4, Algorithm 1.
 *
 * Ranks are compared as order-preserving unsigned integers, never as floats, so that the
 * order is total. Functions that run for every decoded token are inline, so that each
 * instruction set level compiles them with its own flags. Their loops have no branches, so
 * that compilers vectorize them.
 */
#ifndef H2O_POLICY_H
#define H2O_POLICY_H

#include "h2o.h"

#include <math.h>
#include <string.h>

/* How the rank is derived from the score. */
typedef enum { H2O_BY_SCORE, H2O_BY_MEAN, H2O_BY_DECAYED_MEAN } h2o_rank_kind;

/* The policy of one row at one length. */
typedef struct {
    int64_t budget;  /* k */
    int32_t first;   /* the lowest position that may be evicted, ... */
    uint32_t span;   /* ... and the number of positions from there on that may be */
    int32_t length;  /* tokens seen, including the newest */
    float log_decay; /* if decay < 1: ln(decay), and */
    float all_ages;  /*   1 / (decay - 1), minus the sum over infinitely many ages; else 0 */
    h2o_rank_kind kind;
    bool value_weighted;
} h2o_ranking;

/* Whether a score is the largest attention from any one query instead of the sum. Both decay in
 * the same way: attention from `age` queries ago counts decay^age. */
H2O_INLINE bool h2o_scores_largest(const h2o_policy *policy) {
    return policy->score_by == H2O_SCORE_MAX;
}

H2O_INLINE float h2o_larger(float a, float b) { return a > b || a != a ? a : b; } /* NaN wins */

/* k. It has 64 bits because each of its parts may be "unlimited". */
H2O_INLINE int64_t h2o_policy_budget(const h2o_policy *policy, int32_t heavy, int32_t recent) {
    return (int64_t)policy->sinks + heavy + recent;
}

/* The number of keys that a row keeps if it has seen length tokens and its budget has not grown. */
H2O_INLINE int64_t h2o_policy_held(int64_t budget, int64_t length) {
    return length < budget ? length : budget;
}

/* The number of keys that a head holds in slots 0..most. It is `most` unless the budget has grown
 * since the head evicted keys, which cannot come back. Then the filled slots are followed by empty
 * ones. positions [most + 1]; -1: empty. */
H2O_INLINE int64_t h2o_policy_filled(const int32_t *positions, int64_t next_slot, int64_t most) {
    if (next_slot < 0 || next_slot >= most || positions[most] >= 0) return most;
    if (positions[next_slot + 1] < 0) return next_slot;
    int64_t held = most - 1; /* the last filled slot, because next_slot is a gap before it */
    while (held > next_slot + 1 && positions[held] < 0) held--;
    return held;
}

/* Updates what depends on the row's length. */
H2O_INLINE void h2o_policy_advance(h2o_ranking *ranking, int32_t recent, int64_t length) {
    const int64_t evictable = length - recent - ranking->first;
    ranking->span = evictable > 0 ? (uint32_t)evictable : 0;
    ranking->length = (int32_t)length;
}

/* The policy of a row that has seen length tokens, including the newest. */
H2O_INLINE h2o_ranking h2o_policy_ranking(const h2o_policy *policy, int32_t heavy, int32_t recent,
                                          int64_t length) {
    h2o_ranking ranking = {
        .budget = h2o_policy_budget(policy, heavy, recent),
        .first = policy->sinks,
        .kind = H2O_BY_SCORE,
        .value_weighted = policy->value_weighted,
    };
    const bool decays = policy->decay < 1.0f;
    if (policy->score_by == H2O_SCORE_MEAN) {
        ranking.kind = decays ? H2O_BY_DECAYED_MEAN : H2O_BY_MEAN;
    }
    if (decays) {
        ranking.log_decay = (float)log((double)policy->decay);
        ranking.all_ages = 1.0f / (policy->decay - 1.0f);
    }
    h2o_policy_advance(&ranking, recent, length);
    return ranking;
}

/* Chooses the min(n, k) of n > 0 candidates that are kept: sets their keep[i] to 1, the others' to
 * 0, and returns their number. Candidates may come in any order; their positions must differ.
 * norms may be NULL unless the policy is value_weighted. O(n).
 * keep [n]; keys [2n]: scratch. */
int64_t h2o_policy_select(const h2o_ranking *ranking, int64_t n, const float *scores,
                          const int32_t *positions, const float *norms, uint8_t *keep,
                          uint32_t *keys);

/* Does what h2o_policy_select does, for keys of ranks that are already computed: the first n of
 * keys [2n]. The rest of keys is scratch. */
int64_t h2o_policy_select_keys(int64_t n, int64_t budget, const int32_t *positions, uint8_t *keep,
                               uint32_t *keys);

/* For selection digit by digit: returns the digit of the nth highest key, counted from 1.
 * counts [digits] has the number of keys with each digit; *nth becomes the key's rank among the
 * keys that share the digit. A key has three digits; the first is its 11 highest bits. */
enum { H2O_POLICY_DIGITS = 1 << 11 };
H2O_INLINE uint32_t h2o_policy_digit(uint32_t key) { return key >> 21; }
uint32_t h2o_policy_cut(const uint32_t *counts, uint32_t digits, int64_t *nth);

/* Maps floats to unsigned integers in the same order. NaN becomes 0, below -infinity, and -0
 * equals +0. */
H2O_INLINE uint32_t h2o_policy_key(float rank) {
    const float sum = rank + 0.0f; /* -0 + 0 is +0 */
    uint32_t bits;
    memcpy(&bits, &sum, sizeof bits);
    const uint32_t flip = (uint32_t)((int32_t)bits >> 31) | 0x80000000u;
    return (bits ^ flip) & (0u - (rank == rank));
}

/* decay^0 + ... + decay^(age-1) = (decay^age - 1) / (decay - 1): the most attention that the
 * queries that saw the key could have given it. If decay is near 1, decay^age - 1 must not
 * cancel, so it is computed as expm1 is: 2^n (e^r - 1) + (2^n - 1). */
H2O_INLINE float h2o_policy_decayed_ages(const h2o_ranking *ranking, float age) {
    const float raw = age * ranking->log_decay;
    const float x = raw > -87.0f ? raw : -87.0f;         /* e^-87: still a normal number */
    const float shifted = x * 1.44269504f + 12582912.0f; /* rounds to an integer: 1.5 * 2^23 */
    const float n = shifted - 12582912.0f;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float tail = 1.0f / 5040;
    tail = tail * r + 1.0f / 720;
    tail = tail * r + 1.0f / 120;
    tail = tail * r + 1.0f / 24;
    tail = tail * r + 1.0f / 6;
    tail = tail * r + 0.5f;
    const float small = tail * (r * r) + r;
    const uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return (power * small + (power - 1.0f)) * ranking->all_ages;
}

H2O_INLINE float h2o_policy_rank(const h2o_ranking *ranking, h2o_rank_kind kind, bool weighted,
                                 float score, int32_t position, float norm) {
    float rank = score;
    if (kind != H2O_BY_SCORE) {
        const int32_t queries = (int32_t)((uint32_t)ranking->length - (uint32_t)position);
        const float age = (float)(queries > 1 ? queries : 1);
        rank /= kind == H2O_BY_MEAN ? age : h2o_policy_decayed_ages(ranking, age);
    }
    return weighted ? rank * norm : rank;
}

/* Attention alone never makes a score infinite: each new token adds at most the number of query
 * heads, and a float stops growing by such steps long before infinity. */
H2O_INLINE bool h2o_policy_is_pinned(float score) { return score == INFINITY; }

/* The factor by which several queries shrink a score: a power of decay. It is not rounded to 0,
 * because a pinned key's infinity times 0 would be NaN, and its key the first to be evicted. */
H2O_INLINE float h2o_policy_faded(float decay, float power) {
    const float least = 0x1p-126f; /* FLT_MIN, which the compiler for GPUs does not define */
    return decay > 0.0f && power < least ? least : power;
}

H2O_INLINE bool h2o_policy_is_evictable(const h2o_ranking *ranking, int32_t position) {
    return (uint32_t)position - (uint32_t)ranking->first < ranking->span;
}

/* The key of a rank; the highest key if the slot's key is spared. */
H2O_INLINE uint32_t h2o_policy_slot_key(const h2o_ranking *ranking, h2o_rank_kind kind,
                                        bool weighted, float score, int32_t position, float norm) {
    const float rank = h2o_policy_rank(ranking, kind, weighted, score, position, norm);
    const uint32_t by_position = !h2o_policy_is_evictable(ranking, position);
    const uint32_t spared = by_position | h2o_policy_is_pinned(score);
    return h2o_policy_key(rank) | (0u - spared);
}

/* Writes all n keys and returns the lowest. */
H2O_INLINE uint32_t h2o_policy_fill_keys(const h2o_ranking *ranking, h2o_rank_kind kind,
                                         bool weighted, int64_t n, const float *H2O_RESTRICT scores,
                                         const int32_t *H2O_RESTRICT positions,
                                         const float *H2O_RESTRICT norms,
                                         uint32_t *H2O_RESTRICT keys) {
    const h2o_ranking local = *ranking;
    uint32_t lowest = UINT32_MAX;
    for (int64_t i = 0; i < n; i++) {
        const float norm = weighted ? norms[i] : 1.0f;
        const uint32_t key =
            h2o_policy_slot_key(&local, kind, weighted, scores[i], positions[i], norm);
        keys[i] = key;
        lowest = key < lowest ? key : lowest;
    }
    return lowest;
}

/* The same, with one loop per kind of rank, none of which branches. */
H2O_INLINE uint32_t h2o_policy_keys(const h2o_ranking *ranking, int64_t n, const float *scores,
                                    const int32_t *positions, const float *norms, uint32_t *keys) {
#define FILL(kind)                                                                                 \
    (ranking->value_weighted                                                                       \
         ? h2o_policy_fill_keys(ranking, kind, true, n, scores, positions, norms, keys)            \
         : h2o_policy_fill_keys(ranking, kind, false, n, scores, positions, norms, keys))
    switch (ranking->kind) {
    case H2O_BY_MEAN:
        return FILL(H2O_BY_MEAN);
    case H2O_BY_DECAYED_MEAN:
        return FILL(H2O_BY_DECAYED_MEAN);
    default:
        return FILL(H2O_BY_SCORE);
    }
#undef FILL
}

/* The key that would be evicted first from a set. */
typedef struct {
    uint32_t key;
    uint32_t position;
    int64_t index;
} h2o_candidate;

/* Finds which of n > 0 keys, in any order, is evicted: the one with the lowest rank or, among
 * equal ranks, the highest position. positions must differ. If all keys are spared, which no
 * consistent state allows, it is the newest.
 * keys [n]: scratch.
 *
 * Three sweeps over memory that is in L1, each a reduction that vectorizes: the lowest key, the
 * highest position with that key, the index of that position. */
H2O_INLINE h2o_candidate h2o_policy_candidate(const h2o_ranking *ranking, int64_t n,
                                              const float *scores, const int32_t *positions,
                                              const float *norms, uint32_t *H2O_RESTRICT keys) {
    const uint32_t lowest = h2o_policy_keys(ranking, n, scores, positions, norms, keys);
    const int32_t count = (int32_t)n;
    /* Masks instead of conditions, which gcc would turn into branches. */
    uint32_t newest = 0;
    for (int32_t i = 0; i < count; i++) {
        const uint32_t position = (uint32_t)positions[i] & (0u - (keys[i] == lowest));
        newest = position > newest ? position : newest;
    }
    int32_t victim = 0;
    for (int32_t i = 0; i < count; i++) {
        const int32_t is_worst = (keys[i] == lowest) & ((uint32_t)positions[i] == newest);
        const int32_t index = i & -is_worst;
        victim = index > victim ? index : victim;
    }
    const h2o_candidate worst = {lowest, newest, victim};
    return worst;
}

/* Merges the candidates of two sets of keys. */
H2O_INLINE h2o_candidate h2o_policy_worse(h2o_candidate a, h2o_candidate b) {
    const bool first = a.key < b.key || (a.key == b.key && a.position > b.position);
    return first ? a : b;
}

#endif
