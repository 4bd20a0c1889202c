/* step_matrix.cuh - step_part.cuh with tensor cores: a block's parts of a decode step if queries
 * and rows have the same 16-bit format, or if the rows are quantized. plan.c decides for which
 * steps.
 *
 * A warp processes a tile of STEP_ROWS slots at a time for STEP_COLUMNS query heads. Each lane
 * computes
 *
 *   1. S of head lane_row() with slot lane_column(), the next one, and those 8 further on: the
 *      product of matrices [heads, D] and [D, slots]. The order of D does not matter, so a lane's
 *      elements of both are whole runs;
 *   2. running row max m, P = exp(S - m), row sum l, and the rescaling of O;
 *   3. O += P V as [D, slots] x [slots, heads]; P stays in the registers where step 1 has left it.
 *
 * Floats come through shared memory ahead of their use (step_ring.cuh); quantized rows go directly
 * to registers (step_numbers.cuh). After each part the O, m and l of the warps are combined in
 * order. As in a prompt, products are exact and sums are those of floats, except that P is rounded
 * to 16 bits (pack_weights). */
#ifndef H2O_CUDA_STEP_MATRIX_CUH
#define H2O_CUDA_STEP_MATRIX_CUH

#include "step_part.cuh"
#include "step_numbers.cuh"
#include "step_ring.cuh"

/* A warp's softmax over the slots so far: the row max of head lane_row() and the lane's share of
 * its row sum; of O, the elements that output_of names, for heads lane_column() and the next. */
template <int DEPTH> struct step_state {
    float row_max, row_sum;
    float output[DEPTH / 16][4];
    float *logits; /* of head lane_row(), if is_head, for the tile's slot lane_column() */
    bool is_head;
};

/* ---- Queries ------------------------------------------------------------- */

/* Loads head lane_row(), counted from head r of the group; 0 past the last head. */
template <int DEPTH, typename KEYS>
DEVICE void load_heads(const step_item *item, int r, vec16 query[DEPTH / 32]) {
    const int head = r + lane_row();
    const char *const from = item->query.data + head * item->query_stride;
    const int D = head < item->R ? (int)item->D : 0;
    UNROLL
    for (int i = 0; i < DEPTH / 32; i++) {
        const int d = KEYS::query_run(i);
        query[i] = d < D ? load_eight(from + 2 * d) : vec16{};
    }
}

/* ---- A tile -------------------------------------------------------------- */

/* Dot products of heads with the slots of a tile; a lane gets those of its head and four slots. */
template <int DEPTH, h2o_dtype TYPE, typename KEYS>
DEVICE void head_dots(const vec16 query[DEPTH / 32], const KEYS *keys, float x[4]) {
    UNROLL
    for (int n = 0; n < 2; n++) {
        float c[4] = {};
        UNROLL
        for (int i = 0; i < DEPTH / 16; i++) {
            const uint32_t *const q = query[i / 2].w + i % 2 * 2;
            const uint32_t a[4] = {q[0], 0, q[1], 0};
            uint32_t b[2];
            keys->pairs(n, i, b);
            multiply<TYPE>(c, a, b);
        }
        x[2 * n] = c[0] * keys->scale(2 * n);
        x[2 * n + 1] = c[1] * keys->scale(2 * n + 1);
    }
}

/* Turns dot products x of the lane's head into logits, and writes them to state->logits, which then
 * advances to the warp's next tile. -infinity if there is no key. */
template <int DEPTH>
DEVICE void write_logits(const step_item *item, int count, float x[4], step_state<DEPTH> *state) {
    UNROLL
    for (int k = 0; k < 4; k++) {
        const bool is_key = lane_slot(k) < count;
        x[k] = logit_of(x[k], item->scale, item->softcap);
        if (is_key && state->is_head) state->logits[k / 2 * 8 + k % 2] = x[k];
        x[k] = is_key ? x[k] : -INFINITY;
    }
    state->logits += STEP_WARPS * STEP_ROWS;
}

/* Turns logits x into exponentials: step 2. */
template <int DEPTH> DEVICE void update_softmax(float x[4], step_state<DEPTH> *state) {
    const float row_max =
        fmaxf(state->row_max, quad_max(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]))));
    const float rescale = exponential(state->row_max, row_max);
    float row_sum = 0.0f;
    UNROLL
    for (int k = 0; k < 4; k++) {
        x[k] = exponential(x[k], row_max);
        row_sum += x[k];
    }
    /* O is 0 until there is a row max */
    const bool grown = state->row_max != row_max && state->row_max != -INFINITY;
    state->row_max = row_max;
    state->row_sum = fmaf(state->row_sum, rescale, row_sum);
    if (warp_all(!grown)) return;
    const int other = lane_column() * 4; /* the first lane of head lane_column() */
    const float factors[2] = {shfl(rescale, other), shfl(rescale, other + 4)};
    UNROLL
    for (int i = 0; i < DEPTH / 16 * 4; i++) state->output[i / 4][i % 4] *= factors[i % 2];
}

