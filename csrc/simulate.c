/* simulate.c - the operation simulate: its operands in order, the checks of a call, and the number
 * of tokens of each row before the first eviction. */
#include "operands.h"
#include "policy.h"

#include <inttypes.h>

static const h2o_operand operands[] = {
    H2O_TENSOR(simulate, query, "BHQD", H2O_NONE, 0),
    H2O_TENSOR(simulate, keys, "BGQD", H2O_NONE, 0),
    H2O_TENSOR(simulate, values, "BGQD", H2O_NONE, H2O_OPTIONAL),
    H2O_TENSOR(simulate, mask, "BQ", H2O_U8, H2O_OPTIONAL),
    H2O_TENSOR(simulate, prompt, "B", H2O_I32, 0),
    H2O_TENSOR(simulate, budget, "BG2", H2O_I32, H2O_PER_HEAD),
    H2O_TENSOR(simulate, out, "BQHD", H2O_NONE, H2O_WRITTEN),
    H2O_TENSOR(simulate, evicted_at, "BGQ", H2O_I32, H2O_WRITTEN),
    H2O_TENSOR(simulate, scores, "BGQ", H2O_F32, H2O_WRITTEN),
    H2O_OPERAND(simulate, scale, FLOAT),
    H2O_OPERAND(simulate, softcap, FLOAT),
    H2O_OPERAND(simulate, policy, POLICY),
    H2O_TENSOR(simulate, stored_keys, "BGQD", H2O_U8, H2O_OPTIONAL | H2O_DENSE | H2O_STORED),
    H2O_TENSOR(simulate, stored_values, "BGQD", H2O_U8, H2O_OPTIONAL | H2O_DENSE | H2O_STORED),
    H2O_TENSOR(simulate, offsets, "BGD", H2O_F16, H2O_OPTIONAL | H2O_DENSE),
    H2O_TENSOR(simulate, smoothing, "BGD", H2O_F16, H2O_OPTIONAL | H2O_DENSE),
    H2O_TENSOR(simulate, sink_logits, "H", H2O_F32, H2O_OPTIONAL),
};

/* If a text has no values, its keys serve as values (h2o_share_values). */
static int share_text_values(h2o_simulate_params *p, h2o_error *error) {
    if (h2o_given(&p->values)) return H2O_OK;
    if (h2o_given(&p->stored_values)) {
        return h2o_fail(error, H2O_EVALUE, "%s: is None, but %s is given", p->values.name,
                        p->stored_values.name);
    }
    p->stored_values = p->stored_keys;
    return h2o_share_values(&p->values, &p->keys, NULL, error);
}

static int check_simulate(void *parameters, h2o_error *error) {
    h2o_simulate_params *const params = parameters;
    int status;
    if ((status = h2o_check_logits(params->scale, params->softcap, error)) ||
        (status = h2o_check_operands(&h2o_operation_simulate, params, error)) ||
        (status = share_text_values(params, error))) {
        return status;
    }
    return h2o_check_rows(&params->stored_keys, &params->stored_values, &params->offsets,
                          &params->smoothing, params->dims.D, error);
}

/* Nothing is evicted until the budget of some head is full, however short the prompt is. But with a
 * quantized store (stored), tokens after the prompt must see the stored keys and values. */
static int64_t dense_tokens(const h2o_row *row, const h2o_head *heads, int64_t G, int64_t prompt,
                            bool stored) {
    int64_t budget = stored ? 0 : heads[0].budget;
    for (int64_t g = 1; g < G; g++) {
        budget = heads[g].budget < budget ? heads[g].budget : budget;
    }
    return h2o_policy_held(budget > prompt ? budget : prompt, row->tokens);
}

static int count_simulate(void *parameters, void *memory, h2o_error *error) {
    h2o_simulate_params *const params = parameters;
    const h2o_dims *const dims = &params->dims;
    const h2o_counts_memory counted = h2o_count_tokens(memory, dims, &params->mask);
    for (int64_t b = 0; b < dims->B; b++) {
        h2o_head *const heads = counted.heads + b * dims->G;
        const int32_t prompt = h2o_load_i32(&params->prompt, b, 0, 0);
        if (prompt < 1) {
            return h2o_fail(error, H2O_EVALUE, "%s[%" PRId64 "]: is %d, wanted at least 1",
                            params->prompt.name, b, (int)prompt);
        }
        for (int64_t g = 0; g < dims->G; g++) {
            heads[g] = (h2o_head){0};
            const int status =
                h2o_count_budget(&params->budget, b, g, &params->policy, &heads[g], error);
            if (status != H2O_OK) return status;
        }
        counted.rows[dims->B + b] = counted.rows[b];
        counted.rows[dims->B + b].tokens =
            dense_tokens(&counted.rows[b], heads, dims->G, prompt, h2o_given(&params->stored_keys));
    }
    params->counts = (h2o_counts){counted.rows, counted.heads, counted.rows + dims->B};
    return H2O_OK;
}

H2O_DEFINE_OPERATION(simulate);
