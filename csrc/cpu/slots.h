/* slots.h - writes to a layer's slots that several operations share: key and value [D] of a new
 * token, the next free slot (next_slot [B,G]) and the number of tokens seen by each row
 * (seen_tokens [B]). */
#ifndef H2O_SLOTS_H
#define H2O_SLOTS_H

#include "../policy.h"
#include "../store.h"
#include "stored_rows.h"

/* The store of head g of a row. */
static inline slot_store open_head(const h2o_slots *slots, const h2o_head *head, int64_t g,
                                   int64_t D) {
    slot_store store = open_store(slots, head, D);
    store.change.offset = f16_row(&slots->offsets, head->row, g);
    store.change.smoothing = f16_row(&slots->smoothing, head->row, g);
    return store;
}

/* Writes a key and a value to a slot of a store whose rows are transformed. */
static inline void store_transformed(const slot_store *store, int64_t slot, row_ref key,
                                     row_ref value, int64_t D) {
    _Alignas(64) float x[H2O_MOST_TRANSFORMED];
    load_changed_key(key, store->change, D, x);
    store_row(slot_row(&store->keys, slot), store->keys.type, float_row(x), D);
    load_row(value, D, x);
    hadamard(x, D);
    store_row(slot_row(&store->values, slot), store->values.type, float_row(x), D);
}

/* Writes the key and value of the new token at index `column` of axis Q to a slot. */
static inline void store_token(const slot_store *store, int64_t slot, const h2o_view *keys,
                               const h2o_view *values, int64_t b, int64_t g, int64_t column,
                               int64_t D) {
    const row_ref key = tensor_row(keys, b, g, column), value = tensor_row(values, b, g, column);
    if (store_is_transformed(store)) {
        store_transformed(store, slot, key, value, D);
        return;
    }
    store_row(slot_row(&store->keys, slot), store->keys.type, key, D);
    if (store_is_shared(store)) return;
    store_row(slot_row(&store->values, slot), store->values.type, value, D);
}

/* Atomic, like advance_seen_tokens: a call in another thread may be reading both. */
static inline void set_free(const h2o_slots *slots, int64_t row, int64_t g, int64_t slot) {
    __atomic_store_n((int32_t *)h2o_at(&slots->next_slot, row, g, 0), (int32_t)slot,
                     __ATOMIC_RELAXED);
}

/* Call only when all heads of a row are done, since all of them read its old length. */
static inline void advance_seen_tokens(const h2o_slots *slots, const h2o_counts *counts,
                                       const h2o_dims *dims) {
    for (int64_t b = 0; b < dims->B; b++) {
        const h2o_row *const row = &counts->rows[b];
        int64_t *const length = h2o_at(&slots->seen_tokens, counts->heads[b * dims->G].row, 0, 0);
        __atomic_store_n(length, row->length + row->tokens, __ATOMIC_RELAXED);
    }
}

static inline void add_evicted_score(const h2o_slots *slots, int64_t row, int64_t g, double lost) {
    *(double *)h2o_at(&slots->evicted_score, row, g, 0) += lost;
}

#endif
