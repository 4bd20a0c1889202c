/* policy.c - selects the keys of a prompt or chunk that are kept: the part of policy.h that
 * runs once for many keys. */
#include "policy.h"

uint32_t h2o_policy_cut(const uint32_t *counts, uint32_t digits, int64_t *nth) {
    uint32_t digit = digits - 1;
    while (digit > 0 && *nth > counts[digit]) {
        *nth -= counts[digit--];
    }
    return digit;
}

/* The nth highest of n keys, counted from 1. Of the keys that equal it, *among are within the n
 * highest. Radix select: each pass takes the keys that match the digits known so far and counts
 * them by their next digit. */
static uint32_t nth_highest(const uint32_t *keys, int64_t n, int64_t nth, int64_t *among) {
    static const struct {
        int shift;
        uint32_t digits;
    } passes[] = {{21, 2047}, {10, 2047}, {0, 1023}};
    uint32_t counts[2048];
    uint32_t known = 0, mask = 0;
    for (size_t pass = 0; pass < sizeof passes / sizeof passes[0]; pass++) {
        const int shift = passes[pass].shift;
        const uint32_t digits = passes[pass].digits;
        memset(counts, 0, sizeof counts);
        for (int64_t i = 0; i < n; i++) {
            if ((keys[i] & mask) == known) {
                counts[(keys[i] >> shift) & digits]++;
            }
        }
        known |= h2o_policy_cut(counts, digits + 1, &nth) << shift;
        mask |= digits << shift;
    }
    *among = nth;
    return known;
}

/* The highest position that is kept if the `among` lowest positions with key `tied` are kept. */
static int32_t last_of_ties(const uint32_t *keys, uint32_t tied, const int32_t *positions,
                            int64_t n, int64_t among, uint32_t *scratch) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        scratch[count] = ~(uint32_t)positions[i];
        count += keys[i] == tied;
    }
    if (count <= among) {
        return INT32_MAX;
    }
    return (int32_t)~nth_highest(scratch, count, among, &among);
}

int64_t h2o_policy_select_keys(int64_t n, int64_t budget, const int32_t *positions, uint8_t *keep,
                               uint32_t *keys) {
    if (n <= budget) {
        memset(keep, 1, (size_t)n);
        return n;
    }
    int64_t among;
    const uint32_t lowest = nth_highest(keys, n, budget, &among);
    const int32_t last = last_of_ties(keys, lowest, positions, n, among, keys + n);
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++) {
        keep[i] = (keys[i] > lowest) | ((keys[i] == lowest) & (positions[i] <= last));
        kept += keep[i];
    }
    /* More keys than the budget can be left only if positions repeat. */
    for (int64_t i = n - 1; kept > budget; i--) {
        const bool tied = keep[i] && keys[i] == lowest;
        keep[i] = keep[i] && !tied;
        kept -= tied;
    }
    return kept;
}

int64_t h2o_policy_select(const h2o_ranking *ranking, int64_t n, const float *scores,
                          const int32_t *positions, const float *norms, uint8_t *keep,
                          uint32_t *keys) {
    if (n > ranking->budget) h2o_policy_keys(ranking, n, scores, positions, norms, keys);
    return h2o_policy_select_keys(n, ranking->budget, positions, keep, keys);
}
