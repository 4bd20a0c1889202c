/* error.c - h2o_fail: writes the status and the message of an error into its record. */
#include "h2o.h"

#include <stdarg.h>
#include <stdio.h>

int h2o_fail(h2o_error *error, h2o_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    error->status = status;
    return (int)status;
}
