/* step_part.cuh - what a block does with its part of a head's slots in a decode step: exponentials,
 * relative to its own highest logit, and what they make of the values. */
#ifndef H2O_CUDA_STEP_PART_CUH
#define H2O_CUDA_STEP_PART_CUH

#include "logits.cuh"
#include "merge.cuh"

/* A key/value head of a row at a step. */
typedef struct {
    const h2o_policy *policy;
    const h2o_rotary *rotary; /* NULL: rotated before */
    int64_t R, D;
    float scale, softcap;
    element_ref query, key, value, out; /* query, out: of the group's first head, ... */
    int64_t query_step, out_step;       /* ... and so many bytes from head to head */
    int32_t *ranks;
    h2o_head head;
    slot_store store;
    int64_t length, slots; /* tokens before this one; slots in use with it */
    int64_t parts;
    float *weights, *tops, *totals, *outputs; /* see step_layout */
    double *lost;
    int32_t *free_slot;
} step_unit;

DEVICE int64_t part_slots(const step_unit *u) { return cuda_ceil(u->slots, u->parts); }

/* ---- Opening ------------------------------------------------------------- */

DEVICE step_unit open_step(const h2o_step_params *p, char *workspace, int64_t b, int64_t g) {
    const step_layout at = cuda_step_layout(p);
    const int64_t R = p->dims.R, D = p->dims.D, unit = b * p->dims.G + g;
    step_unit u = {};
    u.policy = &p->policy;
    u.R = R;
    u.D = D;
    u.scale = p->scale;
    u.softcap = p->softcap;
    u.query = row_of(&p->query, b, g * R, 0);
    u.key = row_of(&p->key, b, g, 0);
    u.value = row_of(&p->value, b, g, 0);
    u.out = row_of(&p->out, b, 0, g * R);
    u.query_step = p->query.stride[1] * h2o_dtype_size(p->query.dtype);
    u.out_step = p->out.stride[2] * h2o_dtype_size(p->out.dtype);
    u.length = read_length(&p->slots.lengths, b, 1);
    u.head = read_head(&p->slots, b, g, &p->policy, u.length);
    u.head.held = lower(u.head.held, u.head.slots - 1);
    if (h2o_given(&p->rotary.table)) {
        u.rotary = &p->rotary;
        u.ranks = (int32_t *)h2o_at(&p->rotary.ranks, b, u.head.offset, 0);
        u.head.held = lower(u.head.held, p->dims.P - 1);
    }
    u.free_slot = (int32_t *)h2o_at(&p->slots.free, b, g, 0);
    u.head.free = within(*u.free_slot, 0, u.head.held);
    u.slots = u.head.held + 1;
    u.store = open_store(&p->slots, b, &u.head, D);
    u.lost = (double *)h2o_at(&p->slots.lost, b, g, 0);
    u.parts = at.parts;
    const int64_t first =
        b * at.slots + (h2o_given(&p->slots.starts) ? u.head.offset : g * cuda_slots(&p->slots));
    u.weights = (float *)(workspace + at.weights) + first * R;
    u.tops = (float *)(workspace + at.tops) + unit * at.parts * R;
    u.totals = (float *)(workspace + at.totals) + unit * at.parts * R;
    u.outputs = (float *)(workspace + at.outputs) + unit * at.parts * R * D;
    return u;
}

/* Puts the new token into the free slot; its position and score come at the end. */
DEVICE void store_token(const step_unit *u) {
    const int64_t slot = u->head.free;
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
        make_row(u->store.keys + slot * u->store.key_stride, u->store.key_type, u->key, u->D);
    } else if (warp == 1) {
        make_row(u->store.values + slot * u->store.value_stride, u->store.value_type, u->value,
                 u->D);
    } else if (warp == 2) {
        const float norm = norm_of(u->value, u->D);
        if (u->store.norms && threadIdx.x % 32 == 0) u->store.norms[slot] = norm;
    } else if (threadIdx.x == 96) {
        u->store.scores[slot] = 0.0f;
        u->store.positions[slot] = (int32_t)u->length;
        if (u->store.bias) u->store.bias[slot] = 0.0f;
        if (u->ranks) u->ranks[slot] = (int32_t)u->head.held;
    }
}

/* ---- Logits -------------------------------------------------------------- */

/* Elements d..d+RUN-1 of a row x with its rotary embedding for a rank. Element i < F and
 * element F + i turn together by angle i. */
