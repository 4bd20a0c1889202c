/* amx.h - AMX in software: the instructions of AMX-TILE, AMX-BF16 and AMX-INT8 that the kernels
 * use, for tests of their levels on processors without a matrix unit. The compiler's command line
 * includes this file (make test-amx). Whatever a processor would raise as a fault aborts. (Intel 64
 * and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18, and volume 2.) */
#ifndef H2O_TEST_AMX_H
#define H2O_TEST_AMX_H

#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { AMX_TILES = 8, AMX_ROWS = 16, AMX_BYTES = 64 };

typedef struct {
    int rows, bytes; /* of a row */
    _Alignas(64) uint8_t data[AMX_ROWS][AMX_BYTES];
} amx_tile;

/* Each thread has its own. Every object file gets one, but only those of files with kernels are
 * used. */
static _Thread_local struct {
    int is_configured;
    amx_tile tile[AMX_TILES];
} amx;

#define AMX_CHECK(condition)                                                                       \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s: an AMX instruction faults: %s\n", __func__, #condition);          \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static inline void amx_load_config(const void *config) {
    const uint8_t *const bytes = config;
    AMX_CHECK(bytes[0] == 1 && bytes[1] == 0);
    for (int i = 0; i < AMX_TILES; i++) {
        uint16_t width;
        memcpy(&width, bytes + 16 + 2 * i, sizeof width);
        AMX_CHECK(width <= AMX_BYTES && bytes[48 + i] <= AMX_ROWS);
        AMX_CHECK((width == 0) == (bytes[48 + i] == 0));
        memset(&amx.tile[i], 0, sizeof amx.tile[i]);
        amx.tile[i].rows = bytes[48 + i];
        amx.tile[i].bytes = width;
    }
    amx.is_configured = 1;
}

static inline void amx_release(void) { amx.is_configured = 0; }

static inline amx_tile *amx_use(int number) {
    amx_tile *const tile = &amx.tile[number];
    AMX_CHECK(amx.is_configured && tile->rows > 0);
    return tile;
}

static inline void amx_zero(int number) {
    amx_tile *const tile = amx_use(number);
    memset(tile->data, 0, sizeof tile->data);
}

static inline void amx_load(int number, const void *base, int64_t stride) {
    amx_tile *const tile = amx_use(number);
    for (int m = 0; m < tile->rows; m++) {
        memcpy(tile->data[m], (const uint8_t *)base + m * stride, (size_t)tile->bytes);
    }
}

static inline void amx_store(int number, void *base, int64_t stride) {
    const amx_tile *const tile = amx_use(number);
    for (int m = 0; m < tile->rows; m++) {
        memcpy((uint8_t *)base + m * stride, tile->data[m], (size_t)tile->bytes);
    }
}

/* Checks that the shapes of the three tiles of a product agree. */
static inline void amx_check_shapes(const amx_tile *c, const amx_tile *a, const amx_tile *b) {
    AMX_CHECK(c != a && a != b && b != c);
    AMX_CHECK(c->rows == a->rows && c->bytes == b->bytes);
    AMX_CHECK(a->bytes == 4 * b->rows && c->bytes % 4 == 0);
}

static inline void amx_dot_bytes(int to, int left, int right, int left_is_signed) {
    amx_tile *const c = amx_use(to), *const a = amx_use(left), *const b = amx_use(right);
    amx_check_shapes(c, a, b);
    for (int m = 0; m < c->rows; m++) {
        uint32_t sum[AMX_BYTES / 4]; /* wraps around */
        memcpy(sum, c->data[m], sizeof sum);
        for (int k = 0; k < b->rows; k++) {
            for (int n = 0; n < c->bytes / 4; n++) {
                for (int i = 0; i < 4; i++) {
                    const uint8_t byte = a->data[m][4 * k + i];
                    const int left_byte = left_is_signed ? (int8_t)byte : byte;
                    sum[n] += (uint32_t)(left_byte * (int8_t)b->data[k][4 * n + i]);
                }
            }
        }
        memcpy(c->data[m], sum, (size_t)c->bytes);
    }
}

static inline float amx_bf16(const uint8_t *bytes) {
    uint16_t half;
    memcpy(&half, bytes, sizeof half);
    const uint32_t word = (uint32_t)half << 16;
    float x;
    memcpy(&x, &word, sizeof x);
    return x;
}

/* Subnormal numbers, which the unit treats as 0, are not treated specially. */
static inline void amx_dot_bf16(int to, int left, int right) {
    amx_tile *const c = amx_use(to), *const a = amx_use(left), *const b = amx_use(right);
    amx_check_shapes(c, a, b);
    /* Zeros, since columns that do not exist are computed, too. */
    float pairs[2][AMX_ROWS][AMX_BYTES / 4] = {{{0}}};
    for (int k = 0; k < b->rows; k++) {
        for (int n = 0; n < c->bytes / 4; n++) {
            pairs[0][k][n] = amx_bf16(b->data[k] + 4 * n);
            pairs[1][k][n] = amx_bf16(b->data[k] + 4 * n + 2);
        }
    }
    for (int m = 0; m < c->rows; m++) {
        float sum[2][AMX_BYTES / 4] = {{0}}, old[AMX_BYTES / 4];
        for (int k = 0; k < b->rows; k++) {
            const float x = amx_bf16(a->data[m] + 4 * k), y = amx_bf16(a->data[m] + 4 * k + 2);
            for (int n = 0; n < AMX_BYTES / 4; n++) {
                sum[0][n] += x * pairs[0][k][n];
                sum[1][n] += y * pairs[1][k][n];
            }
        }
        memcpy(old, c->data[m], sizeof old);
        for (int n = 0; n < c->bytes / 4; n++) old[n] += sum[0][n] + sum[1][n];
        memcpy(c->data[m], old, (size_t)c->bytes);
    }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbusd
#define _tile_loadconfig amx_load_config
#define _tile_release amx_release
#define _tile_zero amx_zero
#define _tile_loadd amx_load
#define _tile_stored amx_store
#define _tile_dpbf16ps amx_dot_bf16
#define _tile_dpbssd(to, left, right) amx_dot_bytes(to, left, right, 1)
#define _tile_dpbusd(to, left, right) amx_dot_bytes(to, left, right, 0)
#endif
#endif
