/* module.c - the Python module h2o._core: arguments in, exceptions out.
 *
 * A call parses its numbers first, since that may run Python, then borrows the
 * tensors, has them checked, takes workspace, and runs the kernel without the
 * GIL. h2o/backends.py is the only caller; h2o/ops.py documents the operations.
 */
#include <Python.h>

#include "cuda/driver.h"
#include "cuda/launch.h"
#include "exchange.h"
#include "run.h"

static int raise_error(const h2o_error *error) {
    PyObject *type = PyExc_RuntimeError;
    switch (error->status) {
    case H2O_EVALUE:
        type = PyExc_ValueError;
        break;
    case H2O_ETYPE:
        type = PyExc_TypeError;
        break;
    case H2O_EBUFFER:
        type = PyExc_BufferError;
        break;
    case H2O_EMEMORY:
        type = PyExc_MemoryError;
        break;
    case H2O_EBACKEND:
    case H2O_OK:
        break;
    }
    PyErr_SetString(type, error->text);
    return -1;
}

/* ---- Arguments --------------------------------------------------------- */

static int require_count(const char *function, Py_ssize_t got, Py_ssize_t wanted) {
    if (got == wanted) return 0;
    PyErr_Format(PyExc_TypeError, "%s: takes %zd arguments, got %zd", function, wanted, got);
    return -1;
}

/* Replaces the complaint of a failed conversion by one that names the argument. */
static int refuse_scalar(const char *name, const char *wanted, PyObject *object) {
    const bool overflow = PyErr_ExceptionMatches(PyExc_OverflowError);
    if (overflow || PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        PyErr_Format(overflow ? PyExc_ValueError : PyExc_TypeError, "%s: is %.100R, wanted %s",
                     name, object, wanted);
    }
    return -1;
}

static int parse_float(const char *name, PyObject *object, float *number) {
    const double parsed = PyFloat_AsDouble(object);
    if (parsed == -1.0 && PyErr_Occurred()) return refuse_scalar(name, "a number", object);
    *number = (float)parsed;
    return 0;
}

static int parse_int32(const char *name, PyObject *object, int32_t *number) {
    const long long parsed = PyLong_AsLongLong(object);
    if (parsed == -1 && PyErr_Occurred()) {
        return refuse_scalar(name, "an integer of 32 bits", object);
    }
    if (parsed < INT32_MIN || parsed > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%s: is %lld, wanted an integer of 32 bits", name, parsed);
        return -1;
    }
    *number = (int32_t)parsed;
    return 0;
}

static int parse_rank_by(PyObject *object, h2o_rank_by *rank_by) {
    if (PyUnicode_Check(object)) {
        if (PyUnicode_CompareWithASCIIString(object, "sum") == 0) {
            *rank_by = H2O_RANK_SUM;
            return 0;
        }
        if (PyUnicode_CompareWithASCIIString(object, "mean") == 0) {
            *rank_by = H2O_RANK_MEAN;
            return 0;
        }
    }
    PyErr_Format(PyUnicode_Check(object) ? PyExc_ValueError : PyExc_TypeError,
                 "rank_by: is %.100R, wanted \"sum\" or \"mean\"", object);
    return -1;
}

/* args: sinks, rank_by, decay, value_weighted. */
static int parse_policy(PyObject *const *args, h2o_policy *policy) {
    if (parse_int32("sinks", args[0], &policy->sinks) < 0 ||
        parse_rank_by(args[1], &policy->rank_by) < 0 ||
        parse_float("decay", args[2], &policy->decay) < 0) {
        return -1;
    }
    const int weighted = PyObject_IsTrue(args[3]);
    policy->value_weighted = weighted > 0;
    policy->merge = 0.0f;
    return weighted < 0 ? -1 : 0;
}

/* A given number is above 0, which in h2o_policy says that there is none. */
static int parse_merge(PyObject *object, h2o_policy *policy) {
    if (object == Py_None) return 0;
    if (parse_float("merge", object, &policy->merge) < 0) return -1;
    if (policy->merge > 0.0f) return 0;
    PyErr_Format(PyExc_ValueError, "merge: is %.100R, wanted a cosine between 0 and 1, or None",
                 object);
    return -1;
}

enum { SLOTS_FIELDS = 11 };

static int require_slots(PyObject *slots) {
    if (PyTuple_Check(slots) && PyTuple_Size(slots) == SLOTS_FIELDS) return 0;
    PyErr_Format(PyExc_TypeError, "slots: is a %s, wanted h2o.ops.Slots",
                 h2o_type_name(slots).text);
    return -1;
}

