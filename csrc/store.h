/* store.h - the slots of one key/value head of one row: addresses, strides and types of its S rows
 * of keys and values [D], and its scores, norms and positions [S]. Also single rows. */
#ifndef H2O_STORE_H
#define H2O_STORE_H

#include "h2o.h"

/* A token's key, value or query [D], in a tensor or in a store. */
typedef struct {
    const char *data; /* element 0 */
    h2o_dtype type;   /* of an element of a tensor, or of a row of a store */
    int64_t stride;   /* elements from one element to the next; 1 if quantized */
} row_ref;

H2O_INLINE row_ref no_row(void) {
    const row_ref none = {NULL, H2O_NONE, 1};
    return none;
}

/* Row [a, b, c] of a tensor [.., .., .., D]. */
H2O_INLINE row_ref tensor_row(const h2o_view *view, int64_t a, int64_t b, int64_t c) {
    const row_ref row = {(const char *)h2o_at(view, a, b, c), view->dtype, view->stride[3]};
    return row;
}

/* Keys or values: S rows of D elements. */
typedef struct {
    char *data;
    int64_t stride; /* bytes from one row to the next */
    h2o_dtype type; /* one of H2O_ROWS */
} slot_rows;

H2O_INLINE char *slot_row(const slot_rows *rows, int64_t slot) {
    return rows->data + slot * rows->stride;
}

/* How the quantized keys [D] of a head differ from the model's: see quantize.h. */
typedef struct {
    row_ref offset;    /* no_row: the keys are the model's own */
    row_ref smoothing; /* no_row: they are not divided by anything */
} key_change;

/* The store of one key/value head of one row. */
typedef struct {
    slot_rows keys, values;
    float *scores, *norms; /* [S]; norms may be NULL */
    int32_t *positions;    /* [S] */
    key_change change;
} slot_store;

/* Whether keys have lost their offset and keys and values are transformed: see quantize.h. */
H2O_INLINE bool store_is_transformed(const slot_store *store) {
    return store->change.offset.data != NULL;
}

/* Whether the keys serve as values. */
H2O_INLINE bool store_is_shared(const slot_store *store) {
    return store->values.data == store->keys.data;
}

H2O_INLINE slot_rows open_slot_rows(const h2o_view *view, const h2o_head *head, int64_t D) {
    const slot_rows rows = {
        .data = (char *)h2o_at(view, head->row, head->offset, 0),
        .stride = view->stride[view->ndim - 2] * h2o_dtype_size(view->dtype),
        .type = h2o_stored_type(view, D),
    };
    return rows;
}

/* Row [a, b] of offsets or smoothing [.., .., D]; no_row if none are given. */
H2O_INLINE row_ref f16_row(const h2o_view *view, int64_t a, int64_t b) {
    if (!h2o_given(view)) return no_row();
    const row_ref row = {(const char *)h2o_at(view, a, b, 0), H2O_F16, 1};
    return row;
}

/* The store of a head whose keys are the model's own. */
H2O_INLINE slot_store open_store(const h2o_slots *slots, const h2o_head *head, int64_t D) {
    const int64_t row = head->row;
    const bool norms = h2o_given(&slots->norms);
    const slot_store store = {
        .keys = open_slot_rows(&slots->keys, head, D),
        .values = open_slot_rows(&slots->values, head, D),
        .scores = (float *)h2o_at(&slots->scores, row, head->offset, 0),
        .norms = norms ? (float *)h2o_at(&slots->norms, row, head->offset, 0) : NULL,
        .positions = (int32_t *)h2o_at(&slots->positions, row, head->offset, 0),
    };
    return store;
}

#endif
