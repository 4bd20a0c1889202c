/* border.c - fuzz target: h2o._core's attend, called as Python calls it, with arguments of any
 * kind. Tensors come by each of the routes of exchange.c, described wrongly in every way that the
 * reader can notice. Each call must return None or raise, and release each managed tensor once.
 * Built by `make fuzz`. */
#include <Python.h>

#include "dlpack_abi.h"
#include "fuzz.h"

PyMODINIT_FUNC PyInit__core(void);

static PyObject *call, *make_array, *one_tuple, *operation, *mode;
static input in;

/* Number of tensors handed over, and of those released. */
static int64_t lent, returned;

/* ---- Descriptions by a producer ---------------------------------------- */

/* Describes a tensor. Returns the memory that contains it, or NULL. */
static void *describe(dl_tensor *tensor, int64_t *shape, int64_t *strides) {
    static const dl_dtype dtypes[] = {{DL_FLOAT, 32, 1}, {DL_FLOAT, 16, 1}, {DL_BFLOAT, 16, 1},
                                      {DL_UINT, 8, 1},   {DL_BOOL, 8, 1},   {DL_FLOAT, 64, 1},
                                      {DL_INT, 64, 1},   {DL_FLOAT, 32, 4}, {DL_COMPLEX, 64, 1}};
    const int64_t ndim = rarely(&in) ? choose(&in, 8) - 1 : 2 + choose(&in, 3);
    *tensor = (dl_tensor){.device_type = rarely(&in) ? (int32_t)choose(&in, 20) : 1,
                          .device_id = rarely(&in) ? (int32_t)choose(&in, 3) - 1 : 0,
                          .ndim = (int32_t)ndim,
                          .dtype = dtypes[rarely(&in) ? choose(&in, 9) : 0],
                          .shape = shape,
                          .strides = choose(&in, 3) ? strides : NULL};
    int64_t count = 1, below = 0, above = 0;
    uint8_t *memory = NULL;
    for (int64_t i = ndim - 1; i >= 0; i--) {
        shape[i] = rarely(&in) ? INT64_MIN >> choose(&in, 64) : 1 + choose(&in, 4);
        if (rarely(&in)) shape[i] = INT64_MAX >> choose(&in, 64);
        strides[i] = count;
        if (rarely(&in)) strides[i] = choose(&in, 256) - 128;
        if (__builtin_mul_overflow(count, shape[i], &count)) count = 1;
    }
    int64_t dense[8];
    for (int64_t i = ndim - 1, n = 1; i >= 0; i--) {
        dense[i] = n;
        if (__builtin_mul_overflow(n, shape[i], &n)) n = INT64_MAX;
    }
    const int64_t size = tensor->dtype.bits * tensor->dtype.lanes / 8;
    if (find_reach(shape, tensor->strides ? strides : dense, (int)ndim, size, &below, &above) &&
        !rarely(&in)) {
        const int64_t offset = rarely(&in) ? choose(&in, 9) : 0;
        memory = test_alloc((size_t)(above - below + offset));
        fill_bytes(memory, above - below + offset, H2O_F32, choose(&in, 3));
        tensor->data = memory - below;
        tensor->byte_offset = (uint64_t)offset;
    }
    if (rarely(&in)) tensor->shape = ndim > 0 ? NULL : shape;
    return memory;
}

/* A managed tensor with everything it owns. `memory` is freed in the end. */
typedef struct {
    union {
        dl_managed plain;
        dl_managed_versioned versioned;
    } as;
    int64_t shape[8], strides[8];
    void *memory;
} lender;

static void forget(lender *l) {
    free(l->memory);
    free(l);
    returned++;
}

static void delete_plain(dl_managed *self) { forget((lender *)(void *)self); }
static void delete_versioned(dl_managed_versioned *self) { forget((lender *)(void *)self); }

static void drop_capsule(PyObject *capsule) {
    static const char *const names[] = {"dltensor", "dltensor_versioned", "nonsense"};
    for (int i = 0; i < 3; i++) {
        if (PyCapsule_IsValid(capsule, names[i])) forget(PyCapsule_GetPointer(capsule, names[i]));
    }
}