template <typename ROW>
DEVICE void load_rotated(const ROW &row, const h2o_rotary *rotary, int64_t rank, int64_t d,
                         int64_t D, float x[RUN]) {
    const int64_t F = rotary->table.shape[2];
    const float *const cosines = (const float *)h2o_at(&rotary->table, rank, 0, 0);
    const float *const sines = (const float *)h2o_at(&rotary->table, rank, 1, 0);
    UNROLL
    for (int j = 0; j < RUN; j++) {
        const int64_t i = d + j, turn = i < F ? i : i - F;
        const float own = i < D ? row(i) : 0.0f;
        x[j] = own;
        if (i < F) x[j] = own * cosines[turn] - row(i + F) * sines[turn];
        if (i >= F && i < 2 * F) x[j] = own * cosines[turn] + row(i - F) * sines[turn];
    }
}

/* Of floats or Q8: rolled keys are nothing else. */
struct stored_elements {
    const char *data;
    h2o_dtype type;
    int64_t D;
    DEVICE_METHOD float operator()(int64_t d) const {
        if (type == H2O_Q8) return load_scalar(data + D, H2O_F16) * (float)(int8_t)data[d];
        return load_number(data + d * h2o_dtype_size(type), type);
    }
};

struct given_elements {
    element_ref row;
    DEVICE_METHOD float operator()(int64_t d) const { return element(row, d); }
};

/* Query heads r.. of the group as floats, 0 beyond the last. */
DEVICE void load_queries(const step_unit *u, int64_t r, float *query) {
    const int64_t depth = cuda_depth(u->D), runs = depth / RUN;
    ROLLED
    for (int64_t i = threadIdx.x; i < STEP_HEADS * runs; i += blockDim.x) {
        const int64_t head = r + i / runs, d = i % runs * RUN;
        element_ref row = u->query;
        row.data += (head < u->R ? head : r) * u->query_step;
        float x[RUN];
        if (u->rotary) {
            load_rotated(given_elements{row}, u->rotary, u->head.held, d, u->D, x);
        } else {
            load_given(row, d, u->D, x);
        }
        UNROLL
        for (int j = 0; j < RUN; j++) query[i / runs * depth + d + j] = head < u->R ? x[j] : 0.0f;
    }
}

/* The logits of a slot for heads r.. of the group: of this thread's head, without an index, which
 * takes memory. */
DEVICE void write_logit(const step_unit *u, int64_t r, int64_t slot, const float sum[STEP_HEADS]) {
    const int head = place_in_team();
    const float bias = u->store.bias ? u->store.bias[slot] : 0.0f;
    float dot = sum[0];
    UNROLL
    for (int i = 1; i < STEP_HEADS; i++) dot = head == i ? sum[i] : dot;
    if (head < STEP_HEADS && r + head < u->R) {
        u->weights[slot * u->R + r + head] = logit_of(dot, u->scale, u->softcap, bias);
    }
}

/* Logits of slots begin..end-1 for heads r.. of the group, N slots of a team at a time by
 * dots(slots, sums). Whole warps take part: in the place of slots beyond the end the last one. */
template <int N, typename DOTS>
DEVICE void logits_by(const step_unit *u, int64_t r, int64_t begin, int64_t end, DOTS dots) {
    for (int64_t base = begin + team_of_thread(); base - team_of_thread() < end;
         base += N * teams()) {
        int64_t slot[N];
        float sum[N][STEP_HEADS];
        UNROLL
        for (int i = 0; i < N; i++) slot[i] = lower(base + i * teams(), end - 1);
        dots(slot, sum);
        UNROLL
        for (int i = 0; i < N; i++) {
            if (base + i * teams() < end) write_logit(u, r, slot[i], sum[i]);
        }
    }
}

DEVICE void part_logits(const step_unit *u, int64_t r, int64_t begin, int64_t end,
                        const float *query) {
    const slot_store *const store = &u->store;
    const int64_t depth = cuda_depth(u->D);
    if (!u->rotary) {
        logits_by<STEP_AHEAD>(u, r, begin, end, [&](const int64_t *slot, float (*sum)[STEP_HEADS]) {
            const char *row[STEP_AHEAD];
            UNROLL
            for (int i = 0; i < STEP_AHEAD; i++) row[i] = store->keys + slot[i] * store->key_stride;
            const auto load = [&](int64_t d, float (*x)[RUN]) {
                load_rows<STEP_AHEAD>(row, store->key_type, d, u->D, x);
            };
            row_dots<STEP_AHEAD, STEP_HEADS>(u->D, query, depth, load, sum);
        });
        return;
    }
    const int64_t P = u->rotary->table.shape[0];
    logits_by<1>(u, r, begin, end, [&](const int64_t *slot, float (*sum)[STEP_HEADS]) {
        const stored_elements key = {store->keys + *slot * store->key_stride, store->key_type,
                                     u->D};
        const int64_t found = u->ranks[*slot], rank = found >= 0 && found < P ? found : 0;
        const auto load = [&](int64_t d, float (*x)[RUN]) {
            load_rotated(key, u->rotary, rank, d, u->D, *x);
        };
        row_dots<1, STEP_HEADS>(u->D, query, depth, load, sum);
    });
}

