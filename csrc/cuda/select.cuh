/* select.cuh - what a block does with lists: sums, compaction in order, and the nth highest of
 * some numbers. */
#ifndef H2O_CUDA_SELECT_CUH
#define H2O_CUDA_SELECT_CUH

#include "counts.cuh"

enum { SELECT_BINS = 256 };

/* What the threads of a block agree on, in shared memory. */
typedef struct {
    uint32_t bins[SELECT_BINS];
    int32_t warps[32];
    double sums[EVICT_THREADS];
    uint32_t known;
    int32_t nth;
} select_room;

/* Calls emit(i, place) for each i < n with picks(i), where place counts these in order from `first`
 * on; returns first + how many there were. */
template <typename PICKS, typename EMIT>
DEVICE int64_t compact(int64_t n, int64_t first, select_room *room, PICKS picks, EMIT emit) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    ROLLED
    for (int64_t base = 0; base < n; base += blockDim.x) {
        const int64_t i = base + threadIdx.x;
        const bool picked = i < n && picks(i);
        const uint32_t votes = warp_ballot(picked);
        if (lane == 0) room->warps[warp] = popcount(votes);
        sync_block();
        int64_t before = first, all = first;
        for (int w = 0; w < warps; w++) {
            before += w < warp ? room->warps[w] : 0;
            all += room->warps[w];
        }
        if (picked) emit(i, before + popcount(votes & ((1u << lane) - 1)));
        first = all;
        sync_block();
    }
    return first;
}

/* The nth highest, counted from 1, of key(i) for those i < n with picks(i), of which there are at
 * least n; *among is how many of those equal to it belong to the nth highest. Radix select: each
 * pass counts those that agree with the digits known so far by their next digit. */
template <typename PICKS, typename KEY>
DEVICE uint32_t nth_highest(int64_t n, int64_t nth, int64_t *among, select_room *room, PICKS picks,
                            KEY key) {
    if (threadIdx.x == 0) {
        room->known = 0;
        room->nth = (int32_t)nth;
    }
    uint32_t mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        ROLLED
        for (int i = threadIdx.x; i < SELECT_BINS; i += blockDim.x) room->bins[i] = 0;
        sync_block();
        const uint32_t known = room->known;
        ROLLED
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
            if (!picks(i)) continue;
            const uint32_t k = key(i);
            if ((k & mask) == known) count_shared(&room->bins[k >> shift & 255]);
        }
        sync_block();
        if (threadIdx.x == 0) {
            int digit = 255;
            while (digit > 0 && room->nth > (int32_t)room->bins[digit]) {
                room->nth -= (int32_t)room->bins[digit--];
            }
            room->known = known | (uint32_t)digit << shift;
        }
        mask |= 255u << shift;
        sync_block();
    }
    *among = room->nth;
    const uint32_t found = room->known;
    sync_block();
    return found;
}

/* The sum over all threads, in a fixed order. */
DEVICE double block_sum(double mine, select_room *room) {
    room->sums[threadIdx.x] = mine;
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        sync_block();
        if (threadIdx.x < half) room->sums[threadIdx.x] += room->sums[threadIdx.x + half];
    }
    sync_block();
    const double sum = room->sums[0];
    sync_block();
    return sum;
}

#endif
