/* step.cuh - one decode step in one launch: attention of one new token [B,H,1,D] over the slots of
 * its head, scores [B,G,S], and the eviction of one key if the budget is exceeded.
 *
 * The slots of a head are split among several blocks, as in Flash-Decoding (Dao et al., 2023):
 *
 *   1. Every block computes the logits of a part, their row max, the row sum of the exponentials
 *      relative to it, and the products of these with the values (step_part.cuh, step_matrix.cuh).
 *      If there are many heads, it does so for several parts in sequence.
 *   2. The last block of a head to finish computes the factors exp(part's max - max) / row sum and
 *      the outputs, always in the order of the parts, so that results do not depend on which block
 *      that is.
 *   3. scores = decay * scores + softmax weights of the R heads, or the largest of these. The key
 *      with the lowest rank is evicted, and its score is added to evicted_score [B,G].
 *   4. The last head of a row to finish advances seen_tokens [B], which all heads read at first.
 *
 * Finished blocks are counted in the workspace: see step_layout. */
#ifndef H2O_CUDA_STEP_CUH
#define H2O_CUDA_STEP_CUH

#include "step_finish.cuh"
#include "step_matrix.cuh"

/* ---- The kernel ---------------------------------------------------------- */

/* Follows the shared memory of a step's parts: memory for reductions, and what a block keeps to the
 * end. */
typedef struct {
    char reduction[512];
    step_item item;
} step_kept;

static_assert(sizeof(step_kept) <= STEP_KEPT, "a step's item fits");

/* Sets the outputs of padding to 0. */
DEVICE void clear_outputs(const h2o_step_params *p, int64_t b, int64_t g) {
    const int64_t R = p->dims.R, D = p->dims.D;
    NO_UNROLL
    for (int64_t i = threadIdx.x; i < R * D; i += STEP_THREADS)
        set_element(tensor_row(&p->out, b, 0, g * R + i / D), i % D, 0.0f);
}

/* The item that one thread has opened. Other threads need not open it again, and fields that only
 * the end uses occupy no registers before. */
DEVICE step_item item_of(const h2o_step_params *p, const step_kept *kept) {
    step_item item = kept->item;
    item.policy = &p->policy;
    item.sink_logits = &p->sink_logits;
    return item;
}

/* attend(item, part, last) must do step 1 for parts part..last-1. Grid: cuda_step_blocks, G, B. */
template <typename ATTEND>
DEVICE void step_block(const h2o_step_params *p, char *workspace, unsigned char *shared,
                       step_kept *kept, ATTEND attend) {
    const int64_t g = blockIdx.y, b = blockIdx.z;
    if (!is_token(&p->mask, b, 0)) { /* the same for all blocks of a row */
        if (blockIdx.x == 0) clear_outputs(p, b, g);
        return;
    }
    if (threadIdx.x == 0) kept->item = open_step(p, workspace, b, g);
    sync_block();
    const auto open = [=] { return item_of(p, kept); };
    const step_item item = open();
    const uint32_t x = blockIdx.x, parts = (uint32_t)item.parts;
    attend(&item, (int)(x * parts / gridDim.x), (int)((x + 1) * parts / gridDim.x));
    TAKEN(step_of_several_blocks, gridDim.x > 1);
    uint32_t *const counters = (uint32_t *)workspace + b * (p->dims.G + 1);
    if (!arrive_last(&counters[g], gridDim.x)) return;
    step_finish(open, (float *)shared, kept->reduction);
    if (!arrive_last(&counters[p->dims.G], (uint32_t)p->dims.G) || threadIdx.x != 0) return;
    write_length(&p->slots.seen_tokens, kept->item.head.row, kept->item.length + 1);
}

DEVICE step_kept *kept_in(unsigned char *shared, int depth, bool bytes) {
    return (step_kept *)(shared + cuda_step_shared(depth, bytes) - STEP_KEPT);
}

/* For any rows. */
DEVICE void step_any(const h2o_step_params *p, char *workspace, unsigned char *shared, int depth,
                     bool bytes) {
    step_block(
        p, workspace, shared, kept_in(shared, depth, bytes),
        [&](const step_item *item, int part, int) { step_part(item, part, (float *)shared); });
}

BOUNDED_KERNEL(h2o_cuda_step, h2o_step_params, STEP_THREADS, 3) {
    step_any(&params, workspace, dynamic_shared, 0, true);
}

/* For rows that tensor cores can multiply; before 8.0 they cannot multiply bfloat16. */
template <int DEPTH, h2o_dtype TYPE, bool BYTES>
DEVICE void step_matrices(const h2o_step_params *p, char *workspace, unsigned char *shared) {
    if constexpr (CAPABILITY < 80 && TYPE == H2O_BF16) {
        step_any(p, workspace, shared, DEPTH, BYTES);
    } else {
        step_block(p, workspace, shared, kept_in(shared, DEPTH, BYTES),
                   [&](const step_item *item, int part, int last) {
                       matrix_parts<DEPTH, TYPE, BYTES>(item, part, last, shared);
                   });
    }
}

#define DEFINE_STEP(name, TYPE, depth, bytes, blocks)                                              \
    BOUNDED_KERNEL(h2o_cuda_step_##name##_##depth, h2o_step_params, STEP_THREADS, blocks) {        \
        step_matrices<depth, TYPE, bytes>(&params, workspace, dynamic_shared);                     \
    }

DEFINE_STEP(f16, H2O_F16, 64, false, 3)
DEFINE_STEP(f16, H2O_F16, 128, false, 3)
DEFINE_STEP(f16, H2O_F16, 256, false, 2)
DEFINE_STEP(bf16, H2O_BF16, 64, false, 3)
DEFINE_STEP(bf16, H2O_BF16, 128, false, 3)
DEFINE_STEP(bf16, H2O_BF16, 256, false, 2)

/* Rows of bytes need fewer registers, so one more block fits on a multiprocessor and can load while
 * others convert, if shared memory has room for four blocks, as on all devices from 8.0 on. */
enum { STEP_BYTES_BLOCKS = CAPABILITY < 80 ? 3 : 4 };
DEFINE_STEP(bytes_f16, H2O_F16, 64, true, STEP_BYTES_BLOCKS)
DEFINE_STEP(bytes_f16, H2O_F16, 128, true, STEP_BYTES_BLOCKS)
DEFINE_STEP(bytes_f16, H2O_F16, 256, true, 2)
DEFINE_STEP(bytes_bf16, H2O_BF16, 64, true, STEP_BYTES_BLOCKS)
DEFINE_STEP(bytes_bf16, H2O_BF16, 128, true, STEP_BYTES_BLOCKS)
DEFINE_STEP(bytes_bf16, H2O_BF16, 256, true, 2)

#endif
