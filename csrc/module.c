/* module.c - the Python module h2o._core: calls in, exceptions out.
 *
 * A call parses its numbers first, since that may run Python. It then borrows the tensors, checks
 * them, acquires a workspace, and runs the kernel without the GIL. h2o/backends is the only
 * caller; h2o/ops.py documents the operations.
 */
#include <Python.h>

#include <string.h>

#include "arguments.h"
#include "devices.h"
#include "exchange.h"
#include "run.h"

static int raise_error(const h2o_error *error) {
    PyObject *const type = error->status == H2O_EVALUE    ? PyExc_ValueError
                           : error->status == H2O_ETYPE   ? PyExc_TypeError
                           : error->status == H2O_EMEMORY ? PyExc_MemoryError
                                                          : PyExc_RuntimeError;
    PyErr_SetString(type, error->text);
    return -1;
}

/* What to do with a call; see call_doc. */
typedef enum { RUN, CHECK, MEASURE, LAUNCH, MODES } call_mode;

static const struct {
    const char *name;
    int more; /* arguments that follow the operands */
} modes[MODES] = {[RUN] = {"run", 0},
                  [CHECK] = {"check", 0},
                  [MEASURE] = {"measure", 1},
                  [LAUNCH] = {"launch", 2}};

typedef struct {
    h2o_exchange exchange;
    PyObject *operations[H2O_OPERATIONS], *modes[MODES]; /* their names, interned */
} module_state;

/* ---- Calls ------------------------------------------------------------- */

typedef struct {
    const h2o_operation_row *row;
    h2o_operation operation;
    call_mode mode;
    PyObject *stream, *workspace; /* LAUNCH: both; MEASURE: the stream */
    h2o_view room;                /* the workspace, borrowed */
    size_t bytes;                 /* MEASURE: bytes of workspace needed */
} request;

/* The index of a name, or -1 and a Python exception. Names in callers' sources are interned, so
 * that comparing pointers usually finds them. */
static int find_name(const char *argument, PyObject *const *names, int count, PyObject *name) {
    for (int i = 0; i < count; i++) {
        if (names[i] == name) return i;
    }
    for (int i = 0; PyUnicode_Check(name) && i < count; i++) {
        if (PyUnicode_Compare(names[i], name) == 0) return i;
    }
    PyErr_Format(PyUnicode_Check(name) ? PyExc_ValueError : PyExc_TypeError,
                 "%s: there is no %.100R", argument, name);
    return -1;
}

/* Parses the operation and the mode, and checks the number of arguments. */
static int read_request(const module_state *state, PyObject *const *args, Py_ssize_t count,
                        request *r) {
    if (count < 2) {
        PyErr_SetString(PyExc_TypeError, "call: takes an operation, a mode and operands");
        return -1;
    }
    const int operation = find_name("operation", state->operations, H2O_OPERATIONS, args[0]);
    const int mode = operation < 0 ? -1 : find_name("mode", state->modes, MODES, args[1]);
    if (mode < 0) return -1;
    r->operation = (h2o_operation)operation;
    r->mode = (call_mode)mode;
    r->row = h2o_operations[operation];
    const Py_ssize_t wanted = r->row->operand_count + modes[mode].more;
    if (count - 2 != wanted) {
        PyErr_Format(PyExc_TypeError, "%s: takes %zd arguments, got %zd", r->row->name, wanted,
                     count - 2);
        return -1;
    }
    if (modes[mode].more > 0) r->stream = args[2 + r->row->operand_count];
    if (modes[mode].more > 1) r->workspace = args[count - 1];
    return 0;
}

static int check_workspace(const h2o_view *room, const h2o_view *leader) {
    if (room->device_type != leader->device_type || room->device_id != leader->device_id) {
        PyErr_Format(PyExc_ValueError, "workspace: is on a different device from %s", leader->name);
        return -1;
    }
    const bool bytes = room->dtype == H2O_U8 && room->ndim == 1 && room->stride[0] == 1;
    if (!bytes || (uintptr_t)room->data % 256 != 0) {
        PyErr_SetString(PyExc_ValueError, "workspace: wanted contiguous bytes, aligned to 256");
        return -1;
    }
    return 0;
}

