/* tables.h - the tables that describe a call: the operands of each operation, and the fields of the
 * policy and of the slots. arguments.c parses a call by these tables, check.c checks it, call.c
 * executes it. All facts about an operand or a field are in its row and nowhere else. */
#ifndef H2O_TABLES_H
#define H2O_TABLES_H

#include "operations.h"

/* ---- Operands ---------------------------------------------------------- */

typedef enum {
    H2O_OPERAND_TENSOR, /* h2o_view */
    H2O_OPERAND_SLOTS,  /* h2o_slots; H2O_ATTENDED: those fields only; H2O_OPTIONAL: may be None */
    H2O_OPERAND_POLICY, /* h2o_policy */
    H2O_OPERAND_FLOAT,
} h2o_operand_kind;

/* Requirements on a tensor. */
enum {
    H2O_OPTIONAL = 1, /* may be absent */
    H2O_WRITTEN = 2,
    H2O_DENSE = 4,     /* the last stride must be 1: kernels read whole vectors */
    H2O_STORED = 8,    /* floats like the other tensors, or bytes: rows of a quantized store */
    H2O_PER_SLOT = 16, /* GS becomes T if slots.starts is given */
    H2O_PER_HEAD = 32, /* G may be missing if all heads have the same */
    H2O_ATTENDED = 64, /* field of slots: attend reads it ... */
    H2O_SCORED = 128,  /* ... and writes to it, which it does to no other field */
    H2O_PER_ROW = 256, /* Z may be missing if all rows have the same */
};

typedef struct {
    const char *name;
    h2o_operand_kind kind;
    size_t offset;       /* in the operation's parameters, or in h2o_slots */
    const char *letters; /* one for each dimension; a digit stands for itself, + for G + 1 */
    h2o_dtype dtype;     /* H2O_NONE: the floating dtype of the call */
    unsigned flags;
    size_t present; /* H2O_OPTIONAL slots: offset of the bool that says whether they are given */
} h2o_operand;

enum { H2O_SLOTS_COUNT = 13, H2O_MOST_TENSORS = 23 /* of a call, including its workspace */ };
extern const h2o_operand h2o_slots_fields[H2O_SLOTS_COUNT];

/* An operand's address in a call's parameters. */
H2O_INLINE void *h2o_operand_at(void *params, const h2o_operand *operand) {
    return (char *)params + operand->offset;
}

/* ---- Policy ------------------------------------------------------------ */

typedef enum {
    H2O_FIELD_INT32,
    H2O_FIELD_FLOAT,
    H2O_FIELD_BOOL,
    H2O_FIELD_CHOICE, /* the index of a name in choices */
} h2o_field_kind;

typedef struct {
    const char *name;
    h2o_field_kind kind;
    size_t offset; /* in h2o_policy */
    double least, most;
    const char *wanted;         /* the limits in words, for messages */
    const char *const *choices; /* NULL-ended */
} h2o_policy_field;

enum { H2O_POLICY_COUNT = 4 };
extern const h2o_policy_field h2o_policy_fields[H2O_POLICY_COUNT]; /* ordered as Policy's */

/* ---- Operations -------------------------------------------------------- */

/* An operation. Its operands are in the order of the call; the first determines the device.
 * check: checks shapes, dtypes, layouts and scalars, and fills in dims. count: reads each small
 * tensor of a checked call once, into memory of h2o_counts_bytes, checks the values and fills in
 * counts. */
typedef struct {
    const char *name;
    size_t size, dims, counts, mask; /* size of the parameters; offsets of three of their fields */
    const h2o_operand *operands;
    int operand_count;
    int (*check)(void *params, h2o_error *error);
    int (*count)(void *params, void *memory, h2o_error *error);
} h2o_operation_row;

extern const h2o_operation_row *const h2o_operations[H2O_OPERATIONS];

#define H2O_DECLARE(name, NAME) extern const h2o_operation_row h2o_operation_##name;
H2O_EACH_OPERATION(H2O_DECLARE)
#undef H2O_DECLARE

H2O_INLINE const h2o_view *h2o_leader(const h2o_operation_row *row, const void *params) {
    return (const h2o_view *)(const void *)((const char *)params + row->operands[0].offset);
}

size_t h2o_counts_bytes(const h2o_dims *dims, const h2o_view *mask);
int h2o_fail_kernels(const h2o_view *leader, h2o_error *error); /* its device has no kernels */

#endif
