/* exchange.h - Python objects lend their memory as h2o_view for one call.
 *
 *     h2o_loans loans = {.count = 0};
 *     h2o_loan(&loans, "query", object, &params.query);      one line per tensor
 *     if (h2o_borrow(exchange, &loans) < 0) goto done;       a Python exception is set
 *     ...
 *     done: h2o_give_back(&loans);
 *
 * All of it needs the GIL, or, in an interpreter that has none, an attached thread. The
 * objects must outlive the loans, as the arguments of a Python call do.
 */
#ifndef H2O_EXCHANGE_H
#define H2O_EXCHANGE_H

#include <Python.h>

#include "dlpack_abi.h"
#include "h2o.h"

/* Types whose exchange table has been looked up. Part of the module's state,
 * and the types are kept alive: an address alone could come to mean another
 * type. */
enum { H2O_PRODUCERS = 4 };

typedef struct {
#ifdef Py_GIL_DISABLED
    PyMutex lock;
#endif
    struct {
        PyTypeObject *type;
        const dl_exchange_api *api;
    } producers[H2O_PRODUCERS];
    int next; /* which to forget when a new one comes */
} h2o_exchange;

/* The name of an object's type, for messages: the limited API does not show tp_name. */
typedef struct {
    char text[100];
} h2o_name;
h2o_name h2o_type_name(PyObject *object) __attribute__((cold));

/* Loads NumPy's C API; 0, or -1 and a Python exception. */
int h2o_exchange_init(void);
int h2o_exchange_traverse(h2o_exchange *exchange, visitproc visit, void *arg);
void h2o_exchange_clear(h2o_exchange *exchange);

typedef enum { H2O_VIA_DUNDER, H2O_VIA_TABLE, H2O_VIA_NUMPY } h2o_route;

typedef struct {
    PyObject *object;
    h2o_view *view;
    h2o_route route;
    const dl_exchange_api *api; /* H2O_VIA_TABLE */
    void *managed;              /* H2O_VIA_DUNDER: dl_managed or dl_managed_versioned, or NULL */
    bool versioned;
} h2o_loan_entry;

enum { H2O_MAX_LOANS = 20 };

typedef struct {
    h2o_loan_entry entries[H2O_MAX_LOANS];
    int count;
    PyObject *stream; /* what __dlpack__ is told of it, an int; NULL or None: nothing */
} h2o_loans;

/* Notes that object is to fill *view. None leaves a view that is not given. The
 * name must outlive the view. */
static inline void h2o_loan(h2o_loans *loans, const char *name, PyObject *object, h2o_view *view) {
    *view = (h2o_view){.name = name};
    if (object != Py_None) {
        loans->entries[loans->count++] = (h2o_loan_entry){.object = object, .view = view};
    }
}

/* Fills all noted views; 0, or -1 and a Python exception. */
int h2o_borrow(h2o_exchange *exchange, h2o_loans *loans);

/* The stream that the producer of the first loan, borrowed, queues its work on; 0, or -1 and a
 * Python exception. */
int h2o_current_stream(const h2o_loans *loans, void **stream);

/* Gives back what was borrowed, if anything; keeps a pending exception. */
void h2o_give_back(h2o_loans *loans);

#endif