/* What attend needs, or all of it; the tuple keeps the tensors alive. */
static void loan_slots(h2o_loans *loans, PyObject *tuple, bool whole, h2o_slots *slots) {
    const struct {
        const char *name;
        h2o_view *view;
        bool attended;
    } fields[SLOTS_FIELDS] = {
        {"slots.keys", &slots->keys, true},      {"slots.values", &slots->values, true},
        {"slots.scores", &slots->scores, true},  {"slots.positions", &slots->positions, true},
        {"slots.free", &slots->free, false},     {"slots.lengths", &slots->lengths, false},
        {"slots.budget", &slots->budget, false}, {"slots.lost", &slots->lost, false},
        {"slots.norms", &slots->norms, false},   {"slots.starts", &slots->starts, true},
        {"slots.bias", &slots->bias, true},
    };
    for (int i = 0; i < SLOTS_FIELDS; i++) {
        if (whole || fields[i].attended) {
            h2o_loan(loans, fields[i].name, PyTuple_GetItem(tuple, i), fields[i].view);
        }
    }
}

/* ---- Calls ------------------------------------------------------------- */

/* What is to be done with a call, and what that takes or gives. */
typedef struct {
    enum { DO_RUN, DO_JUDGE, DO_MEASURE, DO_LAUNCH } task;
    PyObject *workspace, *stream; /* DO_LAUNCH; DO_MEASURE: the stream */
    h2o_view room;                /* the workspace, borrowed */
    size_t bytes;                 /* DO_MEASURE: of it */
} errand;

/* After the operation's own tensors have been noted. */
static int borrow(PyObject *module, h2o_loans *loans, errand *e) {
    if (e->task == DO_LAUNCH) h2o_loan(loans, "workspace", e->workspace, &e->room);
    loans->stream = e->stream;
    return h2o_borrow(PyModule_GetState(module), loans);
}

/* For a device's kernels: which they are, and what the caller lends them. */
static int equip(const h2o_loans *loans, const errand *e, h2o_call *call) {
    const h2o_view *const room = &e->room;
    if (e->task != DO_MEASURE && e->task != DO_LAUNCH) return 0;
    call->table = &h2o_ops_cuda;
    if (e->task == DO_MEASURE) return 0;
    if (h2o_given(room)) {
        const h2o_view *const leader = loans->entries[0].view;
        if (room->device_type != leader->device_type || room->device_id != leader->device_id) {
            PyErr_Format(PyExc_ValueError, "workspace: is on another device than %s", leader->name);
            return -1;
        }
        const bool bytes = room->dtype == H2O_U8 && room->ndim == 1 && room->stride[0] == 1;
        if (!bytes || (uintptr_t)room->data % 256 != 0) {
            PyErr_SetString(PyExc_ValueError,
                            "workspace: wanted bytes in a row, at a multiple of 256");
            return -1;
        }
        call->exec.workspace = room->data;
        call->offered = (size_t)room->shape[0];
    }
    if (e->stream == Py_None) return h2o_current_stream(loans, &call->exec.stream);
    call->exec.stream = PyLong_AsVoidPtr(e->stream);
    return PyErr_Occurred() != NULL ? -1 : 0;
}

/* execute_<op>: all that can fail comes before the kernel, which runs without the GIL. Returns a
 * status, or -1 with a Python exception. */
