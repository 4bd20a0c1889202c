/* arguments.h - parses the arguments of a call from Python by the tables of tables.h. */
#ifndef H2O_ARGUMENTS_H
#define H2O_ARGUMENTS_H

#include "exchange.h"
#include "tables.h"

/* Both parsers return 0, or -1 and a Python exception that names the argument. */
int h2o_parse_int32(const char *name, PyObject *object, int32_t *number);

/* Fills in parameters, which must be all zeros, from the operands. Numbers and the policy are parsed,
 * which may run Python; slots must be a record of the right length; tensors are noted for
 * h2o_borrow. */
int h2o_parse_operands(const h2o_operation_row *row, PyObject *const *operands, void *params,
                       h2o_borrowed *borrowed);

#endif
