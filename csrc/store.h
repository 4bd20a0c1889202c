/* store.h - the slots of one key/value head of one row: addresses, strides and types of its S rows
 * of keys and values [D], and of its scores, norms and positions [S]. */
#ifndef H2O_STORE_H
#define H2O_STORE_H

#include "h2o.h"

/* The store of one key/value head of one row. */
typedef struct {
    char *keys, *values;              /* [S] rows of D elements, ... */
    int64_t key_stride, value_stride; /* ... so many bytes apart */
    h2o_dtype key_type, value_type;   /* of H2O_ROWS */
    float *scores, *norms;            /* [S]; norms may be NULL */
    int32_t *positions;               /* [S] */
    int64_t slots;                    /* S */
} slot_store;

/* Whether the rows of keys are those of the values too. */
H2O_INLINE bool store_is_shared(const slot_store *store) { return store->values == store->keys; }

H2O_INLINE int64_t row_pitch(const h2o_view *view) {
    return view->stride[view->ndim - 2] * h2o_dtype_size(view->dtype);
}

H2O_INLINE slot_store open_store(const h2o_slots *slots, const h2o_head *head, int64_t D) {
    const int64_t row = head->row;
    const bool norms = h2o_given(&slots->norms);
    const slot_store store = {
        .keys = (char *)h2o_at(&slots->keys, row, head->offset, 0),
        .values = (char *)h2o_at(&slots->values, row, head->offset, 0),
        .key_stride = row_pitch(&slots->keys),
        .value_stride = row_pitch(&slots->values),
        .key_type = h2o_stored_type(&slots->keys, D),
        .value_type = h2o_stored_type(&slots->values, D),
        .scores = (float *)h2o_at(&slots->scores, row, head->offset, 0),
        .norms = norms ? (float *)h2o_at(&slots->norms, row, head->offset, 0) : NULL,
        .positions = (int32_t *)h2o_at(&slots->positions, row, head->offset, 0),
        .slots = head->slots,
    };
    return store;
}

#endif
