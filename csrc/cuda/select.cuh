/* select.cuh - algorithms on lists, run by a block: order-preserving stream compaction, the nth
 * highest of n integers by radix select, and sums of doubles in a fixed order.
 *
 * All threads of a block call these functions together, with a select_buffer in shared memory. */
#ifndef H2O_CUDA_SELECT_CUH
#define H2O_CUDA_SELECT_CUH

#include "counts.cuh"

enum { SELECT_BINS = 256, SELECT_LOADS = 8 /* integers that a thread reads at a time */ };

/* Shared memory for one of these functions at a time. */
typedef struct {
    uint32_t bins[SELECT_BINS]; /* of a digit */
    int32_t warps[32];          /* number picked in each warp */
    double sums[EVICT_THREADS];
    uint32_t known; /* the digits found so far */
    int32_t nth;    /* counted among the integers with these digits */
} select_buffer;

static_assert(sizeof(select_buffer) <= SELECT_SHARED);

/* Calls use(i, read(i)) for each i < n of this thread, in order. If there are many, SELECT_LOADS
 * are read before the first is used: `read` must only load, without branches, and leave the rest to
 * `use`. Past the end it reads the thread's first i again, which no other thread writes. */
template <typename READ, typename USE> DEVICE void each_read(int64_t n, READ read, USE use) {
    const int64_t stride = blockDim.x;
    int64_t first = threadIdx.x;
    NO_UNROLL
    for (; first + 2 * stride < n; first += SELECT_LOADS * stride) {
        decltype(read(first)) x[SELECT_LOADS];
        TAKEN(select_of_many, true);
        UNROLL
        for (int j = 0; j < SELECT_LOADS; j++) {
            const int64_t i = first + j * stride;
            x[j] = read(i < n ? i : first);
        }
        UNROLL
        for (int j = 0; j < SELECT_LOADS; j++) {
            if (first + j * stride < n) use(first + j * stride, x[j]);
        }
    }
    NO_UNROLL
    for (; first < n; first += stride) use(first, read(first));
}

/* Calls emit(i, index) for each i < n with picks(read(i)), where index counts them in order from
 * `first` on. Returns first + their number. A warp has SELECT_LOADS runs of 32 at a time; emit must
 * not write anything that is read. */
template <typename READ, typename PICKS, typename EMIT>
DEVICE int64_t compact(int64_t n, int64_t first, select_buffer *buffer, READ read, PICKS picks,
                       EMIT emit) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int64_t span = 32 * SELECT_LOADS;
    NO_UNROLL
    for (int64_t block = 0; block < n; block += warps * span) {
        const int64_t base = block + warp * span;
        uint32_t ballots[SELECT_LOADS] = {};
        int32_t count = 0;
        if (base < n) {
            decltype(read(n)) x[SELECT_LOADS];
            UNROLL
            for (int j = 0; j < SELECT_LOADS; j++) x[j] = read(lower(base + 32 * j + lane, n - 1));
            UNROLL
            for (int j = 0; j < SELECT_LOADS; j++) {
                ballots[j] = warp_ballot(base + 32 * j + lane < n && picks(x[j]));
                count += popcount(ballots[j]);
            }
        }
        if (lane == 0) buffer->warps[warp] = count;
        sync_block();
        int64_t before = first, after = first;
        for (int w = 0; w < warps; w++) {
            before += w < warp ? buffer->warps[w] : 0;
            after += buffer->warps[w];
        }
        UNROLL
        for (int j = 0; j < SELECT_LOADS; j++) {
            const uint32_t lower_lanes = ballots[j] & ((1u << lane) - 1);
            if (ballots[j] >> lane & 1) emit(base + 32 * j + lane, before + popcount(lower_lanes));
            before += popcount(ballots[j]);
        }
        first = after;
        sync_block();
    }
    return first;
}

/* Calls emit(q, index) for each column q of row b that is a token, where index counts the tokens.
 * Returns their number. */
