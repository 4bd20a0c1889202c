/* evict.c - the operation evict: its operands in order, and the checks of a call. The slots must
 * have space for the keys that are kept, and hold what seen_tokens and budget imply. */
#include "operands.h"
#include "policy.h"

#include <inttypes.h>

static const h2o_operand operands[] = {
    H2O_TENSOR(evict, keys, "BGQD", H2O_NONE, 0),
    H2O_TENSOR(evict, values, "BGQD", H2O_NONE, H2O_OPTIONAL),
    H2O_TENSOR(evict, scores, "BGQ", H2O_F32, 0),
    H2O_TENSOR(evict, mask, "BQ", H2O_U8, H2O_OPTIONAL),
    H2O_OPERAND(evict, slots, SLOTS),
    H2O_OPERAND(evict, policy, POLICY),
};

static int check_evict(void *parameters, h2o_error *error) {
    h2o_evict_params *const params = parameters;
    int status;
    if ((status = h2o_check_operands(&h2o_operation_evict, params, error)) ||
        (status = h2o_share_values(&params->values, &params->keys, &params->slots, error)) ||
        (status = h2o_check_rows(&params->slots.keys, &params->slots.values, &params->slots.offsets,
                                 &params->slots.smoothing, params->dims.D, error))) {
        return status;
    }
    return h2o_check_needed(&params->slots, &params->policy, error);
}

/* Counts the filled slots. There may be fewer than seen_tokens and budget imply, since budgets may
 * have grown, but no more, and no gap among them but one. Otherwise evict could find more keys than
 * it has memory for. */
static int count_filled(const h2o_slots *slots, int64_t g, h2o_head *head, h2o_error *error) {
    const int32_t *const positions =
        h2o_at(&slots->positions, head->row, head->offset, 0); /* [slots] */
    const int64_t most = head->held;
    int64_t filled = 0, last = -1;
    for (int64_t s = 0; s < head->slots; s++) {
        filled += positions[s] >= 0;
        last = positions[s] >= 0 ? s : last;
    }
    if (filled <= most && last <= filled) {
        head->held = filled;
        return H2O_OK;
    }
    return h2o_fail(error, H2O_EVALUE,
                    "%s[%" PRId64 ", %" PRId64 "]: %" PRId64
                    " of the slots are filled, the last of them is slot %" PRId64
                    ", but seen_tokens and budget allow %" PRId64 " in the first slots",
                    slots->positions.name, head->row, g, filled, last, most);
}

static int count_evict(void *parameters, void *memory, h2o_error *error) {
    h2o_evict_params *const params = parameters;
    h2o_dims *const dims = &params->dims;
    const h2o_slots *const slots = &params->slots;
    const h2o_counts_memory counted = h2o_count_tokens(memory, dims, &params->mask);
    int status = h2o_count_slots(slots, dims, &counted, error);
    for (int64_t b = 0; b < dims->B && status == H2O_OK; b++) {
        status = h2o_count_row(slots, &params->policy, dims, b, &counted, error);
        for (int64_t g = 0; g < dims->G && status == H2O_OK; g++) {
            h2o_head *const head = &counted.heads[b * dims->G + g];
            status = count_filled(slots, g, head, error);
            if (status != H2O_OK) break;
            const int64_t keeps =
                h2o_policy_held(head->budget, head->held + counted.rows[b].tokens);
            if (keeps > head->slots) {
                return h2o_fail(error, H2O_EVALUE,
                                "%s: has %" PRId64 " slots, but row %" PRId64 " must keep %" PRId64
                                " tokens; create larger slots",
                                slots->keys.name, head->slots, head->row, keeps);
            }
        }
    }
    params->counts = (h2o_counts){.rows = counted.rows, .heads = counted.heads};
    return status;
}

H2O_DEFINE_OPERATION(evict);
