/* exchange.c - views of any library's tensors, without copying.
 *
 * An object lends its memory by one of three routes:
 *
 *   numpy    NumPy's C API, for NumPy arrays. It also supports read-only arrays, and its
 *            errors say more than those of NumPy's DLPack.
 *   table    type(x).__dlpack_c_exchange_api__, DLPack's C functions. They take tens of
 *            nanoseconds, and there is nothing to give back (torch >= 2.10).
 *   dunder   x.__dlpack__(), for all other objects. It runs Python and hands over a
 *            managed tensor whose deleter must be called exactly once.
 *
 * The dunder route is taken first, for all arguments that need it. It may run any code, which
 * could free memory that another argument has merely shown us. After it no Python runs until
 * the kernel.
 */
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

#include "exchange.h"

int h2o_exchange_init(h2o_exchange *exchange) {
    if (PyArray_ImportNumPyAPI() < 0) return -1;
    exchange->names.table = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
    exchange->names.dlpack = PyUnicode_InternFromString("__dlpack__");
    exchange->names.max_version = PyUnicode_InternFromString("max_version");
    exchange->names.stream = PyUnicode_InternFromString("stream");
    exchange->names.unordered = PyLong_FromLong(-1);
    exchange->names.version = Py_BuildValue("(ii)", DL_MAJOR, DL_MINOR);
    return PyErr_Occurred() != NULL ? -1 : 0;
}

int h2o_exchange_traverse(h2o_exchange *exchange, visitproc visit, void *arg) {
    for (int i = 0; i < H2O_PRODUCERS; i++) {
        Py_VISIT(exchange->producers[i].type);
    }
    return 0;
}

void h2o_exchange_clear(h2o_exchange *exchange) {
    for (int i = 0; i < H2O_PRODUCERS; i++) {
        Py_CLEAR(exchange->producers[i].type);
    }
    Py_CLEAR(exchange->names.table);
    Py_CLEAR(exchange->names.dlpack);
    Py_CLEAR(exchange->names.max_version);
    Py_CLEAR(exchange->names.stream);
    Py_CLEAR(exchange->names.unordered);
    Py_CLEAR(exchange->names.version);
}

#ifdef Py_GIL_DISABLED
#define LOCK(exchange) PyMutex_Lock(&(exchange)->lock)
#define UNLOCK(exchange) PyMutex_Unlock(&(exchange)->lock)
#else
#define LOCK(exchange) ((void)0)
#define UNLOCK(exchange) ((void)0)
#endif

/* ---- Common to all routes ---------------------------------------------- */

h2o_name h2o_type_name(PyObject *object) {
    h2o_name name = {"object without a name"};
    PyObject *type_name = PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__name__");
    const char *text = type_name != NULL ? PyUnicode_AsUTF8AndSize(type_name, NULL) : NULL;
    if (text != NULL) {
        snprintf(name.text, sizeof name.text, "%s", text);
    }
    PyErr_Clear();
    Py_XDECREF(type_name);
    return name;
}

static bool has_elements(const h2o_view *view) {
    for (int32_t i = 0; i < view->ndim; i++) {
        if (view->shape[i] <= 0) return false;
    }
    return true;
}

/* Rejects memory that no kernel could read, whatever the operation. */
static int require_memory(const h2o_view *view, PyObject *object) {
    if (view->ndim > H2O_MAX_DIMS || !has_elements(view)) {
        return 0; /* check.c reports what is wrong with the shape */
    }
    if (view->data == NULL && view->device_type == H2O_DEVICE_CPU) { /* the CPU reads no others */
        PyErr_Format(PyExc_BufferError,
                     "%s: this %s has no memory (a fake, meta or wrapped tensor?)", view->name,
                     h2o_type_name(object).text);
        return -1;
    }
    const size_t size = (size_t)h2o_dtype_size(view->dtype);
    if ((uintptr_t)view->data % size != 0) {
        PyErr_Format(PyExc_BufferError,
                     "%s: memory at %p is not aligned to its elements of %zu bytes; pass a copy",
                     view->name, view->data, size);
        return -1;
    }
    return 0;
}