static PyObject *make_capsule(void) {
    lender *const l = test_alloc(sizeof *l);
    const bool versioned = choose(&in, 2);
    dl_tensor *const tensor = versioned ? &l->as.versioned.tensor : &l->as.plain.tensor;
    l->memory = describe(tensor, l->shape, l->strides);
    lent++;
    if (versioned) {
        l->as.versioned.version =
            (dl_version){rarely(&in) ? (uint32_t)choose(&in, 4) : DL_MAJOR, 2};
        l->as.versioned.flags = rarely(&in) ? (uint64_t)choose(&in, 8) : 0;
        l->as.versioned.deleter = delete_versioned;
    } else {
        l->as.plain.deleter = delete_plain;
    }
    const char *const name = rarely(&in) ? "nonsense"
                             : versioned ? "dltensor_versioned"
                                         : "dltensor";
    return PyCapsule_New(l, name, drop_capsule);
}

/* ---- Objects ----------------------------------------------------------- */

static PyObject *dunder(PyObject *self, PyObject *args, PyObject *keywords) {
    (void)self, (void)args;
    if (rarely(&in)) {
        PyObject *const errors[] = {PyExc_TypeError, PyExc_BufferError, PyExc_MemoryError,
                                    PyExc_KeyboardInterrupt, PyExc_RuntimeError};
        PyErr_SetString(errors[choose(&in, 5)], choose(&in, 2) ? "no\nmore" : "");
        return NULL;
    }
    if (keywords != NULL && rarely(&in)) {
        PyErr_SetString(PyExc_TypeError, "unexpected keyword max_version");
        return NULL;
    }
    return rarely(&in) ? PyLong_FromLong(1) : make_capsule();
}

static PyMethodDef producer_methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))dunder, METH_VARARGS | METH_KEYWORDS, NULL}, {0}};
static PyType_Slot producer_slots[] = {{Py_tp_methods, producer_methods}, {0}};
static PyType_Spec producer_spec = {"fuzz.Producer", 0, 0, Py_TPFLAGS_DEFAULT, producer_slots};
static PyType_Spec nothing_spec = {"fuzz.Nothing", 0, 0, Py_TPFLAGS_DEFAULT, producer_slots + 1};

/* Shapes, strides and memory of tensors from tables, until the call is over. */
static struct {
    int64_t shape[8], strides[8];
    void *memory;
} shown[16];
static int shown_count;

static int show(void *object, dl_tensor *tensor) {
    (void)object;
    if (rarely(&in)) {
        PyErr_SetString(PyExc_RuntimeError, "not now");
        return -1;
    }
    CHECK(shown_count < 16);
    void *const memory = describe(tensor, shown[shown_count].shape, shown[shown_count].strides);
    shown[shown_count++].memory = memory;
    return 0;
}

static dl_exchange_api old_table = {.header = {{0, 7}, NULL}, .borrow = show};
static dl_exchange_api table = {.header = {{DL_MAJOR, 3}, NULL}, .borrow = show};
static dl_exchange_api empty_table = {.header = {{DL_MAJOR, 3}, NULL}};
static dl_exchange_api newer_table = {.header = {{DL_MAJOR + 1, 0}, &table.header}, .borrow = NULL};

/* Types are made only once, because the core keeps some of them. */
enum { TABLES = 6 };
static PyObject *table_types[TABLES], *producer_type;

static int make_types(void) {
    dl_exchange_api *const tables[TABLES] = {&table,       &old_table, &empty_table,
                                             &newer_table, &table,     &table};
    producer_type = PyType_FromSpec(&producer_spec);
    for (int i = 0; i < TABLES; i++) {
        table_types[i] = PyType_FromSpec(i == 1 ? &nothing_spec : &producer_spec);
        PyObject *const capsule =
            PyCapsule_New(tables[i], i == 4 ? "other" : "dlpack_exchange_api", NULL);
        CHECK(table_types[i] && capsule);
        CHECK(PyObject_SetAttrString(table_types[i], "__dlpack_c_exchange_api__", capsule) == 0);
        Py_DECREF(capsule);
    }
    return 0;
}

static PyObject *choose_array(void) {
    static const char *const dtypes[] = {"f4", "f2",  "u1", "?", "f8", "i8",
                                         "i4", ">f4", "c8", "O", "V8", "q"};
    PyObject *const array =
        PyObject_CallFunction(make_array, "siiiiii", dtypes[rarely(&in) ? choose(&in, 12) : 0],
                              (int)choose(&in, 6), (int)choose(&in, 5), (int)choose(&in, 5),
                              (int)choose(&in, 5), (int)choose(&in, 5), (int)choose(&in, 256));
    if (array == NULL) PyErr_Clear();
    return array ? array : PyLong_FromLong(0);
}

