/* matrix.cpp - matrix operations of a warp, emulated: ldmatrix of four 8 x 8 matrices of 16 bits,
 * with and without transposition, and mma.m16n8k16 and m16n8k8 (PTX ISA, "ldmatrix" and "Matrix
 * fragments for mma.m16n8k16", "... mma.m16n8k8").
 *
 * words[lane] points to the operands of a lane (shim.h). Results go to each lane's registers, with
 * elements distributed over lanes as PTX defines. */
#include "shim.h"

enum { WARP = 32 };

static uint16_t half_of(const uint32_t *words, int i) {
    return (uint16_t)(words[i / 2] >> 16 * (i % 2));
}

void shim_load_matrices(const uint64_t words[WARP], bool transposed) {
    const auto row = [&](int matrix, int i) {
        return ((const shim_rows *)(uintptr_t)words[8 * matrix + i])->row;
    };
    for (int lane = 0; lane < WARP; lane++) {
        uint32_t *const to = ((const shim_rows *)(uintptr_t)words[lane])->to;
        const int i = lane / 4, j = 2 * (lane % 4);
        for (int m = 0; m < 4; m++) {
            const uint16_t low = transposed ? half_of(row(m, j), i) : half_of(row(m, i), j);
            const uint16_t high =
                transposed ? half_of(row(m, j + 1), i) : half_of(row(m, i), j + 1);
            to[m] = low | (uint32_t)high << 16;
        }
    }
}

/* c += a b, of depth 16 or 8. Of a's four registers the second and the fourth hold rows that are 8
 * further down. The last two, and the second of b, hold elements that are 8 further along the
 * depth; they do not exist for depth 8. */
void shim_multiply(const uint64_t words[WARP], int depth) {
    typedef float row_of_8 __attribute__((vector_size(32)));
    float a[16][16];
    row_of_8 b[16], c[16];
    for (int lane = 0; lane < WARP; lane++) {
        const shim_product *const p = (const shim_product *)(uintptr_t)words[lane];
        const int i = lane / 4, j = 2 * (lane % 4);
        for (int e = 0; e < depth / 2; e++) {
            a[i + e / 2 % 2 * 8][j + e % 2 + e / 4 * 8] = p->widen(half_of(p->a, e));
        }
        for (int e = 0; e < depth / 4; e++) b[j + e % 2 + e / 2 * 8][i] = p->widen(half_of(p->b, e));
        for (int e = 0; e < 4; e++) c[i + e / 2 * 8][j + e % 2] = p->c[e];
    }
    for (int i = 0; i < 16; i++) {
        row_of_8 sum = c[i];
        for (int k = 0; k < depth; k++) sum += a[i][k] * b[k];
        c[i] = sum;
    }
    for (int lane = 0; lane < WARP; lane++) {
        float *const to = ((const shim_product *)(uintptr_t)words[lane])->c;
        const int i = lane / 4, j = 2 * (lane % 4);
        for (int e = 0; e < 4; e++) to[e] = c[i + e / 2 * 8][j + e % 2];
    }
}