/* ---- NumPy ------------------------------------------------------------- */

/* Looks up kind and size, not the type number, since NumPy has several types that are alike, such
 * as longlong and int64. Types that other packages add to NumPy may claim any kind. */
static h2o_dtype numpy_dtype(PyArrayObject *array) {
    static const struct {
        char kind;
        h2o_dtype dtype;
    } known[] = {{'f', H2O_F32}, {'f', H2O_F16}, {'f', H2O_F64}, {'i', H2O_I32},
                 {'i', H2O_I64}, {'b', H2O_U8},  {'u', H2O_U8}};
    const char kind = PyArray_DESCR(array)->kind;
    const npy_intp size = PyArray_ITEMSIZE(array);
    const bool builtin = PyTypeNum_ISNUMBER(PyArray_TYPE(array));
    for (size_t i = 0; i < sizeof known / sizeof known[0] && builtin; i++) {
        if (known[i].kind == kind && h2o_dtype_size(known[i].dtype) == size) return known[i].dtype;
    }
    return H2O_NONE;
}

static int borrow_numpy(PyArrayObject *array, h2o_view *view) {
    view->dtype = numpy_dtype(array);
    if (view->dtype == H2O_NONE || !PyArray_ISNOTSWAPPED(array)) {
        PyErr_Format(PyExc_TypeError,
                     "%s: NumPy arrays of dtype %R cannot be used, only float32, float16, float64, "
                     "int32, int64, bool and uint8 in native byte order (NumPy has no bfloat16: "
                     "pass such data as a tensor of a library that has it)",
                     view->name, (PyObject *)PyArray_DESCR(array));
        return -1;
    }
    view->data = PyArray_DATA(array);
    view->ndim = PyArray_NDIM(array);
    view->device_type = H2O_DEVICE_CPU;
    view->readonly = !PyArray_ISWRITEABLE(array);
    if (view->ndim > H2O_MAX_DIMS) return 0;
    const npy_intp size = h2o_dtype_size(view->dtype);
    for (int i = 0; i < view->ndim; i++) {
        view->shape[i] = PyArray_DIM(array, i);
        view->stride[i] = PyArray_STRIDE(array, i) / size;
        if (view->shape[i] > 1 && PyArray_STRIDE(array, i) % size != 0) {
            PyErr_Format(PyExc_BufferError,
                         "%s: a stride of %zd bytes is not a multiple of the element size %zd; "
                         "pass a copy",
                         view->name, (Py_ssize_t)PyArray_STRIDE(array, i), (Py_ssize_t)size);
            return -1;
        }
    }
    return require_memory(view, (PyObject *)array);
}

/* ---- DLPack ------------------------------------------------------------ */

static h2o_dtype dlpack_dtype(dl_dtype dtype) {
    static const struct {
        uint8_t code, bits;
        h2o_dtype dtype;
    } known[] = {
        {DL_FLOAT, 32, H2O_F32}, {DL_FLOAT, 16, H2O_F16}, {DL_BFLOAT, 16, H2O_BF16},
        {DL_FLOAT, 64, H2O_F64}, {DL_INT, 32, H2O_I32},   {DL_INT, 64, H2O_I64},
        {DL_BOOL, 8, H2O_U8},    {DL_UINT, 8, H2O_U8},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0] && dtype.lanes == 1; i++) {
        if (known[i].code == dtype.code && known[i].bits == dtype.bits) return known[i].dtype;
    }
    return H2O_NONE;
}

