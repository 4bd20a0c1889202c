/* test_policy.c - the policy against a plain sort, and its corner cases. */
#include "policy.h"

#include "test.h"

#include <float.h>
#include <math.h>

enum { ROOM = 3000 };

#define CHECK_CLOSE(got, wanted, most) CHECK(fabs((double)(got) - (double)(wanted)) <= (most))

typedef struct {
    int64_t n;
    float scores[ROOM], norms[ROOM];
    int32_t positions[ROOM];
} candidates;

static const float infinity = INFINITY, not_a_number = NAN;

/* ---- A ranking by sorting ---------------------------------------------- */

typedef struct {
    bool spared;
    float rank;
    int32_t position;
    int64_t index;
} entry;

/* Orders entries from best to worst. */
static int by_worth(const void *left, const void *right) {
    const entry *const a = left, *const b = right;
    if (a->spared != b->spared) return a->spared ? -1 : 1;
    if (!a->spared) {
        const bool a_is_nan = isnan(a->rank), b_is_nan = isnan(b->rank);
        if (a_is_nan != b_is_nan) return a_is_nan ? 1 : -1;
        if (!a_is_nan && a->rank != b->rank) return a->rank > b->rank ? -1 : 1;
    }
    return a->position < b->position ? -1 : 1;
}

static void sort_entries(const h2o_policy *policy, int32_t recent, int64_t length,
                         const h2o_ranking *ranking, const candidates *c, entry *entries) {
    for (int64_t i = 0; i < c->n; i++) {
        const int32_t position = c->positions[i];
        entries[i] = (entry){
            .spared = position < policy->sinks || position >= length - recent,
            .rank = h2o_policy_rank(ranking, ranking->kind, ranking->value_weighted, c->scores[i],
                                    position, c->norms[i]),
            .position = position,
            .index = i,
        };
    }
    qsort(entries, (size_t)c->n, sizeof *entries, by_worth);
}

/* Distinct positions below length, always including the newest, in any order. */
static void fill_candidates(candidates *c, int64_t n, int64_t length, int levels,
                            test_random *random) {
    const float odd[] = {infinity, -infinity, not_a_number, -0.0f, 0.0f, FLT_MAX, FLT_MIN};
    int64_t missing = length - n;
    c->n = 0;
    for (int64_t position = 0; position < length; position++) {
        const int64_t ahead = length - 1 - position;
        const bool skip = missing > 0 && ahead > 0 && random_int(random, 1, ahead) <= missing;
        missing -= skip;
        if (!skip) c->positions[c->n++] = (int32_t)position;
    }
    CHECK(c->n == n);
    for (int64_t i = 0; i < n; i++) {
        const int64_t j = random_int(random, i, n - 1);
        const int32_t swapped = c->positions[i];
        c->positions[i] = c->positions[j];
        c->positions[j] = swapped;
        c->norms[i] = random_float(random) + 0.5f;
        c->scores[i] = levels ? (float)random_int(random, 0, levels) : random_float(random);
        if (random_int(random, 0, 60) == 0) c->scores[i] = odd[random_int(random, 0, 6)];
    }
}

static h2o_policy random_policy(test_random *random) {
    static const float decays[] = {1.0f, 1.0f, 0.9f, 0.0f, 0.9999f};
    return (h2o_policy){
        .sinks = (int32_t)random_int(random, 0, 5),
        .score_by = (h2o_score_by)random_int(random, H2O_SCORE_SUM, H2O_SCORE_MAX),
        .decay = decays[random_int(random, 0, 4)],
        .value_weighted = random_int(random, 0, 2) == 0,
    };
}

/* ---- Tests ------------------------------------------------------------- */

static void keys_order_floats(void) {
    const float ascending[] = {-infinity,    -FLT_MAX, -1.0f, -FLT_MIN, -FLT_TRUE_MIN, 0.0f,
                               FLT_TRUE_MIN, FLT_MIN,  1.0f,  FLT_MAX,  infinity};
    uint32_t before = h2o_policy_key(not_a_number);
    CHECK(before == h2o_policy_key(-not_a_number));
    for (size_t i = 0; i < sizeof ascending / sizeof *ascending; i++) {
        const uint32_t key = h2o_policy_key(ascending[i]);
        CHECK(key > before);
        before = key;
    }
    CHECK(h2o_policy_key(-0.0f) == h2o_policy_key(0.0f));
    CHECK(before < UINT32_MAX); /* the key of spared keys */
}

