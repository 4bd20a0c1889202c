/* step.c - the operation step: its operands in order, and the checks of a call. Each row must have
 * a free slot for its new key. */
#include "operands.h"
#include "policy.h"

#include <inttypes.h>

static const h2o_operand operands[] = {
    H2O_TENSOR(step, query, "BH1D", H2O_NONE, 0),
    H2O_TENSOR(step, key, "BG1D", H2O_NONE, 0),
    H2O_TENSOR(step, value, "BG1D", H2O_NONE, H2O_OPTIONAL),
    H2O_TENSOR(step, mask, "B1", H2O_U8, H2O_OPTIONAL),
    H2O_OPERAND(step, slots, SLOTS),
    H2O_TENSOR(step, out, "B1HD", H2O_NONE, H2O_WRITTEN),
    H2O_OPERAND(step, scale, FLOAT),
    H2O_OPERAND(step, softcap, FLOAT),
    H2O_OPERAND(step, policy, POLICY),
    H2O_TENSOR_AS(step, "rotary.table", rotary.table, "P2F", H2O_F32, H2O_OPTIONAL | H2O_DENSE),
    H2O_TENSOR_AS(step, "rotary.ranks", rotary.ranks, "ZGS", H2O_I32,
                  H2O_PER_SLOT | H2O_OPTIONAL | H2O_WRITTEN | H2O_DENSE),
    H2O_TENSOR(step, sink_logits, "H", H2O_F32, H2O_OPTIONAL),
};

/* Checks that table and ranks come together, and that a row has enough elements for the angles. */
static int check_rotary(const h2o_rotary *rotary, const h2o_dims *dims, h2o_error *error) {
    if (h2o_given(&rotary->table) != h2o_given(&rotary->ranks)) {
        return h2o_fail(error, H2O_EVALUE, "%s: is %s, but %s is %s", rotary->ranks.name,
                        h2o_given(&rotary->ranks) ? "given" : "None", rotary->table.name,
                        h2o_given(&rotary->table) ? "given" : "None");
    }
    if (2 * dims->F > dims->D) {
        return h2o_fail(error, H2O_EVALUE,
                        "%s: has %" PRId64 " angles, which rotate %" PRId64
                        " elements, but rows have %" PRId64,
                        rotary->table.name, dims->F, 2 * dims->F, dims->D);
    }
    return H2O_OK;
}

static int check_step(void *parameters, h2o_error *error) {
    h2o_step_params *const params = parameters;
    const h2o_rotary *const rotary = &params->rotary;
    int status;
    if ((status = h2o_check_logits(params->scale, params->softcap, error)) ||
        (status = h2o_check_operands(&h2o_operation_step, params, error)) ||
        (status = h2o_share_values(&params->value, &params->key, &params->slots, error)) ||
        (status = h2o_check_rows(&params->slots.keys, &params->slots.values, &params->slots.offsets,
                                 &params->slots.smoothing, params->dims.D, error)) ||
        (status = check_rotary(rotary, &params->dims, error))) {
        return status;
    }
    params->dims.Q = 1;
    return h2o_check_needed(&params->slots, &params->policy, error);
}

/* Reads the slot that a head's new key will fill, and counts the filled ones. If the slot is beyond
 * the others, they are all filled. */
static void count_filled(const h2o_slots *slots, int64_t g, h2o_head *head) {
    const int64_t most = head->held < head->slots ? head->held : head->slots - 1;
    head->next_slot = h2o_load_i32(&slots->next_slot, head->row, g, 0);
    if (head->next_slot > most) return;
    head->held = h2o_policy_filled(h2o_at(&slots->positions, head->row, head->offset, 0),
                                   head->next_slot, most);
}

static int check_free(const h2o_slots *slots, int64_t g, const h2o_head *head, h2o_error *error) {
    if (head->next_slot < 0 || head->next_slot > head->held) {
        return h2o_fail(error, H2O_EVALUE,
                        "%s[%" PRId64 ", %" PRId64 "]: is %" PRId64 ", wanted 0..%" PRId64
                        ", as the row holds %" PRId64 " tokens",
                        slots->next_slot.name, head->row, g, head->next_slot, head->held,
                        head->held);
    }
    return H2O_OK;
}

static int count_step(void *parameters, void *memory, h2o_error *error) {
    h2o_step_params *const params = parameters;
    h2o_dims *const dims = &params->dims;
    const h2o_slots *const slots = &params->slots;
    const h2o_counts_memory counted = h2o_count_tokens(memory, dims, &params->mask);
    int status = h2o_count_slots(slots, dims, &counted, error);
    for (int64_t b = 0; b < dims->B && status == H2O_OK; b++) {
        status = h2o_count_row(slots, &params->policy, dims, b, &counted, error);
        for (int64_t g = 0; g < dims->G && status == H2O_OK && counted.rows[b].tokens > 0; g++) {
            h2o_head *const head = &counted.heads[b * dims->G + g];
            count_filled(slots, g, head);
            if (head->held >= head->slots) {
                return h2o_fail(error, H2O_EVALUE,
                                "%s: all %" PRId64 " slots of row %" PRId64
                                " are taken; create larger slots",
                                slots->keys.name, head->slots, head->row);
            }
            if (h2o_given(&params->rotary.table) && head->held >= dims->P) {
                return h2o_fail(error, H2O_EVALUE,
                                "%s: has angles for %" PRId64 " ranks, but row %" PRId64
                                " holds %" PRId64 " tokens and gets one more",
                                params->rotary.table.name, dims->P, head->row, head->held);
            }
            status = check_free(slots, g, head, error);
        }
    }
    params->counts = (h2o_counts){.rows = counted.rows, .heads = counted.heads};
    return status;
}

H2O_DEFINE_OPERATION(step);