static int read_dltensor(const dl_tensor *tensor, PyObject *object, h2o_view *view) {
    view->dtype = dlpack_dtype(tensor->dtype);
    if (view->dtype == H2O_NONE) {
        PyErr_Format(PyExc_TypeError,
                     "%s: DLPack dtype (code %d, %d bits, %d lanes) cannot be used, only float32, "
                     "float16, bfloat16, float64, int32, int64, bool and uint8",
                     view->name, tensor->dtype.code, tensor->dtype.bits, tensor->dtype.lanes);
        return -1;
    }
    if (tensor->ndim < 0 || (tensor->ndim > 0 && tensor->shape == NULL)) {
        PyErr_Format(PyExc_BufferError, "%s: this %s has an invalid DLPack shape", view->name,
                     h2o_type_name(object).text);
        return -1;
    }
    view->ndim = tensor->ndim;
    view->device_type = tensor->device_type;
    view->device_id = tensor->device_id;
    if (view->ndim > H2O_MAX_DIMS) return 0;
    uint64_t inner = 1; /* may wrap around; check.c rejects such shapes */
    for (int32_t i = view->ndim - 1; i >= 0; i--) {
        view->shape[i] = tensor->shape[i];
        view->stride[i] = tensor->strides != NULL ? tensor->strides[i] : (int64_t)inner;
        inner *= (uint64_t)tensor->shape[i];
    }
    if (tensor->data != NULL) {
        view->data = (void *)((uintptr_t)tensor->data + (uintptr_t)tensor->byte_offset);
    }
    return require_memory(view, object);
}

static const char *const capsule_names[2] = {"dltensor", "dltensor_versioned"};
static const char *const used_names[2] = {"used_dltensor", "used_dltensor_versioned"};

/* Takes ownership of the managed tensor; renaming the capsule tells its destructor. From here on
 * it must be given back. */
static int take_capsule(PyObject *capsule, h2o_borrowed_view *entry) {
    const char *const argument = entry->view->name;
    for (int versioned = 0; versioned < 2; versioned++) {
        if (PyCapsule_IsValid(capsule, used_names[versioned])) {
            PyErr_Format(PyExc_BufferError,
                         "%s: __dlpack__ returned a capsule that has been used before", argument);
            return -1;
        }
        if (PyCapsule_IsValid(capsule, capsule_names[versioned])) {
            void *managed = PyCapsule_GetPointer(capsule, capsule_names[versioned]);
            if (PyCapsule_SetName(capsule, used_names[versioned]) < 0) return -1;
            entry->managed = managed;
            entry->versioned = versioned;
            return 0;
        }
    }
    if (!PyCapsule_CheckExact(capsule)) {
        PyErr_Format(PyExc_TypeError, "%s: __dlpack__ returned a %s, wanted a DLPack capsule",
                     argument, h2o_type_name(capsule).text);
        return -1;
    }
    const char *name = PyCapsule_GetName(capsule);
    PyErr_Format(PyExc_BufferError,
                 "%s: __dlpack__ returned a capsule named \"%.100s\", wanted \"dltensor\" or "
                 "\"dltensor_versioned\"",
                 argument, name != NULL ? name : "");
    return -1;
}

static int read_managed(h2o_borrowed_view *entry) {
    h2o_view *view = entry->view;
    if (!entry->versioned) {
        return read_dltensor(&((const dl_managed *)entry->managed)->tensor, entry->object, view);
    }
    const dl_managed_versioned *managed = entry->managed;
    if (managed->version.major != DL_MAJOR) {
        PyErr_Format(PyExc_BufferError, "%s: has DLPack version %u.%u, h2o supports version %d",
                     view->name, managed->version.major, managed->version.minor, DL_MAJOR);
        return -1;
    }
    /* Whatever is written into a producer's private copy would be lost. */
    view->readonly = managed->flags & (DL_FLAG_READ_ONLY | DL_FLAG_IS_COPIED);
    return read_dltensor(&managed->tensor, entry->object, view);
}

/* Turns the producer's exception into a BufferError that names the argument, with the original as
 * its cause. MemoryError and exceptions that are not an Exception (KeyboardInterrupt) stay as they
 * are. */
