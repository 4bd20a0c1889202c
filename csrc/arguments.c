/* arguments.c - turns Python objects into the parameters of an operation: see arguments.h. */
#include "arguments.h"

#include <stdio.h>

/* ---- Numbers ----------------------------------------------------------- */

/* Replaces the exception of a failed conversion with one that names the argument. */
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

int h2o_parse_int32(const char *name, PyObject *object, int32_t *number) {
    const long long parsed = PyLong_AsLongLong(object);
    if (parsed == -1 && PyErr_Occurred()) {
        return refuse_scalar(name, "a 32-bit integer", object);
    }
    if (parsed < INT32_MIN || parsed > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%s: is %lld, wanted a 32-bit integer", name, parsed);
        return -1;
    }
    *number = (int32_t)parsed;
    return 0;
}

/* "a", "b" or "c" */
static void list_choices(const char *const *choices, char text[200]) {
    size_t used = 0;
    for (int i = 0; choices[i] != NULL && used < 200; i++) {
        const char *const joint = i == 0 ? "" : choices[i + 1] == NULL ? " or " : ", ";
        used += (size_t)snprintf(text + used, 200 - used, "%s\"%s\"", joint, choices[i]);
    }
}

static int parse_choice(const char *name, PyObject *object, const char *const *choices,
                        int *index) {
    const bool text = PyUnicode_Check(object);
    for (int i = 0; text && choices[i] != NULL; i++) {
        if (PyUnicode_CompareWithASCIIString(object, choices[i]) == 0) {
            *index = i;
            return 0;
        }
    }
    char wanted[200];
    list_choices(choices, wanted);
    PyErr_Format(text ? PyExc_ValueError : PyExc_TypeError, "%s: is %.100R, wanted %s", name,
                 object, wanted);
    return -1;
}

/* ---- Records ----------------------------------------------------------- */

static int parse_field(const h2o_policy_field *field, PyObject *object, h2o_policy *policy) {
    void *const at = (char *)policy + field->offset;
    int answer = 0;
    switch (field->kind) {
    case H2O_FIELD_INT32:
        return h2o_parse_int32(field->name, object, at);
    case H2O_FIELD_FLOAT:
        return parse_float(field->name, object, at);
    case H2O_FIELD_BOOL:
        if (!PyNumber_Check(object)) { /* "false" and None would have a truth value too */
            PyErr_Format(PyExc_TypeError, "%s: is %.100R, wanted True or False", field->name,
                         object);
            return -1;
        }
        answer = PyObject_IsTrue(object);
        *(bool *)at = answer > 0;
        return answer < 0 ? -1 : 0;
    case H2O_FIELD_CHOICE:
        if (parse_choice(field->name, object, field->choices, &answer) < 0) return -1;
        *(h2o_score_by *)at = (h2o_score_by)answer;
        return 0;
    }
    return -1;
}

static int require_record(const char *name, const char *type, PyObject *tuple, Py_ssize_t fields) {
    if (PyTuple_Check(tuple) && PyTuple_Size(tuple) == fields) return 0;
    PyErr_Format(PyExc_TypeError, "%s: is a %s, wanted %s", name, h2o_type_name(tuple).text, type);
    return -1;
}

static int parse_policy(PyObject *tuple, h2o_policy *policy) {
    if (require_record("policy", "h2o.ops.Policy", tuple, H2O_POLICY_COUNT) < 0) return -1;
    for (int i = 0; i < H2O_POLICY_COUNT; i++) {
        if (parse_field(&h2o_policy_fields[i], PyTuple_GetItem(tuple, i), policy) < 0) return -1;
    }
    return 0;
}

/* ---- Operands ---------------------------------------------------------- */

/* Notes the fields that the operation uses. The tuple keeps their tensors alive. */
static int parse_slots(const h2o_operand *operand, PyObject *object, void *params,
                       h2o_borrowed *borrowed) {
    h2o_slots *const slots = h2o_operand_at(params, operand);
    const bool optional = operand->flags & H2O_OPTIONAL;
    if (optional) *(bool *)((char *)params + operand->present) = object != Py_None;
    if (optional && object == Py_None) return 0;
    if (require_record("slots", "h2o.ops.Slots", object, H2O_SLOTS_COUNT) < 0) return -1;
    for (int i = 0; i < H2O_SLOTS_COUNT; i++) {
        const h2o_operand *const field = &h2o_slots_fields[i];
        if (operand->flags & H2O_ATTENDED & ~field->flags) continue;
        h2o_note(borrowed, field->name, PyTuple_GetItem(object, i), h2o_operand_at(slots, field));
    }
    return 0;
}

int h2o_parse_operands(const h2o_operation_row *row, PyObject *const *operands, void *params,
                       h2o_borrowed *borrowed) {
    int status = 0;
    for (int i = 0; i < row->operand_count && status == 0; i++) {
        const h2o_operand *const operand = &row->operands[i];
        void *const at = h2o_operand_at(params, operand);
        switch (operand->kind) {
        case H2O_OPERAND_TENSOR:
            h2o_note(borrowed, operand->name, operands[i], at);
            break;
        case H2O_OPERAND_SLOTS:
            status = parse_slots(operand, operands[i], params, borrowed);
            break;
        case H2O_OPERAND_POLICY:
            status = parse_policy(operands[i], at);
            break;
        case H2O_OPERAND_FLOAT:
            status = parse_float(operand->name, operands[i], at);
            break;
        }
    }
    return status;
}
