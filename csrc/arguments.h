/* arguments.h - the arguments of a call from Python, by the tables of tables.h. */
#ifndef H2O_ARGUMENTS_H
#define H2O_ARGUMENTS_H

#include "exchange.h"
#include "tables.h"

/* Each returns 0, or -1 and a Python exception that names the argument. */
int h2o_parse_int32(const char *name, PyObject *object, int32_t *number);

/* Which of these names, NULL-ended, a string is. */
int h2o_parse_choice(const char *name, PyObject *object, const char *const *choices, int *index);

/* Operands into parameters that are all zeros: h2o_parse_operands reads the numbers and records,
 * which may run Python, and looks whether slots are such; h2o_note_operands notes the tensors. */
int h2o_parse_operands(const h2o_operation_row *row, PyObject *const *operands, void *params);
void h2o_note_operands(const h2o_operation_row *row, PyObject *const *operands, void *params,
                       h2o_borrowed *borrowed);

#endif