static void explain_refusal(const h2o_borrowed_view *entry) {
    if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_BufferError, "no reason was given");
    }
    if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)) {
        return;
    }
    PyObject *type, *cause, *traceback;
    PyErr_Fetch(&type, &cause, &traceback);
    PyErr_NormalizeException(&type, &cause, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(cause, traceback);
    }
    PyObject *text = PyObject_Str(cause);
    const char *reason = text != NULL ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    if (reason == NULL) {
        PyErr_Clear();
        reason = "";
    }
    /* torch appends a C++ stack trace; the first line is enough. */
    PyObject *line = PyUnicode_DecodeUTF8(reason, (Py_ssize_t)strcspn(reason, "\n"), "replace");
    if (line != NULL) {
        PyErr_Format(PyExc_BufferError, "%s: this %s cannot share its memory: %U",
                     entry->view->name, h2o_type_name(entry->object).text, line);
        PyObject *error_type, *error, *error_traceback;
        PyErr_Fetch(&error_type, &error, &error_traceback);
        PyErr_NormalizeException(&error_type, &error, &error_traceback);
        PyException_SetCause(error, Py_NewRef(cause));
        PyErr_Restore(error_type, error, error_traceback);
    }
    Py_XDECREF(line);
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(cause);
    Py_XDECREF(traceback);
}

/* Producers older than DLPack 1.0 have no max_version argument. */
static PyObject *call_dunder(const h2o_exchange *exchange, PyObject *method, bool queued) {
    PyObject *arguments = PyTuple_New(0);
    PyObject *keywords = PyDict_New();
    PyObject *capsule = NULL;
    if (arguments != NULL && keywords != NULL &&
        PyDict_SetItem(keywords, exchange->names.max_version, exchange->names.version) == 0 &&
        (!queued ||
         PyDict_SetItem(keywords, exchange->names.stream, exchange->names.unordered) == 0)) {
        capsule = PyObject_Call(method, arguments, keywords);
        if (capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            PyDict_DelItem(keywords, exchange->names.max_version);
            capsule = PyObject_Call(method, arguments, keywords);
        }
    }
    Py_XDECREF(keywords);
    Py_XDECREF(arguments);
    return capsule;
}

static int borrow_dunder(const h2o_exchange *exchange, h2o_borrowed_view *entry, bool queued) {
    PyObject *method = PyObject_GetAttr(entry->object, exchange->names.dlpack);
    if (method == NULL) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError,
                         "%s: a %s is not a tensor; wanted a torch tensor, a NumPy array or "
                         "another object with __dlpack__",
                         entry->view->name, h2o_type_name(entry->object).text);
        }
        return -1;
    }
    PyObject *capsule = call_dunder(exchange, method, queued);
    Py_DECREF(method);
    if (capsule == NULL) {
        explain_refusal(entry);
        return -1;
    }
    const int taken = take_capsule(capsule, entry);
    Py_DECREF(capsule);
    return taken < 0 ? -1 : read_managed(entry);
}

static int borrow_from_table(h2o_borrowed_view *entry) {
    dl_tensor tensor = {0};
    if (entry->api->borrow(entry->object, &tensor) != 0) {
        explain_refusal(entry);
        return -1;
    }
    return read_dltensor(&tensor, entry->object, entry->view);
}

/* Finds the newest table of the supported major version, or NULL if the type has none. Returns -1
 * and a Python exception if the lookup itself failed. */
static int usable_table(const h2o_exchange *exchange, PyTypeObject *type,
                        const dl_exchange_api **api) {
    PyObject *capsule = PyObject_GetAttr((PyObject *)type, exchange->names.table);
    const dl_exchange_header *header = NULL;
    *api = NULL;
    if (capsule == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        PyErr_Clear(); /* the type has no table */
        return 0;
    }
    if (PyCapsule_IsValid(capsule, "dlpack_exchange_api")) {
        header = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    }
    Py_DECREF(capsule);
    while (header != NULL && header->version.major != DL_MAJOR) {
        header = header->previous;
    }
    const dl_exchange_api *table = (const dl_exchange_api *)header;
    *api = table != NULL && table->borrow != NULL ? table : NULL;
    return 0;
}

