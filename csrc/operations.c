/* operations.c - the tables of operations.h: for each operation its operands in order, with shape
 * letters, dtype and flags, and likewise the fields of the policy and of the slots. */
#include "operations.h"

#define TENSOR(op, field, letters_, dtype_, flags_)                                                \
    TENSOR_AS(op, #field, field, letters_, dtype_, flags_)
#define TENSOR_AS(op, name_, field, letters_, dtype_, flags_)                                      \
    {.name = name_,                                                                                \
     .kind = H2O_OPERAND_TENSOR,                                                                   \
     .offset = offsetof(h2o_##op##_params, field),                                                 \
     .letters = letters_,                                                                          \
     .dtype = dtype_,                                                                              \
     .flags = flags_}
#define SLOTS(op)                                                                                  \
    {.name = "slots", .kind = H2O_OPERAND_SLOTS, .offset = offsetof(h2o_##op##_params, slots)}
#define POLICY(op)                                                                                 \
    {.name = "policy", .kind = H2O_OPERAND_POLICY, .offset = offsetof(h2o_##op##_params, policy)}
#define NUMBER(op, field)                                                                          \
    {.name = #field, .kind = H2O_OPERAND_FLOAT, .offset = offsetof(h2o_##op##_params, field)}

/* ---- Records ----------------------------------------------------------- */

#define FIELD(field, letters_, dtype_, flags_)                                                     \
    {.name = "slots." #field,                                                                      \
     .kind = H2O_OPERAND_TENSOR,                                                                   \
     .offset = offsetof(h2o_slots, field),                                                         \
     .letters = letters_,                                                                          \
     .dtype = dtype_,                                                                              \
     .flags = flags_},
const h2o_operand h2o_slots_fields[H2O_SLOTS_COUNT] = {H2O_SLOTS_FIELDS(FIELD)};

_Static_assert(sizeof(h2o_slots) == H2O_SLOTS_COUNT * sizeof(h2o_view), "a row for each field");

/* By h2o_rank_by. */
static const char *const rankings[] = {"sum", "mean", "max", NULL};

const h2o_policy_field h2o_policy_fields[H2O_POLICY_COUNT] = {
    {.name = "sinks",
     .kind = H2O_FIELD_INT32,
     .offset = offsetof(h2o_policy, sinks),
     .most = INT32_MAX,
     .wanted = "at least 0"},
    {.name = "rank_by",
     .kind = H2O_FIELD_CHOICE,
     .offset = offsetof(h2o_policy, rank_by),
     .choices = rankings},
    {.name = "decay",
     .kind = H2O_FIELD_FLOAT,
     .offset = offsetof(h2o_policy, decay),
     .most = 1,
     .wanted = "a number in [0, 1]"},
    {.name = "value_weighted",
     .kind = H2O_FIELD_BOOL,
     .offset = offsetof(h2o_policy, value_weighted)},
    {.name = "merge",
     .kind = H2O_FIELD_OPTION,
     .offset = offsetof(h2o_policy, merge),
     .most = 1,
     .below = true,
     .wanted = "a cosine between 0 and 1, or None"},
};

/* ---- Operands ---------------------------------------------------------- */

static const h2o_operand attend_operands[] = {
    TENSOR(attend, query, "BHQD", H2O_NONE, 0),
    TENSOR(attend, keys, "BGQD", H2O_NONE, 0),
    TENSOR(attend, values, "BGQD", H2O_NONE, H2O_OPTIONAL),
    TENSOR(attend, mask, "BQ", H2O_U8, H2O_OPTIONAL),
    {.name = "slots",
     .kind = H2O_OPERAND_SLOTS,
     .offset = offsetof(h2o_attend_params, slots),
     .flags = H2O_ATTENDED | H2O_OPTIONAL,
     .present = offsetof(h2o_attend_params, has_slots)},
    TENSOR(attend, out, "BQHD", H2O_NONE, H2O_WRITTEN),
    TENSOR(attend, scores, "BGQ", H2O_F32, H2O_WRITTEN),
    NUMBER(attend, scale),
    NUMBER(attend, softcap),
    POLICY(attend),
    TENSOR(attend, sink_logits, "H", H2O_F32, H2O_OPTIONAL),
};

static const h2o_operand evict_operands[] = {
    TENSOR(evict, keys, "BGQD", H2O_NONE, 0),
    TENSOR(evict, values, "BGQD", H2O_NONE, H2O_OPTIONAL),
    TENSOR(evict, scores, "BGQ", H2O_F32, 0),
    TENSOR(evict, mask, "BQ", H2O_U8, H2O_OPTIONAL),
    SLOTS(evict),
    POLICY(evict),
};

static const h2o_operand step_operands[] = {
    TENSOR(step, query, "BH1D", H2O_NONE, 0),
    TENSOR(step, key, "BG1D", H2O_NONE, 0),
    TENSOR(step, value, "BG1D", H2O_NONE, H2O_OPTIONAL),
    TENSOR(step, mask, "B1", H2O_U8, H2O_OPTIONAL),
    SLOTS(step),
    TENSOR(step, out, "B1HD", H2O_NONE, H2O_WRITTEN),
    NUMBER(step, scale),
    NUMBER(step, softcap),
    POLICY(step),
    TENSOR_AS(step, "rotary.table", rotary.table, "P2F", H2O_F32, H2O_OPTIONAL | H2O_DENSE),
    TENSOR_AS(step, "rotary.ranks", rotary.ranks, "BGS", H2O_I32,
              H2O_PER_SLOT | H2O_OPTIONAL | H2O_WRITTEN | H2O_DENSE),
    TENSOR(step, sink_logits, "H", H2O_F32, H2O_OPTIONAL),
};

static const h2o_operand simulate_operands[] = {
    TENSOR(simulate, query, "BHQD", H2O_NONE, 0),
    TENSOR(simulate, keys, "BGQD", H2O_NONE, 0),
    TENSOR(simulate, values, "BGQD", H2O_NONE, H2O_OPTIONAL),
    TENSOR(simulate, mask, "BQ", H2O_U8, H2O_OPTIONAL),
    TENSOR(simulate, prompt, "B", H2O_I32, 0),
    TENSOR(simulate, budget, "BG2", H2O_I32, H2O_PER_HEAD),
    TENSOR(simulate, out, "BQHD", H2O_NONE, H2O_WRITTEN),
    TENSOR(simulate, evicted_at, "BGQ", H2O_I32, H2O_WRITTEN),
    TENSOR(simulate, scores, "BGQ", H2O_F32, H2O_WRITTEN),
    NUMBER(simulate, scale),
    NUMBER(simulate, softcap),
    POLICY(simulate),
    TENSOR(simulate, stored_keys, "BGQD", H2O_U8, H2O_OPTIONAL | H2O_DENSE | H2O_STORED),
    TENSOR(simulate, stored_values, "BGQD", H2O_U8, H2O_OPTIONAL | H2O_DENSE | H2O_STORED),
    TENSOR(simulate, sink_logits, "H", H2O_F32, H2O_OPTIONAL),
};

/* ---- Operations -------------------------------------------------------- */

#define ROW(op, OP)                                                                                \
    [H2O_##OP] = {                                                                                 \
        .name = #op,                                                                               \
        .size = sizeof(h2o_##op##_params),                                                         \
        .dims = offsetof(h2o_##op##_params, dims),                                                 \
        .counts = offsetof(h2o_##op##_params, counts),                                             \
        .mask = offsetof(h2o_##op##_params, mask),                                                 \
        .operands = op##_operands,                                                                 \
        .operand_count = sizeof op##_operands / sizeof *op##_operands,                             \
        .check = h2o_check_##op,                                                                   \
        .count = h2o_count_##op,                                                                   \
    },
const h2o_operation_row h2o_operations[H2O_OPERATIONS] = {H2O_EACH_OPERATION(ROW)};
