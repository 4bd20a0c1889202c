/* exchange.h - Python objects lend their memory as h2o_view for one call.
 *
 *     h2o_borrowed borrowed = {.count = 0};
 *     h2o_note(&borrowed, "query", object, &params.query);     one line per tensor
 *     if (h2o_borrow(exchange, &borrowed) < 0) goto done;       a Python exception is set
 *     ...
 *     done: h2o_give_back(&borrowed);
 *
 * All of it needs the GIL, or, in an interpreter that has none, an attached thread. The
 * objects must outlive what is borrowed of them, as the arguments of a Python call do.
 */
#ifndef H2O_EXCHANGE_H
#define H2O_EXCHANGE_H

#include <Python.h>

#include "dlpack_abi.h"
#include "tables.h"

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
    struct {  /* what producers are asked for and given, made once; strings are interned */
        PyObject *table, *dlpack, *max_version, *stream;
        PyObject *unordered; /* -1, DLPack's word for a stream that nothing has to wait for */
        PyObject *version;   /* (major, minor) */
    } names;
} h2o_exchange;

/* The name of an object's type, for messages: the limited API does not show tp_name. */
typedef struct {
    char text[100];
} h2o_name;
h2o_name h2o_type_name(PyObject *object) __attribute__((cold));

/* Loads NumPy's C API and makes the names; 0, or -1 and a Python exception. */
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
    /* For __dlpack__: what reads the tensors is queued on the stream that their library queues its
     * own work on, so that they are in order already, and no event has to be recorded. */
    bool queued;
} h2o_borrowed;

/* Notes that object is to fill *view, which is all zeros. None leaves a view that is not given.
 * The name must outlive the view. */
static inline void h2o_note(h2o_borrowed *borrowed, const char *name, PyObject *object,
                            h2o_view *view) {
    view->name = name;
    if (object != Py_None) {
        borrowed->entries[borrowed->count++] = (h2o_borrowed_view){.object = object, .view = view};
    }
}

/* Fills all noted views; 0, or -1 and a Python exception. */
int h2o_borrow(h2o_exchange *exchange, h2o_borrowed *borrowed);

/* The stream that the producer of the first view queues its work on; 0, or -1 and a
 * Python exception. */
int h2o_current_stream(const h2o_borrowed *borrowed, void **stream);

/* Gives back what was borrowed, if anything; keeps a pending exception. */
void h2o_give_back(h2o_borrowed *borrowed);

#endif