/* Steps 1 to 3 for a tile of slots from `first` on, which ends before slot `end`. */
template <int DEPTH, h2o_dtype TYPE, typename ROWS>
DEVICE void step_tile(const step_item *item, int first, int end, const vec16 query[DEPTH / 32],
                      ROWS *rows, step_state<DEPTH> *state) {
    float x[4];
    rows->load_keys(item, first, end);
    head_dots<DEPTH, TYPE>(query, &rows->keys, x);
    rows->load_values(item, first, end);
    write_logits<DEPTH>(item, end - first, x, state);
    update_softmax<DEPTH>(x, state);
    rows->values.weigh(x);
    const uint32_t b[2] = {pack_weights<TYPE>(x[0], x[1], 0), pack_weights<TYPE>(x[2], x[3], 0)};
    UNROLL
    for (int i = 0; i < DEPTH / 16; i++) {
        uint32_t a[4];
        rows->values.pairs(i, a);
        multiply<TYPE>(state->output[i], a, b);
    }
    rows->leave(item);
}

/* ---- The warps of a block ------------------------------------------------ */

/* What a warp leaves in shared memory for the others. */
template <int DEPTH> struct warp_outputs {
    float pairs[STEP_COLUMNS / 2][2 * DEPTH + 4]; /* O of two heads, interleaved */
    float row_max[STEP_COLUMNS], row_sum[STEP_COLUMNS];
};

template <int DEPTH, h2o_dtype TYPE, typename VALUES>
DEVICE void leave_outputs(const step_state<DEPTH> *state, warp_outputs<DEPTH> *left) {
    const float row_sum = quad_sum(state->row_sum), unit = 1.0f / weight_unit<TYPE>(0);
    UNROLL
    for (int i = 0; i < DEPTH / 16; i++) {
        const float *const x = state->output[i];
        float *const to = &left->pairs[lane_column() / 2][2 * VALUES::output_of(i)];
        UNROLL
        for (int k = 0; k < 4; k++) to[k / 2 * 2 * VALUES::APART + k % 2] = x[k] * unit;
    }
    if (lane_column() == 0) {
        left->row_max[lane_row()] = state->row_max;
        left->row_sum[lane_row()] = row_sum;
    }
}

/* Recomputes NaN among elements d and d + 1 of O, which combine_warps has just written for `heads`
 * heads from r on. The matrix products may have made them NaN by 0 * infinity, if a weight is 0 in
 * float16 but not in 32 bits. */
DEVICE void mend_outputs(const step_item *item, int r, int d, int part, int heads) {
    const int64_t begin = part_begin(item, part), end = part_begin(item, part + 1);
    const slot_rows *const values = &item->store.values;
    NO_UNROLL
    for (int i = 0; i < 2 * heads; i++) {
        const int64_t head = r + i / 2, e = d + i % 2;
        const float *const logits = item->logits + head * item->head.slots;
        float *const to = item->outputs + (part * item->R + head) * item->D + e;
        float row_max = -INFINITY, sum = 0.0f;
        if (*to == *to) continue;
        NO_UNROLL
        for (int64_t s = begin; s < end; s++) row_max = fmaxf(row_max, logits[s]);
        NO_UNROLL
        for (int64_t s = begin; s < end; s++) {
            sum = fmaf(exponential(logits[s], row_max),
                       stored_element(slot_row(values, s), values->type, e, item->D), sum);
        }
        *to = sum;
    }
}

/* Computes row max, row sum and O of the part for heads r.. of the group. A thread computes two
 * elements of two heads, which are adjacent. */
template <int DEPTH>
DEVICE void combine_warps(const step_item *item, int r, int part, const warp_outputs<DEPTH> *left) {
    const int more = (int)item->R - r, D = (int)item->D;
    const int count = more < STEP_COLUMNS ? more : STEP_COLUMNS;
    const int d = threadIdx.x % (DEPTH / 2) * 2;
    NO_UNROLL
    for (int i = threadIdx.x / (DEPTH / 2) * 2; i < count; i += 4 * STEP_THREADS / DEPTH) {
        const int row = part * (int)item->R + r + i;
        float factor[2][STEP_WARPS], sum[4] = {};
        UNROLL
        for (int h = 0; h < 2; h++) {
            float row_max = -INFINITY, row_sum = 0.0f;
            UNROLL
            for (int w = 0; w < STEP_WARPS; w++) row_max = fmaxf(row_max, left[w].row_max[i + h]);
            UNROLL
            for (int w = 0; w < STEP_WARPS; w++) {
                factor[h][w] = exponential(left[w].row_max[i + h], row_max);
                row_sum = fmaf(factor[h][w], left[w].row_sum[i + h], row_sum);
            }
            if (d == 0 && i + h < count) {
                item->row_max[row + h] = row_max;
                item->row_sum[row + h] = row_sum;
            }
        }
        if (d >= D) continue;
        UNROLL
        for (int w = 0; w < STEP_WARPS; w++) {
            const vec16 x = load16(&left[w].pairs[i / 2][2 * d]);
            UNROLL
            for (int k = 0; k < 4; k++) sum[k] = fmaf(factor[k % 2][w], bits_float(x.w[k]), sum[k]);
        }
        float *const to = item->outputs + (int64_t)row * D + d;
        bool finite = true;
        UNROLL
        for (int k = 0; k < 4; k++) {
            if (i + k % 2 >= count) continue;
            to[k % 2 * D + k / 2] = sum[k];
            finite = finite && sum[k] == sum[k];
        }
        if (!finite) mend_outputs(item, r + i, d, part, count - i < 2 ? 1 : 2);
    }
}