/* Passes on the workspace and stream that the caller provides for a device's kernels. */
static int equip(const request *r, const h2o_borrowed *borrowed, h2o_call *call) {
    call->queued = r->mode == MEASURE || r->mode == LAUNCH;
    if (r->mode != LAUNCH) return 0;
    if (h2o_given(&r->room)) {
        if (check_workspace(&r->room, borrowed->entries[0].view) < 0) return -1;
        call->exec.workspace = r->room.data;
        call->offered = (size_t)r->room.shape[0];
    }
    if (r->stream == Py_None) return h2o_current_stream(borrowed, &call->exec.stream);
    call->exec.stream = PyLong_AsVoidPtr(r->stream);
    return PyErr_Occurred() != NULL ? -1 : 0;
}

/* Everything that can fail comes before the kernel, which runs without the GIL. Returns a status,
 * or -1 with a Python exception. */
static int execute(request *r, void *params, const h2o_borrowed *borrowed, h2o_error *error) {
    h2o_call call = {.operation = r->operation};
    int status = equip(r, borrowed, &call);
    if (status != H2O_OK) return status;
    if (r->mode == MEASURE) {
        status = h2o_measure(params, &call, &r->bytes, error);
    } else if (r->mode == CHECK) {
        status = h2o_validate(params, &call, error);
    } else if ((status = h2o_open(params, &call, error)) == H2O_OK) {
        Py_BEGIN_ALLOW_THREADS status = h2o_run(params, &call, error);
        Py_END_ALLOW_THREADS
    }
    h2o_close(&call);
    return status;
}

PyDoc_STRVAR(call_doc,
             "call($module, operation, mode, /, *operands)\n--\n\n"
             "Perform an operation of h2o.ops. The mode says what to do with it:\n"
             "\"run\": run it on the CPU.\n"
             "\"check\": raise the errors that running it would raise, and do nothing else.\n"
             "\"measure\": check it for the kernels of the tensors' device. Return the bytes of\n"
             "workspace that they need, or None if no kernel supports it. The stream follows the\n"
             "operands.\n"
             "\"launch\": queue it on a stream of that device. The stream (a handle, or None for\n"
             "the current stream of the tensors' library) and the workspace follow the operands.");

static PyObject *call(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    module_state *const state = PyModule_GetState(module);
    request r = {0};
    h2o_params params;
    h2o_borrowed borrowed;
    h2o_error error;
    if (read_request(state, args, count, &r) < 0) return NULL;
    memset(&params, 0, r.row->size);
    borrowed.count = 0;
    borrowed.queued = r.stream != NULL && r.stream != Py_None;
    if (h2o_parse_operands(r.row, args + 2, &params, &borrowed) < 0) return NULL;
    if (r.workspace != NULL) h2o_note(&borrowed, "workspace", r.workspace, &r.room);
    int status = h2o_borrow(&state->exchange, &borrowed);
    if (status == 0) {
        status = execute(&r, &params, &borrowed, &error);
    }
    if (status > 0) {
        raise_error(&error);
    }
    h2o_give_back(&borrowed);
    if (status != 0) return NULL;
    const bool number = r.mode == MEASURE && r.bytes != H2O_UNSERVED;
    return number ? PyLong_FromSize_t(r.bytes) : Py_NewRef(Py_None);
}

/* ---- Devices ----------------------------------------------------------- */

static const h2o_device *find_device(PyObject *name) {
    const h2o_device *const *device = h2o_devices();
    for (; PyUnicode_Check(name) && *device != NULL; device++) {
        if (PyUnicode_CompareWithASCIIString(name, (*device)->name) == 0) return *device;
    }
    PyErr_Format(PyUnicode_Check(name) ? PyExc_ValueError : PyExc_TypeError,
                 "device: there is no %.100R", name);
    return NULL;
}

PyDoc_STRVAR(devices_doc,
             "devices($module, name, /)\n--\n\n"
             "Return (driver version, [(name, major, minor), ...]) for the devices of a kind,\n"
             "such as \"cuda\". Raise RuntimeError if there is no driver.");

