/* exchange.h - lends the memory of Python objects as h2o_view for the duration of one call.
 *
 *     h2o_borrowed borrowed = {.count = 0};
 *     h2o_note(&borrowed, "query", object, &params.query);     one line for each tensor
 *     if (h2o_borrow(exchange, &borrowed) < 0) goto done;       a Python exception is set
 *     ...
 *     done: h2o_give_back(&borrowed);
 *
 * All functions need the GIL or, in an interpreter without one, an attached thread. The objects
 * must outlive what is borrowed from them, as the arguments of a Python call do.
 */
#ifndef H2O_EXCHANGE_H
#define H2O_EXCHANGE_H

#include <Python.h>

#include "dlpack_abi.h"
#include "tables.h"

/* The types whose exchange table has been looked up. They belong to the module's state. The
 * references keep the types alive, since otherwise another type could get the same address. */
enum { H2O_PRODUCERS = 4 };

typedef struct {
#ifdef Py_GIL_DISABLED
    PyMutex lock;
#endif
    struct {
        PyTypeObject *type;
        const dl_exchange_api *api;
    } producers[H2O_PRODUCERS];
    int next; /* the entry that the next new type replaces */
    struct {  /* objects passed to producers, created once; strings are interned */
        PyObject *table, *dlpack, *max_version, *stream;
        PyObject *unordered; /* -1, DLPack's value for "do not synchronize streams" */
        PyObject *version;   /* (major, minor) */
    } names;
} h2o_exchange;

/* The name of an object's type, for messages. The limited API does not expose tp_name. */
typedef struct {
    char text[100];
} h2o_name;
h2o_name h2o_type_name(PyObject *object) __attribute__((cold));

/* Loads NumPy's C API and creates the names. Returns 0, or -1 and a Python exception. */
int h2o_exchange_init(h2o_exchange *exchange);
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
} h2o_borrowed_view;

typedef struct {
    h2o_borrowed_view entries[H2O_MOST_TENSORS];
    int count;
    /* For __dlpack__: the kernels are queued on the stream on which the tensors' library queues its
     * own work. They are in order already, so no event has to be recorded. */
    bool queued;
} h2o_borrowed;

/* Notes that object is to fill *view, which must be all zeros. None leaves the view not given. The
 * name must outlive the view. */
static inline void h2o_note(h2o_borrowed *borrowed, const char *name, PyObject *object,
                            h2o_view *view) {
    view->name = name;
    if (object != Py_None) {
        borrowed->entries[borrowed->count++] = (h2o_borrowed_view){.object = object, .view = view};
    }
}

/* Fills all noted views. Returns 0, or -1 and a Python exception. */
int h2o_borrow(h2o_exchange *exchange, h2o_borrowed *borrowed);

/* Finds the stream on which the producer of the first view queues its work. Returns 0, or -1 and a
 * Python exception. */
int h2o_current_stream(const h2o_borrowed *borrowed, void **stream);

/* Gives back what was borrowed, if anything. A pending exception stays pending. */
void h2o_give_back(h2o_borrowed *borrowed);

#endif