/* A block's shared memory: what each warp leaves, and the rows that are being copied for it. */
template <int DEPTH, typename ROWS> struct step_shared {
    warp_outputs<DEPTH> left[STEP_WARPS];
    typename ROWS::shared rows[STEP_WARPS];
};

template <int DEPTH, h2o_dtype TYPE, typename ROWS>
DEVICE void parts_by_tiles(const step_item *item, int part, int last, unsigned char *memory) {
    step_shared<DEPTH, ROWS> *const shared = (step_shared<DEPTH, ROWS> *)memory;
    const int warp = threadIdx.x / 32, heads = (int)item->R;
    ROWS rows;
    rows.open(item, part, last, &shared->rows[warp]);
    TAKEN(matrix_step_of_several_parts, part + 1 < last);
    TAKEN(matrix_step_of_quantized, h2o_row_is_quantized(item->store.keys.type));
    TAKEN(matrix_step_of_floats, !h2o_row_is_quantized(item->store.keys.type));
    NO_UNROLL
    for (; part < last; part++) {
        const int begin = part_begin(item, part), end = part_begin(item, part + 1);
        const int own = begin + warp * STEP_ROWS;
        TAKEN(matrix_step_without_slots, begin == end);
        NO_UNROLL
        for (int r = 0; r < heads; r += STEP_COLUMNS) {
            const int head = r + lane_row();
            vec16 query[DEPTH / 32];
            step_state<DEPTH> state = {};
            TAKEN(matrix_step_of_many_heads, r > 0);
            state.row_max = -INFINITY;
            state.is_head = head < heads;
            state.logits = item->logits + (state.is_head ? head : heads - 1) * item->head.slots +
                           own + lane_column();
            load_heads<DEPTH, decltype(rows.keys)>(item, r, query);
            NO_UNROLL
            for (int first = own; first < end; first += STEP_WARPS * STEP_ROWS)
                step_tile<DEPTH, TYPE>(item, first, end, query, &rows, &state);
            sync_block(); /* all threads have read the previous outputs */
            leave_outputs<DEPTH, TYPE, decltype(rows.values)>(&state, &shared->left[warp]);
            sync_block();
            combine_warps<DEPTH>(item, r, part, shared->left);
        }
    }
}

/* Does all of a block's work on parts part..last-1 of the slots. BYTES: rows are quantized. */
template <int DEPTH, h2o_dtype TYPE, bool BYTES>
DEVICE void matrix_parts(const step_item *item, int part, int last, unsigned char *shared) {
    static_assert(sizeof(warp_outputs<DEPTH>) == CUDA_STEP_OUTPUTS(DEPTH));
    static_assert(sizeof(step_shared<DEPTH, ring_rows<DEPTH>>) ==
                  STEP_WARPS * (CUDA_STEP_OUTPUTS(DEPTH) + CUDA_STEP_RING(DEPTH)));
    if (has_token(item, part_begin(item, part), part_begin(item, last))) {
        store_token<DEPTH>(item);
        sync_block();
    }
    if constexpr (!BYTES) {
        parts_by_tiles<DEPTH, TYPE, ring_rows<DEPTH>>(item, part, last, shared);
    } else {
        typedef number_keys<DEPTH, TYPE, q8_bytes<DEPTH, 16>> q8_keys;
        typedef number_keys<DEPTH, TYPE, s4_bytes<DEPTH>> s4_keys;
        typedef direct_rows<DEPTH, q8_keys, q8_values<DEPTH, TYPE>> byte_rows;
        typedef direct_rows<DEPTH, q8_keys, q4_values<DEPTH, TYPE>> mixed_rows;
        typedef direct_rows<DEPTH, s4_keys, q4_values<DEPTH, TYPE>> half_rows;
        if (!h2o_row_is_grouped(item->store.values.type))
            parts_by_tiles<DEPTH, TYPE, byte_rows>(item, part, last, shared);
        else if (h2o_row_is_grouped(item->store.keys.type))
            parts_by_tiles<DEPTH, TYPE, half_rows>(item, part, last, shared);
        else
            parts_by_tiles<DEPTH, TYPE, mixed_rows>(item, part, last, shared);
    }
}

#endif