/* The remembered table of a type, or NULL. */
static const dl_exchange_api *recall(h2o_exchange *exchange, PyTypeObject *type) {
    const dl_exchange_api *api = NULL;
    LOCK(exchange);
    for (int i = 0; i < H2O_PRODUCERS; i++) {
        if (exchange->producers[i].type == type) {
            api = exchange->producers[i].api;
            break;
        }
    }
    UNLOCK(exchange);
    return api;
}

static void remember(h2o_exchange *exchange, PyTypeObject *type, const dl_exchange_api *api) {
    Py_INCREF((PyObject *)type);
    LOCK(exchange);
    const int i = exchange->next;
    PyTypeObject *forgotten = exchange->producers[i].type;
    exchange->next = (i + 1) % H2O_PRODUCERS;
    exchange->producers[i].api = api;
    exchange->producers[i].type = type;
    UNLOCK(exchange);
    Py_XDECREF((PyObject *)forgotten);
}

static int find_table(h2o_exchange *exchange, PyTypeObject *type, const dl_exchange_api **api) {
    *api = recall(exchange, type);
    if (*api != NULL) return 0;
    if (usable_table(exchange, type, api) < 0) return -1;
    if (*api != NULL) {
        remember(exchange, type, *api);
    }
    return 0;
}

/* ---- All arguments of a call ------------------------------------------- */

int h2o_borrow(h2o_exchange *exchange, h2o_borrowed *borrowed) {
    for (int i = 0; i < borrowed->count; i++) {
        h2o_borrowed_view *entry = &borrowed->entries[i];
        if (PyArray_Check(entry->object)) {
            entry->route = H2O_VIA_NUMPY;
            continue;
        }
        if (find_table(exchange, Py_TYPE(entry->object), &entry->api) < 0) return -1;
        if (entry->api != NULL) {
            entry->route = H2O_VIA_TABLE;
        } else if (borrow_dunder(exchange, entry, borrowed->queued) < 0) {
            return -1;
        }
    }
    for (int i = 0; i < borrowed->count; i++) {
        h2o_borrowed_view *entry = &borrowed->entries[i];
        int status = 0;
        if (entry->route == H2O_VIA_TABLE) {
            status = borrow_from_table(entry);
        } else if (entry->route == H2O_VIA_NUMPY) {
            status = borrow_numpy((PyArrayObject *)entry->object, entry->view);
        }
        if (status < 0) return -1;
    }
    return 0;
}

int h2o_current_stream(const h2o_borrowed *borrowed, void **stream) {
    const h2o_borrowed_view *leader = &borrowed->entries[0];
    const h2o_view *view = leader->view;
    if (leader->route != H2O_VIA_TABLE || leader->api->current_stream == NULL) {
        PyErr_Format(PyExc_RuntimeError,
                     "%s: a %s has no current stream in DLPack's exchange table; pass a stream",
                     view->name, h2o_type_name(leader->object).text);
        return -1;
    }
    return leader->api->current_stream(view->device_type, view->device_id, stream) == 0 ? 0 : -1;
}

void h2o_give_back(h2o_borrowed *borrowed) {
    PyObject *type = NULL, *error = NULL, *traceback = NULL;
    bool fetched = false;
    for (int i = 0; i < borrowed->count; i++) {
        h2o_borrowed_view *entry = &borrowed->entries[i];
        if (entry->managed == NULL) continue;
        if (!fetched) {
            PyErr_Fetch(&type, &error, &traceback); /* deleters may run Python */
            fetched = true;
        }
        if (entry->versioned) {
            dl_managed_versioned *managed = entry->managed;
            if (managed->deleter != NULL) {
                managed->deleter(managed);
            }
        } else {
            dl_managed *managed = entry->managed;
            if (managed->deleter != NULL) {
                managed->deleter(managed);
            }
        }
        entry->managed = NULL;
    }
    if (fetched) {
        PyErr_Restore(type, error, traceback);
    }
}
