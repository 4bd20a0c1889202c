/* types.h - the element types of tensors and the row types of stores, one row of traits each.
 *
 * Two lists as X macros. Everything else here is generated from them, and so is whatever exists
 * once per type elsewhere: instances of kernels, and the tables from which they are chosen. The
 * lists are macros because device code cannot read tables of the host. (ggml's type_traits, with
 * blck_size and type_size, follow the same idea.)
 *
 * To add a row type, add a line to each list here, the code that host and devices share in
 * quantize.h, and the code that reads and writes rows in cpu/stored_rows.h and for each device. */
#ifndef H2O_TYPES_H
#define H2O_TYPES_H

#include <stdbool.h>
#include <stdint.h>

#include "target.h"

/* X(name, name in messages, bytes of an element) */
#define H2O_DTYPES(X)                                                                              \
    X(NONE, "none", 0) /* the optional argument was not given */                                   \
    X(F32, "float32", 4)                                                                           \
    X(F16, "float16", 2)                                                                           \
    X(BF16, "bfloat16", 2)                                                                         \
    X(F64, "float64", 8)                                                                           \
    X(I32, "int32", 4)                                                                             \
    X(I64, "int64", 8)                                                                             \
    X(U8, "bool or uint8", 1) /* masks, where 0 is padding; rows of a quantized store */           \
    X(Q8, "int8", 1)          /* not a tensor's dtype: rows of D elements in bytes, ... */         \
    X(S4, "int4", 1)          /* ... see quantize.h */                                             \
    X(Q4, "int4", 1)

/* X(name, elements of a group, bytes of a group, bytes of the row's scale)
 *
 * A row consists of whole groups. The bytes of a group include its own scale and minimum, if any,
 * even if these lie behind all elements of the row. The scale of a whole row is an f16 in its last
 * 2 bytes, and a dot product may be multiplied by it at the end. All rows of keys that are
 * quantized have one. */
#define H2O_FLOAT_ROWS(X) X(F32, 1, 4, 0) X(F16, 1, 2, 0) X(BF16, 1, 2, 0)
#define H2O_Q8_ROWS(X) X(Q8, 1, 1, 2)
#define H2O_S4_ROWS(X) X(S4, H2O_GROUP, H2O_GROUP / 2, 2)
#define H2O_Q4_ROWS(X) X(Q4, H2O_GROUP, H2O_GROUP / 2 + 4, 0)
#define H2O_QUANTIZED_KEYS(X) H2O_Q8_ROWS(X) H2O_S4_ROWS(X)
#define H2O_QUANTIZED_VALUES(X) H2O_Q8_ROWS(X) H2O_Q4_ROWS(X)
#define H2O_QUANTIZED_ROWS(X) H2O_QUANTIZED_KEYS(X) H2O_Q4_ROWS(X)
#define H2O_KEY_ROWS(X) H2O_FLOAT_ROWS(X) H2O_QUANTIZED_KEYS(X)
#define H2O_VALUE_ROWS(X) H2O_FLOAT_ROWS(X) H2O_QUANTIZED_VALUES(X)
#define H2O_ROWS(X) H2O_FLOAT_ROWS(X) H2O_QUANTIZED_ROWS(X)

enum {
    H2O_GROUP = 32,             /* elements of a Q4 row that share a scale and a minimum */
    H2O_MOST_TRANSFORMED = 1024 /* elements of a row that is transformed: quantize.h */
};

/* H2O_NONE, H2O_F32, ... */
#define H2O_NAME(name, text, size) H2O_##name,
typedef enum { H2O_DTYPES(H2O_NAME) } h2o_dtype;
#undef H2O_NAME

/* Bytes of an element. The sizes are digits of a hexadecimal constant, not a table of the host. */
H2O_INLINE int64_t h2o_dtype_size(h2o_dtype dtype) {
#define H2O_DIGIT(name, text, size) | (uint64_t)(size) << 4 * H2O_##name
    const uint64_t sizes = 0 H2O_DTYPES(H2O_DIGIT);
#undef H2O_DIGIT
    return (int64_t)(sizes >> 4 * dtype & 15);
}

H2O_INLINE const char *h2o_dtype_name(h2o_dtype dtype) {
#define H2O_TEXT(name, text, size)                                                                 \
    case H2O_##name:                                                                               \
        return text;
    switch (dtype) { H2O_DTYPES(H2O_TEXT) }
#undef H2O_TEXT
    return "unknown";
}

/* Bytes of a stored row of D elements; 0 if no such row exists. */
H2O_INLINE int64_t h2o_row_bytes(h2o_dtype stored, int64_t D) {
#define H2O_BYTES(name, group, bytes, scale)                                                       \
    case H2O_##name:                                                                               \
        return D % (group) ? 0 : D / (group) * (bytes) + (scale);
    switch (stored) {
        H2O_ROWS(H2O_BYTES)
    default:
        return D * h2o_dtype_size(stored);
    }
#undef H2O_BYTES
}

/* Whether a row ends with a scale for all of its elements. */
H2O_INLINE bool h2o_row_has_scale(h2o_dtype stored) {
#define H2O_SCALE(name, group, bytes, scale) || ((scale) > 0 && stored == H2O_##name)
    return false H2O_ROWS(H2O_SCALE);
#undef H2O_SCALE
}

/* Whether the elements of a row are in groups of more than one: fewer than 8 bits each. */
H2O_INLINE bool h2o_row_is_grouped(h2o_dtype stored) {
#define H2O_GROUPED(name, group, bytes, scale) || ((group) > 1 && stored == H2O_##name)
    return false H2O_ROWS(H2O_GROUPED);
#undef H2O_GROUPED
}

H2O_INLINE bool h2o_row_is_quantized(h2o_dtype stored) {
#define H2O_IS(name, ...) || stored == H2O_##name
    return false H2O_QUANTIZED_ROWS(H2O_IS);
}

/* Whether a type is one of quantized keys, one of those in four bits, and one of quantized values. */
H2O_INLINE bool h2o_row_quantizes_keys(h2o_dtype stored) {
    return false H2O_QUANTIZED_KEYS(H2O_IS);
}

H2O_INLINE bool h2o_row_is_four_bit_key(h2o_dtype stored) { return false H2O_S4_ROWS(H2O_IS); }

H2O_INLINE bool h2o_row_quantizes_values(h2o_dtype stored) {
    return false H2O_QUANTIZED_VALUES(H2O_IS);
#undef H2O_IS
}

/* The quantized type whose rows of D elements have this many bytes, or H2O_NONE. */
H2O_INLINE h2o_dtype h2o_row_type(int64_t bytes, int64_t D) {
#define H2O_HAS(name, ...)                                                                         \
    if (bytes == h2o_row_bytes(H2O_##name, D)) return H2O_##name;
    H2O_QUANTIZED_ROWS(H2O_HAS)
#undef H2O_HAS
    return H2O_NONE;
}

#endif
