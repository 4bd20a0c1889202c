/* module.c - the Python module h2o._core. */
#include <Python.h>

#include "h2o.h"

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "h2o._core",
    .m_doc = "The C core of h2o. Use h2o.ops, which documents the operations.",
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&module_def); }