/* A warp for each head: highest logit, exponentials and their sum. */
DEVICE void part_exponentials(const step_unit *u, int64_t part, int64_t begin, int64_t end) {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    ROLLED
    for (int64_t r = threadIdx.x / 32; r < u->R; r += warps) {
        float top = -INFINITY, total = 0.0f;
        ROLLED
        for (int64_t s = begin + lane; s < end; s += 32) top = fmaxf(top, u->weights[s * u->R + r]);
        top = warp_max(top);
        ROLLED
        for (int64_t s = begin + lane; s < end; s += 32) {
            const float weight = exponential(u->weights[s * u->R + r], top);
            u->weights[s * u->R + r] = weight;
            total += weight;
        }
        total = warp_sum(total);
        if (lane == 0) {
            u->tops[part * u->R + r] = top;
            u->totals[part * u->R + r] = total;
        }
    }
}

/* ---- Values -------------------------------------------------------------- */

/* A thread has a run of the elements and every so many-th slot; then they are added in order. */
DEVICE void part_values(const step_unit *u, int64_t r, int64_t part, int64_t begin, int64_t end,
                        float *sums) {
    const int64_t runs = cuda_depth(u->D) / RUN, rows = blockDim.x / runs;
    const int64_t row = threadIdx.x / runs, d = threadIdx.x % runs * RUN;
    float sum[STEP_HEADS][RUN] = {};
    for (int64_t first = begin + row; first < end && row < rows; first += STEP_AHEAD * rows) {
        const char *value[STEP_AHEAD];
        float x[STEP_AHEAD][RUN];
        UNROLL
        for (int k = 0; k < STEP_AHEAD; k++) {
            value[k] = u->store.values + lower(first + k * rows, end - 1) * u->store.value_stride;
        }
        load_rows<STEP_AHEAD>(value, u->store.value_type, d, u->D, x);
        UNROLL
        for (int k = 0; k < STEP_AHEAD; k++) {
            const int64_t s = first + k * rows;
            if (s >= end) continue;
            UNROLL
            for (int i = 0; i < STEP_HEADS; i++) {
                const float weight = r + i < u->R ? u->weights[s * u->R + r + i] : 0.0f;
                UNROLL
                for (int j = 0; j < RUN; j++) sum[i][j] = fmaf(weight, x[k][j], sum[i][j]);
            }
        }
    }
    sync_block(); /* the queries have been read */
    UNROLL
    for (int i = 0; i < STEP_HEADS; i++) {
        UNROLL
        for (int j = 0; j < RUN; j++) sums[(i * RUN + j) * blockDim.x + threadIdx.x] = sum[i][j];
    }
    sync_block();
    ROLLED
    for (int64_t k = threadIdx.x; k < STEP_HEADS * u->D; k += blockDim.x) {
        const int64_t i = k / u->D, e = k % u->D;
        if (r + i >= u->R) continue;
        float total = 0.0f;
        for (int64_t n = 0; n < rows; n++) {
            total += sums[(i * RUN + e % RUN) * blockDim.x + n * runs + e / RUN];
        }
        u->outputs[(part * u->R + r + i) * u->D + e] = total;
    }
    sync_block();
}

/* What a block does with its slots. */
DEVICE void step_part(const step_unit *u, int64_t part, float *room) {
    const int64_t begin = lower(part * part_slots(u), u->slots);
    const int64_t end = lower(begin + part_slots(u), u->slots);
    if (begin <= u->head.free && u->head.free < end) store_token(u);
    sync_block();
    for (int64_t r = 0; r < u->R; r += STEP_HEADS) {
        load_queries(u, r, room);
        sync_block();
        part_logits(u, r, begin, end, room);
        sync_block();
    }
    part_exponentials(u, part, begin, end);
    sync_block();
    for (int64_t r = 0; r < u->R; r += STEP_HEADS) part_values(u, r, part, begin, end, room);
}

#endif
