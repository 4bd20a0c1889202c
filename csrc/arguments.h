/* arguments.h - parses the arguments of a call from Python by the tables of tables.h. */
#ifndef H2O_ARGUMENTS_H
#define H2O_ARGUMENTS_H

#include "exchange.h"
#include "tables.h"

/* Both parsers return 0, or -1 and a Python exception that names the argument. */
int h2o_parse_int32(const char *name, PyObject *object, int32_t *number);

/* Sets *index to that of a string in a NULL-terminated list of choices. */
int h2o_parse_choice(const char *name, PyObject *object, const char *const *choices, int *index);

/* Fill in parameters, which must be all zeros, from the operands. h2o_parse_operands parses the
 * numbers and the policy, which may run Python, and checks that slots are a record of the right
 * length. h2o_note_operands notes the tensors for h2o_borrow. */
int h2o_parse_operands(const h2o_operation_row *row, PyObject *const *operands, void *params);
void h2o_note_operands(const h2o_operation_row *row, PyObject *const *operands, void *params,
                       h2o_borrowed *borrowed);

#endif