static void ranks_follow_their_formulas(void) {
    static const float decays[] = {0.0f, 0.25f, 0.5f, 0.9f, 0.99f, 0.999f, 0.99999f, 0.99999994f};
    static const int32_t ages[] = {1, 2, 3, 10, 100, 1000, 30000, 1 << 24};
    for (size_t i = 0; i < sizeof decays / sizeof *decays; i++) {
        for (size_t j = 0; j < sizeof ages / sizeof *ages; j++) {
            const h2o_policy policy = {.score_by = H2O_SCORE_MEAN, .decay = decays[i]};
            const h2o_ranking ranking = h2o_policy_ranking(&policy, 1, 1, ages[j] + 5);
            const float rank = h2o_policy_rank(&ranking, ranking.kind, false, 3.0f, 5, 0.0f);
            const double d = decays[i];
            const double all = d == 0.0 ? 1.0 : -expm1(ages[j] * log(d)) / (1.0 - d);
            CHECK(fabs(rank * all / 3.0 - 1.0) < 5e-7);
        }
    }
    const h2o_policy mean = {.score_by = H2O_SCORE_MEAN, .decay = 1.0f, .value_weighted = true};
    const h2o_ranking by_mean = h2o_policy_ranking(&mean, 1, 1, 12);
    CHECK(h2o_policy_rank(&by_mean, by_mean.kind, true, 8.0f, 8, 3.0f) == 6.0f);
    const h2o_policy sum = {.score_by = H2O_SCORE_SUM, .decay = 0.5f};
    const h2o_ranking by_sum = h2o_policy_ranking(&sum, 1, 1, 12);
    CHECK(h2o_policy_rank(&by_sum, by_sum.kind, false, 8.0f, 8, 3.0f) == 8.0f);
    const h2o_policy max = {.score_by = H2O_SCORE_MAX, .decay = 0.5f, .value_weighted = true};
    const h2o_ranking by_max = h2o_policy_ranking(&max, 1, 1, 12);
    CHECK(h2o_policy_rank(&by_max, by_max.kind, true, 0.5f, 3, 3.0f) == 1.5f);
    CHECK(h2o_scores_largest(&max) && !h2o_scores_largest(&mean) && !h2o_scores_largest(&sum));
}

static void infinity_spares_a_key(void) {
    const h2o_policy policy = {.score_by = H2O_SCORE_MEAN, .decay = 0.5f, .value_weighted = true};
    const h2o_ranking ranking = h2o_policy_ranking(&policy, 1, 1, 12);
    for (int i = 0; i < 2; i++) { /* with norms of 0 and 1 */
        CHECK(h2o_policy_slot_key(&ranking, ranking.kind, true, infinity, 5, (float)i) ==
              UINT32_MAX);
        CHECK(h2o_policy_slot_key(&ranking, ranking.kind, true, FLT_MAX, 5, (float)i) < UINT32_MAX);
        CHECK(h2o_policy_slot_key(&ranking, ranking.kind, true, -infinity, 5, 1) < UINT32_MAX);
        CHECK(h2o_policy_slot_key(&ranking, ranking.kind, true, not_a_number, 5, 1) == 0);
    }
}

static void the_larger_is_nan_where_either_is(void) {
    CHECK(h2o_larger(1.0f, 2.0f) == 2.0f && h2o_larger(2.0f, 1.0f) == 2.0f);
    CHECK(isnan(h2o_larger(not_a_number, 1.0f)) && isnan(h2o_larger(1.0f, not_a_number)));
}

static void select_equals_a_sort(test_random *random) {
    static candidates c;
    static entry entries[ROOM];
    static uint8_t keep[ROOM], expected[ROOM];
    static uint32_t keys[2 * ROOM];
    for (int trial = 0; trial < 400; trial++) {
        const int64_t n = random_int(random, 1, trial < 200 ? 40 : ROOM);
        const int64_t length = n + random_int(random, 0, n);
        const h2o_policy policy = random_policy(random);
        const int32_t heavy = (int32_t)random_int(random, 0, n / 2 + 3);
        const int32_t recent = (int32_t)random_int(random, heavy + policy.sinks == 0, n / 2 + 3);
        fill_candidates(&c, n, length, trial % 3 ? 0 : 5, random);
        const h2o_ranking ranking = h2o_policy_ranking(&policy, heavy, recent, length);
        sort_entries(&policy, recent, length, &ranking, &c, entries);
        const int64_t stay = h2o_policy_held(policy.sinks + heavy + recent, n);
        memset(expected, 0, sizeof expected);
        for (int64_t i = 0; i < stay; i++) expected[entries[i].index] = 1;
        CHECK(h2o_policy_select(&ranking, n, c.scores, c.positions, c.norms, keep, keys) == stay);
        CHECK(memcmp(keep, expected, (size_t)n) == 0);
    }
}

static void victim_equals_a_sort(test_random *random) {
    static candidates c;
    static entry entries[ROOM];
    static uint8_t keep[ROOM];
    static uint32_t keys[2 * ROOM];
    for (int trial = 0; trial < 400; trial++) {
        const h2o_policy policy = random_policy(random);
        const int32_t heavy = (int32_t)random_int(random, 0, trial < 200 ? 20 : 800);
        const int32_t recent = (int32_t)random_int(random, heavy + policy.sinks == 0, 300);
        const int64_t n = policy.sinks + heavy + recent + 1;
        const int64_t length = n + random_int(random, 0, n);
        fill_candidates(&c, n, length, trial % 3 ? 0 : 3, random);
        for (int64_t i = 0; i < n; i++) { /* in a consistent state the windows are complete */
            c.positions[i] = (int32_t)i;
            if (i >= policy.sinks) c.positions[i] += (int32_t)(length - n);
        }
        const h2o_ranking ranking = h2o_policy_ranking(&policy, heavy, recent, length);
        sort_entries(&policy, recent, length, &ranking, &c, entries);
        const int64_t victim =
            h2o_policy_candidate(&ranking, n, c.scores, c.positions, c.norms, keys).index;
        CHECK(victim == entries[n - 1].index);
        CHECK(h2o_policy_select(&ranking, n, c.scores, c.positions, c.norms, keep, keys) == n - 1);
        CHECK(!keep[victim]);
    }
}