template <typename EMIT>
DEVICE int64_t each_token(const h2o_view *mask, int64_t b, int64_t Q, select_buffer *buffer,
                          EMIT emit) {
    if (h2o_given(mask)) {
        return compact(
            Q, 0, buffer, [&](int64_t q) { return *(const uint8_t *)h2o_at(mask, b, q, 0); },
            [](uint8_t token) { return token != 0; }, emit);
    }
    NO_UNROLL
    for (int64_t q = threadIdx.x; q < Q; q += blockDim.x) emit(q, q);
    sync_block();
    return Q;
}

/* Finds the next digit of the nth highest, given bins[] that count digits, and its rank among those
 * with this digit; called by one warp. Lane 0 has the 8 highest bins, lane 1 the next 8, and so on:
 * shuffles sum up those of earlier lanes, and the lane whose bins reach n looks at each of them. */
DEVICE void find_digit(select_buffer *buffer, int shift) {
    enum { BINS = SELECT_BINS / 32 };
    const int lane = threadIdx.x % 32, highest = SELECT_BINS - 1 - BINS * lane;
    const int32_t n = buffer->nth;
    int32_t bins[BINS], lane_sum = 0;
    UNROLL
    for (int i = 0; i < BINS; i++) {
        bins[i] = (int32_t)buffer->bins[highest - i];
        lane_sum += bins[i];
    }
    int32_t before = 0, all = lane_sum;
    UNROLL
    for (int offset = 1; offset < 32; offset *= 2) {
        const int32_t others = shfl_xor(all, offset);
        if (lane & offset) before += others;
        all += others;
    }
    const uint32_t reached = warp_ballot(n <= before + lane_sum);
    sync_warp(); /* all lanes have read what is changed below */
    const int first = reached ? popcount((reached & (0u - reached)) - 1) : 31;
    if (lane != first) return;
    int digit = highest;
    int32_t nth = n - before;
    UNROLL
    for (int i = 0; i < BINS - 1; i++) {
        if (digit == highest - i && nth > bins[i]) {
            nth -= bins[i];
            digit--;
        }
    }
    buffer->nth = nth;
    buffer->known |= (uint32_t)digit << shift;
}

/* The nth highest, counted from 1, of key(i, read(i)) over all i < n with picks(read(i)), of which
 * there must be at least nth. Of those that equal it, *among are within the nth highest. Radix
 * select: each pass counts those that match the digits known so far by their next digit. */
template <typename READ, typename PICKS, typename KEY>
DEVICE uint32_t nth_highest(int64_t n, int64_t nth, int64_t *among, select_buffer *buffer,
                            READ read, PICKS picks, KEY key) {
    if (threadIdx.x == 0) {
        buffer->known = 0;
        buffer->nth = (int32_t)nth;
    }
    uint32_t mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        NO_UNROLL
        for (int i = threadIdx.x; i < SELECT_BINS; i += blockDim.x) buffer->bins[i] = 0;
        sync_block();
        const uint32_t known = buffer->known;
        each_read(n, read, [&](int64_t i, const auto &x) {
            if (!picks(x)) return;
            const uint32_t k = key(i, x);
            if ((k & mask) == known) count_shared(&buffer->bins[k >> shift & 255]);
        });
        sync_block();
        if (threadIdx.x / 32 == 0) find_digit(buffer, shift);
        mask |= 255u << shift;
        sync_block();
    }
    *among = buffer->nth;
    const uint32_t highest = buffer->known;
    sync_block();
    return highest;
}

/* The sum of x over all threads, in a fixed order. */
DEVICE double block_sum(double x, select_buffer *buffer) {
    buffer->sums[threadIdx.x] = x;
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        sync_block();
        if (threadIdx.x < half) buffer->sums[threadIdx.x] += buffer->sums[threadIdx.x + half];
    }
    sync_block();
    const double sum = buffer->sums[0];
    sync_block();
    return sum;
}

#endif