static PyObject *devices(PyObject *module, PyObject *name) {
    (void)module;
    const h2o_device *const device = find_device(name);
    int version, count, status;
    h2o_error error;
    if (device == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS status = device->open(&version, &count, &error);
    Py_END_ALLOW_THREADS if (status != H2O_OK) {
        raise_error(&error);
        return NULL;
    }
    PyObject *list = PyList_New(0);
    for (int i = 0; i < count && list != NULL; i++) {
        h2o_device_facts facts;
        PyObject *entry = NULL;
        if (device->describe(i, &facts, &error) != H2O_OK) {
            raise_error(&error);
        } else {
            entry = Py_BuildValue("sii", facts.name, facts.major, facts.minor);
        }
        if (entry == NULL || PyList_Append(list, entry) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(entry);
    }
    return list != NULL ? Py_BuildValue("iN", version, list) : NULL;
}

PyDoc_STRVAR(load_doc, "load($module, name, image, index, /)\n--\n\n"
                       "Load a file of kernels, given as bytes, for a device of a kind, such as "
                       "\"cuda\". The first image is used for all devices.");

static PyObject *load(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    char *image;
    Py_ssize_t size;
    int32_t index;
    int status;
    h2o_error error;
    if (count != 3) {
        PyErr_Format(PyExc_TypeError, "load: takes 3 arguments, got %zd", count);
        return NULL;
    }
    const h2o_device *const device = find_device(args[0]);
    if (device == NULL || PyBytes_AsStringAndSize(args[1], &image, &size) < 0 ||
        h2o_parse_int32("index", args[2], &index) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS status = device->load(image, (size_t)size, index, &error);
    Py_END_ALLOW_THREADS if (status != H2O_OK) raise_error(&error);
    return status == H2O_OK ? Py_NewRef(Py_None) : NULL;
}

PyDoc_STRVAR(info_doc, "info($module, /)\n--\n\nSee h2o.ops.info.");

static PyObject *info(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    const h2o_ops *table = h2o_table(1);
    PyObject *levels = PyList_New(0);
    for (const char *const *level = h2o_cpu_levels(); levels != NULL && *level != NULL; level++) {
        PyObject *name = PyUnicode_FromString(*level);
        if (name == NULL || PyList_Append(levels, name) < 0) {
            Py_CLEAR(levels);
        }
        Py_XDECREF(name);
    }
    if (levels == NULL) return NULL;
    return Py_BuildValue("{ss sN ss si ss ss}", "level", table->name, "levels", levels, "features",
                         h2o_cpu_features(), "threads", h2o_threads(), "thread_source",
                         h2o_thread_source(), "version", H2O_VERSION);
}

/* ---- Module ------------------------------------------------------------ */

#define FASTCALL(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL

static PyMethodDef methods[] = {
    {"call", FASTCALL(call), call_doc},
    {"devices", devices, METH_O, devices_doc},
    {"load", FASTCALL(load), load_doc},
    {"info", info, METH_NOARGS, info_doc},
    {0},
};

static int intern_names(module_state *state) {
    for (int i = 0; i < H2O_OPERATIONS; i++) {
        state->operations[i] = PyUnicode_InternFromString(h2o_operations[i]->name);
        if (state->operations[i] == NULL) return -1;
    }
    for (int i = 0; i < MODES; i++) {
        state->modes[i] = PyUnicode_InternFromString(modes[i].name);
        if (state->modes[i] == NULL) return -1;
    }
    return 0;
}

/* Adds the names that `call` accepts as its operation, and the build's hash of the sources on which
 * kernels and core must agree. A file of kernels ends with the same text. */
static int add_constants(PyObject *module) {
    const module_state *const state = PyModule_GetState(module);
    PyObject *names = PyTuple_New(H2O_OPERATIONS);
    for (int i = 0; i < H2O_OPERATIONS && names != NULL; i++) {
        PyTuple_SetItem(names, i, Py_NewRef(state->operations[i]));
    }
    const int status = names != NULL ? PyModule_AddObjectRef(module, "OPERATIONS", names) : -1;
    Py_XDECREF(names);
    return status < 0 ? -1 : PyModule_AddStringConstant(module, "KERNELS", H2O_KERNELS);
}

/* Fails in a second interpreter: NumPy supports only one. */
static int execute_module(PyObject *module) {
    h2o_error error;
    module_state *const state = PyModule_GetState(module);
    if (h2o_exchange_init(&state->exchange) < 0 || intern_names(state) < 0) return -1;
    if (h2o_init(&error) != H2O_OK || h2o_check_threads(&error) != H2O_OK) {
        return raise_error(&error);
    }
    return add_constants(module);
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
    module_state *const state = PyModule_GetState(module);
    return h2o_exchange_traverse(&state->exchange, visit, arg);
}

static int clear(PyObject *module) {
    module_state *const state = PyModule_GetState(module);
    for (int i = 0; i < H2O_OPERATIONS; i++) Py_CLEAR(state->operations[i]);
    for (int i = 0; i < MODES; i++) Py_CLEAR(state->modes[i]);
    h2o_exchange_clear(&state->exchange);
    return 0;
}

static void free_module(void *module) { clear(module); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute_module},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "h2o._core",
    .m_doc = "The C core of h2o. Use h2o.ops, which documents the operations.",
    .m_size = sizeof(module_state),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = traverse,
    .m_clear = clear,
    .m_free = free_module,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
