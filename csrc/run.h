/* run.h - execution of operations: workers, workspace, the table of kernels of each instruction set
 * level and device (h2o_ops), and the stages of a call (h2o_open, h2o_run, h2o_close). */
#ifndef H2O_RUN_H
#define H2O_RUN_H

#include "operations.h"
#include "system.h"

/* ---- Backends ---------------------------------------------------------- */

/* What a kernel runs with. Results must not depend on workers: work is cut into
 * items that the shapes alone determine, each item has private sums, and these
 * are added in a fixed order. */
typedef void (*h2o_worker_fn)(int worker, int workers, void *context);

typedef struct {
    int workers;                                                     /* threads on offer, >= 1 */
    void (*run)(int workers, h2o_worker_fn function, void *context); /* returns when all are done */
    void *workspace;         /* aligned to 64, of the size asked for */
    int64_t workspace_limit; /* bytes of packed keys, values and the like at a time, 0: as many as
                                pay; fewer mean more passes, which tests want */
    void *stream;            /* a device's: what is launched waits for what is queued there */
} h2o_exec;

/* The size of workspace by which a device's kernels say that none of them serves a call. */
#define H2O_UNSERVED SIZE_MAX

/* One backend at one instruction set level: the scratch that an operation wants for
 * these parameters and this many workers, and the operation itself, with the
 * parameters of its row in h2o_operations. CPU kernels always return H2O_OK; a
 * device's launch may fail. */
typedef struct {
    const char *name; /* "generic", "avx2", ..., "neon", ..., or "cuda" */
    size_t (*workspace)(h2o_operation operation, const void *params, const h2o_exec *exec);
    int (*run)(h2o_operation operation, const void *params, const h2o_exec *exec, h2o_error *error);
} h2o_ops;

/* The tables; each lives in cpu/level_<name>.c. Those that this processor
 * family cannot have are not there; with H2O_GENERIC_ONLY there is but the first. */
#if !defined(H2O_GENERIC_ONLY) && defined(__x86_64__)
#define H2O_LEVELS_X86
#if H2O_SYSTEM_TILES && (__clang_major__ >= 12 || (!defined(__clang__) && __GNUC__ >= 11))
#define H2O_LEVEL_AMX /* compilers before know nothing of it */
#endif
#elif !defined(H2O_GENERIC_ONLY) && defined(__aarch64__)
#define H2O_LEVELS_ARM
#if __clang_major__ >= 16 || (!defined(__clang__) && __GNUC__ >= 10)
#define H2O_LEVELS_ARM_DOT /* compilers before know nothing of them within a file */
#endif
#endif
extern const h2o_ops h2o_ops_generic, h2o_ops_neon, h2o_ops_neondot, h2o_ops_neonbf16;
extern const h2o_ops h2o_ops_avx2, h2o_ops_avx512, h2o_ops_avx512bf16, h2o_ops_avx512amxint8,
    h2o_ops_avx512amx;

/* dispatch.c: chosen once, at import, from CPUID and the H2O_CPU variable.
 * h2o_init returns H2O_EVALUE for an unknown level, H2O_EBACKEND for one that
 * this machine lacks. h2o_table gives that of the CPU's tensors, NULL for others'. */
int h2o_init(h2o_error *error);
const h2o_ops *h2o_table(int32_t device_type);
const char *h2o_cpu_features(void);      /* "avx2 fma f16c avx512f ..." */
const char *const *h2o_cpu_levels(void); /* names this machine can run, NULL-ended */

/* parallel.c: the borrowed thread pool. */
int h2o_check_threads(h2o_error *error); /* H2O_EVALUE where H2O_THREADS is no such number */
int h2o_threads(void);                   /* how many workers to offer now */
const char *h2o_thread_source(void);     /* "torch", "gomp" or "own" */
void h2o_parallel(int workers, h2o_worker_fn function, void *context);

/* scratch.c: workspace that is kept between calls. Acquire returns 64-byte
 * aligned memory of at least that size or NULL; release gives it back. */
void *h2o_scratch_acquire(size_t bytes);
void h2o_scratch_release(void *memory);

/* ---- A call ------------------------------------------------------------ */

/* call.c: open checks a call and gets all that it needs, so that everything
 * that can fail fails before anything is written; run may go without the GIL;
 * close gives back what open got, whether or not it succeeded. validate is the part
 * of open that says whether the call is right: of tensors on a device without
 * kernels only what can be said without reading them; measure says how much workspace
 * the kernels want, H2O_UNSERVED if none of them serves the call.
 * What is not 0 before open is taken as it is: table (else the kernels of the
 * tensors' device), and workers and run of exec (else the borrowed pool). Kernels of
 * another device than the CPU (queued) need stream and workspace of exec from outside. */
typedef struct {
    h2o_operation operation;
    bool queued; /* by the kernels that devices.h has for the tensors' device */
    const h2o_ops *table;
    h2o_exec exec;
    size_t offered; /* bytes of a workspace that comes from outside */
    void *counts;
} h2o_call;

/* params: those of the operation, see h2o_params. */
int h2o_validate(void *params, h2o_call *call, h2o_error *error);
int h2o_measure(void *params, h2o_call *call, size_t *bytes, h2o_error *error);
int h2o_open(void *params, h2o_call *call, h2o_error *error);
int h2o_run(const void *params, const h2o_call *call, h2o_error *error);
void h2o_close(h2o_call *call);

#endif