static PyObject *choose_object(void) {
    switch (choose(&in, 5)) {
    case 0:
        return PyObject_CallNoArgs(producer_type);
    case 1:
        return PyObject_CallNoArgs(table_types[choose(&in, TABLES)]);
    case 2:
        return choose_array();
    case 3:
        return Py_NewRef(Py_None);
    default:
        switch (choose(&in, 6)) {
        case 0:
            return PyFloat_FromDouble(0.1);
        case 1:
            return PyLong_FromLong(choose(&in, 256) - 128);
        case 2:
            return PyUnicode_FromString("");
        case 3:
            return PyFloat_FromDouble(1e308);
        case 4:
            return PySequence_Repeat(one_tuple, choose(&in, 12));
        default:
            return PyLong_FromString("99999999999999999999", NULL, 10);
        }
    }
}

/* The default policy, sometimes with one field of any kind. */
static PyObject *choose_policy(void) {
    PyObject *const policy = Py_BuildValue("isdO", 0, "sum", 1.0, Py_False);
    if (policy == NULL || !rarely(&in)) return policy;
    PyObject *const changed = PyTuple_New(4);
    const int64_t other = choose(&in, 4);
    for (int i = 0; i < 4; i++) {
        PyObject *const field = PyTuple_GetItem(policy, i);
        PyTuple_SetItem(changed, i, i == other ? choose_object() : Py_NewRef(field));
    }
    Py_DECREF(policy);
    return changed;
}

/* ---- The call ---------------------------------------------------------- */

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    static const char source[] =
        "import numpy\n"
        "def make_array(dtype, ndim, a, b, c, d, how):\n"
        "    array = numpy.zeros((a, b, c, d, 1, 1)[:ndim], dtype)\n"
        "    if how & 1: array = array[..., ::-1]\n"
        "    if how & 2: array = array.T\n"
        "    if how & 4: array = numpy.broadcast_to(array[:1], array.shape)\n"
        "    if how & 8: array = numpy.frombuffer(bytes(1 + array.nbytes), 'u1')[1:].view(dtype)\n"
        "    if how & 16: array.flags.writeable = False\n"
        "    return array\n";
    (void)argc, (void)argv;
    CHECK(PyImport_AppendInittab("_core", PyInit__core) == 0);
    Py_Initialize();
    PyObject *const names = PyDict_New(), *const core = PyImport_ImportModule("_core");
    if (core == NULL) PyErr_Print();
    CHECK(core && PyRun_String(source, Py_file_input, PyEval_GetBuiltins(), names));
    make_array = PyDict_GetItemString(names, "make_array");
    call = PyObject_GetAttrString(core, "call");
    operation = PyUnicode_FromString("attend");
    mode = PyUnicode_FromString("run");
    one_tuple = PyTuple_Pack(1, Py_None);
    CHECK(make_array && call && operation && mode && one_tuple && make_types() == 0);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    enum { ARGUMENTS = 10, SLOTS = 4, SCALE = 7, SOFTCAP, POLICY };
    PyObject *all[2 + ARGUMENTS + 1] = {operation, mode}, **const args = all + 2;
    in = (input){data, size};
    lent = returned = 0;
    const int count = ARGUMENTS - (rarely(&in) ? (int)choose(&in, 3) - 1 : 0);
    for (int i = 0; i < count; i++) {
        const bool usual = !rarely(&in);
        if (usual && i == POLICY) {
            args[i] = choose_policy();
        } else if (usual && i >= SCALE) {
            args[i] = PyFloat_FromDouble(i == SOFTCAP ? 0.0 : 0.5);
        } else if (usual && i == SLOTS && choose(&in, 2)) {
            args[i] = PyTuple_New(11);
            for (int j = 0; j < 11; j++) PyTuple_SET_ITEM(args[i], j, choose_object());
        } else if (usual && (i == SLOTS - 1 || i == SLOTS)) {
            args[i] = Py_NewRef(Py_None);
        } else {
            args[i] = choose_object();
        }
        CHECK(args[i] != NULL);
    }
    PyObject *const answer = PyObject_Vectorcall(call, all, (size_t)count + 2, NULL);
    CHECK((answer == Py_None) == !PyErr_Occurred());
    PyErr_Clear();
    Py_XDECREF(answer);
    for (int i = 0; i < count; i++) Py_DECREF(args[i]);
    CHECK(lent == returned);
    while (shown_count > 0) free(shown[--shown_count].memory);
    return 0;
}
