/* roofline.c - loops that measure the highest rates of this processor. The benchmarks run them in
 * turn with the kernels, on the same threads.
 *
 * Built by machine.py with the user's compiler for this machine. Each loop has the signature that
 * torch_parallel_for calls, and does the work of threads begin..end-1. */
#include <stdint.h>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { WIDTH = 64 };
#elif defined(__AVX__)
enum { WIDTH = 32 };
#else
enum { WIDTH = 16 };
#endif

typedef float floats __attribute__((vector_size(WIDTH), may_alias));
typedef uint64_t words __attribute__((vector_size(WIDTH), may_alias, aligned(8)));

/* Enough independent chains to hide the latency of a multiply-add (4 to 6 cycles) on two pipes, and
 * few enough to stay in registers. */
#if defined(__AVX512F__)
enum { CHAINS = 16 };
#else
enum { CHAINS = 10 };
#endif

/* Keeps a vector alive, and its value unknown to the optimizer. */
#if defined(__aarch64__)
#define OPAQUE(x) __asm__ volatile("" : "+w"(x))
#else
#define OPAQUE(x) __asm__ volatile("" : "+x"(x))
#endif

#define EXPORT __attribute__((visibility("default")))

/* Floating-point operations in one iteration of each loop. */
EXPORT const int64_t fma_f32_flops = 2 * CHAINS * (WIDTH / 4);
EXPORT void fma_f32(int64_t begin, int64_t end, void *context)
{
    const int64_t turns = *(const int64_t *)context;
    for (int64_t t = begin; t < end; t++) {
        floats sum[CHAINS] = {{0}}, a = {0}, b = {0};
        a += 0.001f;
        b += 0.001f;
        OPAQUE(a);
        OPAQUE(b);
        for (int64_t i = 0; i < turns; i++) {
            for (int c = 0; c < CHAINS; c++) {
                sum[c] += a * b;
                OPAQUE(sum[c]);
            }
        }
    }
}

/* Products of bf16 pairs, summed in fp32. A processor without such an instruction converts to fp32
 * first, so its peak is that of fp32. An instruction of the matrix unit computes 16 x 16 sums of 16
 * pairs. machine.py enables it if the system lets programs use it. */
#if defined(__AMX_BF16__)
EXPORT const int64_t fma_bf16_flops = 2 * 4 * 16 * 16 * 32;
EXPORT void fma_bf16(int64_t begin, int64_t end, void *context)
{
    const int64_t turns = *(const int64_t *)context;
    const struct __attribute__((packed)) {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    for (int64_t t = begin; t < end; t++) {
        __asm__ volatile("" ::"m"(shape)); /* GCC believes that the next line reads only 8 bytes */
        _tile_loadconfig(&shape);
        for (int64_t i = 0; i < turns; i++) {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_release();
    }
}
#elif defined(__AVX512BF16__)
EXPORT const int64_t fma_bf16_flops = 2 * CHAINS * 32;
EXPORT void fma_bf16(int64_t begin, int64_t end, void *context)
{
    const int64_t turns = *(const int64_t *)context;
    for (int64_t t = begin; t < end; t++) {
        __m512 sum[CHAINS];
        __m512i a = _mm512_set1_epi16(0x3a83), b = a; /* 0.001 in bf16 */
        for (int c = 0; c < CHAINS; c++)
            sum[c] = _mm512_setzero_ps();
        OPAQUE(a);
        OPAQUE(b);
        for (int64_t i = 0; i < turns; i++) {
            for (int c = 0; c < CHAINS; c++) {
                sum[c] = _mm512_dpbf16_ps(sum[c], (__m512bh)a, (__m512bh)b);
                OPAQUE(sum[c]);
            }
        }
    }
}
#else
EXPORT const int64_t fma_bf16_flops = 2 * CHAINS * (WIDTH / 4);
EXPORT void fma_bf16(int64_t begin, int64_t end, void *context) { fma_f32(begin, end, context); }
#endif

typedef struct {
    const void *const *blocks; /* [count] */
    int64_t count;
    int64_t bytes;   /* bytes of each block */
    int64_t threads; /* each reads bytes / threads of every block, rounded down to 256 */
} read_work;

EXPORT void read_blocks(int64_t begin, int64_t end, void *context)
{
    const read_work *work = context;
    const int64_t part = work->bytes / work->threads / 256 * 256;
    for (int64_t t = begin; t < end; t++) {
        words sum[4] = {{0}};
        for (int64_t k = 0; k < work->count; k++) {
            const char *from = (const char *)work->blocks[k] + t * part;
            for (int64_t i = 0; i < part; i += 4 * WIDTH)
                for (int c = 0; c < 4; c++)
                    sum[c] += *(const words *)(from + i + c * WIDTH);
        }
        for (int c = 0; c < 4; c++)
            OPAQUE(sum[c]);
    }
}
