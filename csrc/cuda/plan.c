/* plan.c - see plan.h. */
#include "plan.h"

static void add_launch(cuda_plan *plan, const char *kernel, const void *params, size_t size,
                       int64_t x, int64_t y, int64_t z, unsigned block, unsigned shared) {
    if (x * y * z == 0) return;
    plan->launch[plan->count++] =
        (cuda_launch){kernel, params, size, {(unsigned)x, (unsigned)y, (unsigned)z}, block, shared};
}

/* forward and sums, after somebody has prepared the rows. */
static void add_attention(cuda_plan *plan, const h2o_attend_params *params) {
    static const char *const names[][2] = {{"h2o_cuda_forward_64", "h2o_cuda_sums_64"},
                                           {"h2o_cuda_forward_128", "h2o_cuda_sums_128"},
                                           {"h2o_cuda_forward_256", "h2o_cuda_sums_256"}};
    const h2o_dims *const d = &params->dims;
    const int size = d->D <= 64 ? 0 : d->D <= 128 ? 1 : 2;
    const unsigned shared = cuda_attend_shared(64u << size);
    const int64_t queries = cuda_ceil(d->Q, ATTEND_TILE);
    const int64_t stored =
        params->has_slots ? cuda_ceil(cuda_slots(&params->slots), ATTEND_TILE) : 0;
    add_launch(plan, names[size][0], params, sizeof *params, queries, d->H, d->B, ATTEND_THREADS,
               shared);
    add_launch(plan, names[size][1], params, sizeof *params, stored + queries, d->G, d->B,
               ATTEND_THREADS, shared);
}

void cuda_plan_attend(const h2o_attend_params *params, cuda_plan *plan) {
    *plan = (cuda_plan){.workspace = cuda_attend_layout(&params->dims).bytes};
    add_launch(plan, "h2o_cuda_prepare", params, sizeof *params, params->dims.B, 1, 1,
               EVICT_THREADS, cuda_prepare_shared());
    add_attention(plan, params);
}

void cuda_plan_evict(const h2o_evict_params *params, cuda_plan *plan) {
    const h2o_dims *const d = &params->dims;
    const evict_layout at = cuda_evict_call(params);
    *plan = (cuda_plan){.workspace = at.bytes, .cleared = at.cleared};
    add_launch(plan, "h2o_cuda_evict", params, sizeof *params, d->G, d->B, 1, EVICT_THREADS,
               cuda_evict_shared());
}

void cuda_plan_step(const h2o_step_params *params, cuda_plan *plan) {
    const step_layout at = cuda_step_layout(params);
    *plan = (cuda_plan){.workspace = at.bytes, .cleared = at.cleared};
    add_launch(plan, "h2o_cuda_step", params, sizeof *params, at.parts, params->dims.G,
               params->dims.B, STEP_THREADS, cuda_step_shared());
}

/* The tokens before any is evicted, as a call of attend; a kernel says how many they are. */
static h2o_attend_params dense_part(const h2o_simulate_params *p) {
    return (h2o_attend_params){
        .query = p->query,
        .keys = p->keys,
        .values = p->values,
        .mask = p->mask,
        .out = p->out,
        .scores = p->scores,
        .scale = p->scale,
        .decay = p->policy.decay,
        .softcap = p->softcap,
        .dims = p->dims,
    };
}

void cuda_plan_simulate(const h2o_simulate_params *params, cuda_plan *plan) {
    const h2o_dims *const d = &params->dims;
    *plan = (cuda_plan){.workspace = cuda_simulate_layout(params).bytes};
    plan->dense = dense_part(params);
    add_launch(plan, "h2o_cuda_simulate_prepare", params, sizeof *params, d->B, 1, 1, EVICT_THREADS,
               cuda_prepare_shared());
    add_attention(plan, &plan->dense);
    add_launch(plan, "h2o_cuda_simulate", params, sizeof *params, d->G, d->B, 1, STEP_THREADS,
               cuda_simulate_shared());
}
