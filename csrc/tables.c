/* tables.c - the tables of tables.h: the fields of the policy and of the slots, and the list of the
 * operations' rows, each of which is defined in the operation's own file. */
#include "tables.h"

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

/* Indexed by h2o_score_by. */
static const char *const rankings[] = {"sum", "mean", "max", NULL};

const h2o_policy_field h2o_policy_fields[H2O_POLICY_COUNT] = {
    {.name = "sinks",
     .kind = H2O_FIELD_INT32,
     .offset = offsetof(h2o_policy, sinks),
     .most = INT32_MAX,
     .wanted = "at least 0"},
    {.name = "score_by",
     .kind = H2O_FIELD_CHOICE,
     .offset = offsetof(h2o_policy, score_by),
     .choices = rankings},
    {.name = "decay",
     .kind = H2O_FIELD_FLOAT,
     .offset = offsetof(h2o_policy, decay),
     .most = 1,
     .wanted = "a number in [0, 1]"},
    {.name = "value_weighted",
     .kind = H2O_FIELD_BOOL,
     .offset = offsetof(h2o_policy, value_weighted)},
};

/* ---- Operations -------------------------------------------------------- */

#define ROW(op, OP) [H2O_##OP] = &h2o_operation_##op,
const h2o_operation_row *const h2o_operations[H2O_OPERATIONS] = {H2O_EACH_OPERATION(ROW)};
