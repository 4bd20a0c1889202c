/* fuzz.h - shared by the fuzz targets: choices from the input, and memory of exactly the size that
 * a tensor claims, so that AddressSanitizer detects one byte too many. */
#ifndef H2O_FUZZ_H
#define H2O_FUZZ_H

#include "cpu/tasks.h"

#include "test.h"

#include <math.h>

/* ---- Choices ----------------------------------------------------------- */

typedef struct {
    const uint8_t *data;
    size_t left;
} input;

/* A number in 0..n-1; 0 when the input has ended, so 0 should be the plain choice. */
static inline int64_t choose(input *in, int64_t n) {
    if (in->left == 0) return 0;
    in->left--;
    return *in->data++ % n;
}

static inline bool rarely(input *in) { return choose(in, 16) == 15; }

/* ---- Tensors ----------------------------------------------------------- */

enum { MOST_BYTES = 1 << 18 };

/* Bytes before and after the first element that shape and strides reach. Returns false if they are
 * more than a fuzzer should allocate. */
static inline bool find_reach(const int64_t *shape, const int64_t *stride, int ndim, int64_t size,
                              int64_t *below, int64_t *above) {
    *below = 0, *above = size;
    for (int i = 0; i < ndim; i++) {
        int64_t reach;
        if (shape[i] < 1) {
            *below = *above = 0; /* has no element */
            return true;
        }
        if (__builtin_mul_overflow(shape[i] - 1, stride[i], &reach) ||
            __builtin_mul_overflow(reach, size, &reach) || reach > MOST_BYTES ||
            reach < -MOST_BYTES) {
            return false;
        }
        *(reach < 0 ? below : above) += reach;
    }
    return true;
}

/* Numbers of all kinds: with how == 1 random bytes, which include NaN, infinities and denormals,
 * otherwise small numbers. */
static inline void fill_bytes(uint8_t *memory, int64_t bytes, h2o_dtype dtype, int64_t how) {
    test_random random = {.state = (uint64_t)how};
    for (int64_t i = 0; i < bytes; i++) {
        memory[i] = how == 1 ? (uint8_t)random_bits(&random) : 0;
    }
    for (int64_t i = 0; i < bytes / 4 && dtype == H2O_F32 && how != 1; i++) {
        const float x = random_float(&random) - 0.5f;
        memcpy(memory + 4 * i, &x, sizeof x);
    }
    for (int64_t i = 0; i < bytes / 2 && (dtype == H2O_F16 || dtype == H2O_BF16) && how != 1; i++) {
        const uint16_t x =
            (uint16_t)(0x3000 + (random_bits(&random) & 0x8fff)); /* float16 from 0.125 to 2 */
        memcpy(memory + 2 * i, &x, sizeof x);
    }
}

/* ---- Running ----------------------------------------------------------- */

/* Runs all workers on one thread, in turn. Each gets tasks, and a run is reproducible. */
static inline void in_turns(int workers, h2o_worker_fn function, void *context) {
    task_list *const list = context;
    (void)function;
    for (int64_t index = 0; index < list->count; index++) {
        list->task(list->context, index, (int)(index % workers));
    }
}

#endif