static void ties_leave_the_lower_position(void) {
    const float scores[] = {1, 1, 1, 1, 1, 1};
    const int32_t positions[] = {3, 0, 5, 1, 4, 2};
    const h2o_policy policy = {.decay = 1.0f};
    uint8_t keep[6];
    uint32_t keys[12];
    const h2o_ranking ranking = h2o_policy_ranking(&policy, 2, 1, 6);
    CHECK(h2o_policy_select(&ranking, 6, scores, positions, NULL, keep, keys) == 3);
    for (int i = 0; i < 6; i++) {
        CHECK(keep[i] == (positions[i] < 2 || positions[i] == 5));
    }
    CHECK(h2o_policy_candidate(&ranking, 6, scores, positions, NULL, keys).index == 4);
    /* The first candidate can be the one: here it has position 4, the other one 2. */
    const h2o_candidate first =
        h2o_policy_candidate(&ranking, 2, scores + 4, positions + 4, NULL, keys);
    CHECK(first.index == 0 && first.position == 4);
}

static void a_nan_leaves_first(void) {
    const float scores[] = {0.5f, -infinity, not_a_number, 0.25f, 9.0f};
    const int32_t positions[] = {0, 1, 2, 3, 4};
    const h2o_policy policy = {.decay = 1.0f};
    uint32_t keys[5];
    const h2o_ranking ranking = h2o_policy_ranking(&policy, 4, 0, 5);
    CHECK(h2o_policy_candidate(&ranking, 5, scores, positions, NULL, keys).index == 2);
}

static void unlimited_budgets_keep_all(void) {
    const float scores[] = {3, 1, 2};
    const int32_t positions[] = {0, 1, 2};
    const h2o_policy policy = {.sinks = INT32_MAX, .decay = 1.0f};
    uint8_t keep[3];
    uint32_t keys[6];
    const h2o_ranking ranking = h2o_policy_ranking(&policy, INT32_MAX, INT32_MAX, INT32_MAX);
    CHECK(ranking.budget == (int64_t)3 * INT32_MAX);
    CHECK(h2o_policy_held(ranking.budget, INT32_MAX) == INT32_MAX);
    CHECK(h2o_policy_select(&ranking, 3, scores, positions, NULL, keep, keys) == 3);
    CHECK(keep[0] && keep[1] && keep[2]);
}

/* With 3 sinks and 4 recent keys, all of 5 tokens are spared, some for both reasons. */
static void sinks_may_overlap_the_recent(void) {
    const float scores[] = {0, 0, 0, 0, 0};
    const int32_t positions[] = {0, 1, 2, 3, 4};
    const h2o_policy policy = {.sinks = 3, .decay = 1.0f};
    uint32_t keys[5];
    const h2o_ranking ranking = h2o_policy_ranking(&policy, 0, 4, 5);
    for (int i = 0; i < 5; i++) CHECK(!h2o_policy_is_evictable(&ranking, positions[i]));
    CHECK(h2o_policy_candidate(&ranking, 5, scores, positions, NULL, keys).index == 4);
}

/* h2o never has such a state, but whatever a caller passes must not cause writes beyond k. */
static void repeated_positions_stay_within_the_budget(void) {
    const float scores[] = {1, 1, 1, 1, 1, 1};
    const int32_t positions[] = {7, 7, 7, 7, 7, 7};
    const h2o_policy policy = {.decay = 1.0f};
    uint8_t keep[6];
    uint32_t keys[12];
    const h2o_ranking ranking = h2o_policy_ranking(&policy, 2, 0, 8);
    const int64_t kept = h2o_policy_select(&ranking, 6, scores, positions, NULL, keep, keys);
    int64_t marked = 0;
    for (int i = 0; i < 6; i++) marked += keep[i];
    CHECK(kept == 2 && marked == 2 && keep[0] && keep[1]); /* the last ones are dropped */
    const int64_t victim = h2o_policy_candidate(&ranking, 6, scores, positions, NULL, keys).index;
    CHECK(victim >= 0 && victim < 6);
}

int main(void) {
    test_random random = {.state = 1};
    keys_order_floats();
    ranks_follow_their_formulas();
    the_larger_is_nan_where_either_is();
    infinity_spares_a_key();
    select_equals_a_sort(&random);
    victim_equals_a_sort(&random);
    ties_leave_the_lower_position();
    a_nan_leaves_first();
    unlimited_budgets_keep_all();
    sinks_may_overlap_the_recent();
    repeated_positions_stay_within_the_budget();
    return 0;
}
