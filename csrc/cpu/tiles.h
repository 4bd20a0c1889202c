/* tiles.h - the registers of AMX, a matrix unit of Intel processors: eight tiles of up to 16 rows
 * of 64 bytes. (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1,
 * chapter 18.)
 *
 * Compilers do not treat loads and stores of tiles as memory accesses. So call settle_memory
 * between writing memory and loading a tile from it, and between storing a tile and reading what
 * it stored. */
#ifndef H2O_TILES_H
#define H2O_TILES_H

#include "vec.h"

enum { TILES_COUNT = 8 };

VEC void settle_memory(void) { __asm__ volatile("" ::: "memory"); }

/* Opens the unit until tiles_close: tile i has rows[i] rows of bytes[i] bytes each. */
VEC void tiles_open(const uint8_t rows[TILES_COUNT], const uint8_t bytes[TILES_COUNT]) {
    struct __attribute__((packed)) {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16]; /* of a row */
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < TILES_COUNT; i++) {
        shape.bytes[i] = bytes[i];
        shape.rows[i] = rows[i];
    }
    __asm__ volatile("" ::"m"(shape)
                     : "memory"); /* all of shape: GCC thinks that the next line reads 8 bytes */
    _tile_loadconfig(&shape);
}

VEC void tiles_close(void) {
    _tile_release();
    settle_memory();
}

#endif