#define DEFINE_EXECUTE(op)                                                                         \
    static int execute_##op(h2o_##op##_params *params, const h2o_loans *loans, errand *e,          \
                            h2o_error *error) {                                                    \
        h2o_call call = {0};                                                                       \
        int status = equip(loans, e, &call);                                                       \
        if (status != H2O_OK) return status;                                                       \
        if (e->task == DO_MEASURE) {                                                               \
            status = h2o_measure_##op(params, &call, &e->bytes, error);                            \
        } else {                                                                                   \
            status = (e->task == DO_JUDGE ? h2o_judge_##op : h2o_open_##op)(params, &call, error); \
        }                                                                                          \
        if (status == H2O_OK && (e->task == DO_RUN || e->task == DO_LAUNCH)) {                     \
            Py_BEGIN_ALLOW_THREADS status = h2o_run_##op(params, &call, error);                    \
            Py_END_ALLOW_THREADS                                                                   \
        }                                                                                          \
        h2o_close(&call);                                                                          \
        return status;                                                                             \
    }

DEFINE_EXECUTE(attend)
DEFINE_EXECUTE(evict)
DEFINE_EXECUTE(step)
DEFINE_EXECUTE(simulate)

/* The end of every call. */
static PyObject *finish(h2o_loans *loans, int status, const errand *e, const h2o_error *error) {
    if (status > 0) {
        raise_error(error);
    }
    h2o_give_back(loans);
    if (status != 0) return NULL;
    const bool number = e->task == DO_MEASURE && e->bytes != H2O_UNSERVED;
    return number ? PyLong_FromSize_t(e->bytes) : Py_NewRef(Py_None);
}

PyDoc_STRVAR(attend_doc,
             "attend($module, query, keys, values, mask, slots, out, scores, scale, decay,\n"
             "       softcap, /)\n--\n\nSee h2o.ops.attend.");

static PyObject *call_attend(PyObject *module, PyObject *const *args, Py_ssize_t count, errand *e) {
    h2o_attend_params params;
    h2o_loans loans = {.count = 0};
    h2o_error error;
    if (require_count("attend", count, 10) < 0 ||
        (args[4] != Py_None && require_slots(args[4]) < 0) ||
        parse_float("scale", args[7], &params.scale) < 0 ||
        parse_float("decay", args[8], &params.decay) < 0 ||
        parse_float("softcap", args[9], &params.softcap) < 0) {
        return NULL;
    }
    h2o_loan(&loans, "query", args[0], &params.query);
    h2o_loan(&loans, "keys", args[1], &params.keys);
    h2o_loan(&loans, "values", args[2], &params.values);
    h2o_loan(&loans, "mask", args[3], &params.mask);
    h2o_loan(&loans, "out", args[5], &params.out);
    h2o_loan(&loans, "scores", args[6], &params.scores);
    params.has_slots = args[4] != Py_None;
    params.slots = (h2o_slots){0};
    if (params.has_slots) {
        loan_slots(&loans, args[4], false, &params.slots);
    }
    int status = borrow(module, &loans, e);
    if (status == 0) {
        status = execute_attend(&params, &loans, e, &error);
    }
    return finish(&loans, status, e, &error);
}

PyDoc_STRVAR(evict_doc, "evict($module, keys, values, scores, mask, slots, sinks, rank_by, decay,\n"
                        "      value_weighted, merge, /)\n--\n\nSee h2o.ops.evict.");

static PyObject *call_evict(PyObject *module, PyObject *const *args, Py_ssize_t count, errand *e) {
    h2o_evict_params params;
    h2o_loans loans = {.count = 0};
    h2o_error error;
    if (require_count("evict", count, 10) < 0 || require_slots(args[4]) < 0 ||
        parse_policy(args + 5, &params.policy) < 0 || parse_merge(args[9], &params.policy) < 0) {
        return NULL;
    }
    h2o_loan(&loans, "keys", args[0], &params.keys);
    h2o_loan(&loans, "values", args[1], &params.values);
    h2o_loan(&loans, "scores", args[2], &params.scores);
    h2o_loan(&loans, "mask", args[3], &params.mask);
    loan_slots(&loans, args[4], true, &params.slots);
    int status = borrow(module, &loans, e);
    if (status == 0) {
        status = execute_evict(&params, &loans, e, &error);
    }
    return finish(&loans, status, e, &error);
}

PyDoc_STRVAR(step_doc,
             "step($module, query, key, value, mask, slots, out, scale, softcap, sinks, rank_by,\n"
             "     decay, value_weighted, merge, table, ranks, /)\n--\n\nSee h2o.ops.step.");

static PyObject *call_step(PyObject *module, PyObject *const *args, Py_ssize_t count, errand *e) {
    h2o_step_params params = {.evictions = NULL};
    h2o_loans loans = {.count = 0};
    h2o_error error;
    if (require_count("step", count, 15) < 0 || require_slots(args[4]) < 0 ||
        parse_float("scale", args[6], &params.scale) < 0 ||
        parse_float("softcap", args[7], &params.softcap) < 0 ||
        parse_policy(args + 8, &params.policy) < 0 || parse_merge(args[12], &params.policy) < 0) {
        return NULL;
    }
    h2o_loan(&loans, "query", args[0], &params.query);
    h2o_loan(&loans, "key", args[1], &params.key);
    h2o_loan(&loans, "value", args[2], &params.value);
    h2o_loan(&loans, "mask", args[3], &params.mask);
    loan_slots(&loans, args[4], true, &params.slots);
    h2o_loan(&loans, "out", args[5], &params.out);
    h2o_loan(&loans, "rotary.table", args[13], &params.rotary.table);
    h2o_loan(&loans, "rotary.ranks", args[14], &params.rotary.ranks);
    int status = borrow(module, &loans, e);
    if (status == 0) {
        status = execute_step(&params, &loans, e, &error);
    }
    return finish(&loans, status, e, &error);
}

PyDoc_STRVAR(
    simulate_doc,
    "simulate($module, query, keys, values, mask, prompt, budget, out, evicted_at,\n"
    "         scores, scale, softcap, sinks, rank_by, decay, value_weighted, merge, stored_keys,\n"
    "         stored_values, /)\n--\n\n"
    "See h2o.ops.simulate.");

static PyObject *call_simulate(PyObject *module, PyObject *const *args, Py_ssize_t count,
                               errand *e) {
    h2o_simulate_params params;
    h2o_loans loans = {.count = 0};
    h2o_error error;
    if (require_count("simulate", count, 18) < 0 ||
        parse_float("scale", args[9], &params.scale) < 0 ||
        parse_float("softcap", args[10], &params.softcap) < 0 ||
        parse_policy(args + 11, &params.policy) < 0 || parse_merge(args[15], &params.policy) < 0) {
        return NULL;
    }
    h2o_loan(&loans, "query", args[0], &params.query);
    h2o_loan(&loans, "keys", args[1], &params.keys);
    h2o_loan(&loans, "values", args[2], &params.values);
    h2o_loan(&loans, "mask", args[3], &params.mask);
    h2o_loan(&loans, "prompt", args[4], &params.prompt);
    h2o_loan(&loans, "budget", args[5], &params.budget);
    h2o_loan(&loans, "out", args[6], &params.out);
    h2o_loan(&loans, "evicted_at", args[7], &params.evicted_at);
    h2o_loan(&loans, "scores", args[8], &params.scores);
    h2o_loan(&loans, "stored_keys", args[16], &params.stored_keys);
    h2o_loan(&loans, "stored_values", args[17], &params.stored_values);
    int status = borrow(module, &loans, e);
    if (status == 0) {
        status = execute_simulate(&params, &loans, e, &error);
    }
    return finish(&loans, status, e, &error);
}

/* Each operation; the same call judged only, for those that others carry out; and what it takes on
 * a CUDA device. Arguments follow those of the operation. */
PyDoc_STRVAR(check_doc, "Raises what the operation would raise, and does nothing else.");
PyDoc_STRVAR(
    measure_doc,
    "..., stream, /. Raises what the operation would raise; returns the bytes of workspace "
    "that the kernels of CUDA devices want for it, None if none of them serves it.");
PyDoc_STRVAR(launch_doc,
             "..., stream, workspace, /. Queues the operation on a stream of the tensors' CUDA "
             "device: its handle, or None for the one that their library queues work on.");

/* `more` arguments that an errand takes follow those of the operation. */
static bool require_more(const char *function, Py_ssize_t count, Py_ssize_t more) {
    if (count >= more) return true;
    require_count(function, count, more);
    return false;
}

#define DEFINE_CALLS(op)                                                                           \
    static PyObject *op(PyObject *module, PyObject *const *args, Py_ssize_t count) {               \
        errand e = {.task = DO_RUN};                                                               \
        return call_##op(module, args, count, &e);                                                 \
    }                                                                                              \
    static PyObject *check_##op(PyObject *module, PyObject *const *args, Py_ssize_t count) {       \
        errand e = {.task = DO_JUDGE};                                                             \
        return call_##op(module, args, count, &e);                                                 \
    }                                                                                              \
    static PyObject *measure_##op(PyObject *module, PyObject *const *args, Py_ssize_t count) {     \
        if (!require_more("measure_" #op, count, 1)) return NULL;                                  \
        errand e = {.task = DO_MEASURE, .stream = args[count - 1]};                                \
        return call_##op(module, args, count - 1, &e);                                             \
    }                                                                                              \
    static PyObject *launch_##op(PyObject *module, PyObject *const *args, Py_ssize_t count) {      \
        if (!require_more("launch_" #op, count, 2)) return NULL;                                   \
        errand e = {.task = DO_LAUNCH, .stream = args[count - 2], .workspace = args[count - 1]};   \
        return call_##op(module, args, count - 2, &e);                                             \
    }

DEFINE_CALLS(attend)
DEFINE_CALLS(evict)
DEFINE_CALLS(step)
DEFINE_CALLS(simulate)

/* ---- CUDA devices -------------------------------------------------------- */

PyDoc_STRVAR(
    cuda_devices_doc,
    "cuda_devices($module, /)\n--\n\n"
    "(version of the driver's CUDA, [(name, major, minor), ...]); RuntimeError where there "
    "is no driver.");

static PyObject *cuda_devices(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    int version, count, status;
    h2o_error error;
    Py_BEGIN_ALLOW_THREADS status = cuda_open(&version, &count, &error);
    Py_END_ALLOW_THREADS if (status != H2O_OK) {
        raise_error(&error);
        return NULL;
    }
    PyObject *devices = PyList_New(0);
    for (int i = 0; i < count && devices != NULL; i++) {
        cuda_device device;
        PyObject *entry = NULL;
        if (cuda_describe(i, &device, &error) != H2O_OK) {
            raise_error(&error);
        } else {
            entry = Py_BuildValue("sii", device.name, device.major, device.minor);
        }
        if (entry == NULL || PyList_Append(devices, entry) < 0) {
            Py_CLEAR(devices);
        }
        Py_XDECREF(entry);
    }
    return devices != NULL ? Py_BuildValue("iN", version, devices) : NULL;
}

PyDoc_STRVAR(cuda_load_doc, "cuda_load($module, image, device, /)\n--\n\n"
                            "Loads the kernels, a file of them in bytes, for a device. The first "
                            "image stands for all.");

static PyObject *cuda_load(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    char *image;
    Py_ssize_t size;
    int32_t device;
    int status;
    h2o_error error;
    if (require_count("cuda_load", count, 2) < 0 ||
        PyBytes_AsStringAndSize(args[0], &image, &size) < 0 ||
        parse_int32("device", args[1], &device) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS status = cuda_take_image(image, (size_t)size, &error);
    if (status == H2O_OK) status = h2o_cuda_load(device, &error);
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
    {"attend", FASTCALL(attend), attend_doc},
    {"evict", FASTCALL(evict), evict_doc},
    {"step", FASTCALL(step), step_doc},
    {"simulate", FASTCALL(simulate), simulate_doc},
    {"check_attend", FASTCALL(check_attend), check_doc},
    {"check_evict", FASTCALL(check_evict), check_doc},
    {"check_step", FASTCALL(check_step), check_doc},
    {"check_simulate", FASTCALL(check_simulate), check_doc},
    {"measure_attend", FASTCALL(measure_attend), measure_doc},
    {"measure_evict", FASTCALL(measure_evict), measure_doc},
    {"measure_step", FASTCALL(measure_step), measure_doc},
    {"measure_simulate", FASTCALL(measure_simulate), measure_doc},
    {"launch_attend", FASTCALL(launch_attend), launch_doc},
    {"launch_evict", FASTCALL(launch_evict), launch_doc},
    {"launch_step", FASTCALL(launch_step), launch_doc},
    {"launch_simulate", FASTCALL(launch_simulate), launch_doc},
    {"cuda_devices", cuda_devices, METH_NOARGS, cuda_devices_doc},
    {"cuda_load", FASTCALL(cuda_load), cuda_load_doc},
    {"info", info, METH_NOARGS, info_doc},
    {0},
};

static int execute_module(PyObject *module) {
    (void)module;
    h2o_error error;
    if (h2o_exchange_init() < 0) return -1;
    return h2o_init(&error) == H2O_OK ? 0 : raise_error(&error);
}

/* Of the sources on which kernels and core must agree, as the build has hashed them; a file of
 * kernels ends with the same word. */
static int add_word(PyObject *module) {
    return PyModule_AddStringConstant(module, "KERNELS", H2O_KERNELS);
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
    return h2o_exchange_traverse(PyModule_GetState(module), visit, arg);
}

static int clear(PyObject *module) {
    h2o_exchange_clear(PyModule_GetState(module));
    return 0;
}

static void free_module(void *module) { clear(module); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, add_word},
    {Py_mod_exec, execute_module}, /* in a second interpreter it fails: NumPy serves one */
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "h2o._core",
    .m_doc = "The C core of h2o. Use h2o.ops, which documents the operations.",
    .m_size = sizeof(h2o_exchange),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = traverse,
    .m_clear = clear,
    .m_free = free_module,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
