/* h2o.h - the whole internal contract of the C core.
 *
 * Everything that crosses a room's wall is declared here: status codes, the
 * error record, the tensor view, one parameter struct per operation, and the
 * table of operations that every backend fills in. A call travels
 *
 *     module.c (parse) -> exchange.c (views) -> check.c -> dispatch.c -> kernel
 *
 * and only the last step runs without the GIL. Kernels trust what check.c has
 * let through; nothing else validates.
 *
 * Shape letters, used at every pointer:
 *   B batch rows    H query heads   G key/value heads   R = H / G
 *   Q new tokens    S slots         D head dimension    N tokens of a text
 */
#ifndef H2O_H
#define H2O_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- Status and errors ------------------------------------------------- */

typedef enum {
    H2O_OK = 0,
    H2O_EVALUE,   /* ValueError: right kind of thing, wrong value or shape */
    H2O_ETYPE,    /* TypeError: wrong kind of thing, wrong dtype */
    H2O_EBUFFER,  /* BufferError: memory that cannot be exported or used */
    H2O_EBACKEND, /* RuntimeError: device without a backend in this build */
    H2O_EMEMORY   /* MemoryError */
} h2o_status;

typedef struct {
    h2o_status status;
    char text[512];
} h2o_error;

/* Fills *error with a formatted text and returns status, so that a function
 * can end with `return h2o_fail(error, H2O_EVALUE, "...")`. The text names
 * the argument, what came and what was wanted. */
int h2o_fail(h2o_error *error, h2o_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- Tensors ----------------------------------------------------------- */

typedef enum {
    H2O_NONE = 0, /* the optional argument was not given */
    H2O_F32,
    H2O_F16,
    H2O_BF16,
    H2O_F64,
    H2O_I32,
    H2O_I64,
    H2O_U8, /* masks: bool or uint8, 0 is a pad */
} h2o_dtype;

enum { H2O_MAX_DIMS = 4 };

/* A borrowed tensor: never outlives the call. data has any byte offset
 * applied. Strides count elements and may be negative or 0 for inputs. A view
 * with dtype H2O_NONE stands for an optional argument that was not given. */
typedef struct {
    void *data;
    int64_t shape[H2O_MAX_DIMS];
    int64_t stride[H2O_MAX_DIMS];
    const char *name; /* argument name, for messages */
    h2o_dtype dtype;
    int32_t ndim;
    int32_t device_type; /* DLPack's numbers: 1 is the CPU */
    int32_t device_id;
    bool readonly;
} h2o_view;

static inline bool h2o_given(const h2o_view *view) { return view->dtype != H2O_NONE; }

/* Filled in by check.c, so that kernels need not look at shapes again.
 * Those that an operation does not have are 0. */
typedef struct {
    int64_t B, H, G, R, Q, S, D;
} h2o_dims;

/* ---- State and policy -------------------------------------------------- */

/* What one layer holds. A token's slot is its index on axis S.
 *
 * Invariants, for a row b that has seen lengths[b] real tokens and whose
 * budget is k = sinks + heavy + recent: held = min(lengths[b], k) slots are
 * filled; they lie within slots 0..held; if the hole among these held + 1 is
 * not the last one it is free[b,g]. So the step that fills free[b,g] finds
 * slots 0..held all filled. Empty slots have position -1. */
typedef struct {
    h2o_view keys;      /* [B,G,S,D] f32/f16/bf16 */
    h2o_view values;    /* [B,G,S,D] same dtype */
    h2o_view scores;    /* [B,G,S] f32, accumulated attention of each key */
    h2o_view positions; /* [B,G,S] i32, index in the row without pads, -1 empty */
    h2o_view free;      /* [B,G] i32, the slot that the next token takes */
    h2o_view lengths;   /* [B] i64, real tokens that the row has seen */
    h2o_view budget;    /* [B,2] i32: heavy, recent */
    h2o_view lost;      /* [B,G] f64, sum of the scores of evicted keys */
    h2o_view norms;     /* [B,G,S] f32, L2 norm of each value; given exactly
                           when the policy is value_weighted */
} h2o_slots;

typedef enum { H2O_RANK_SUM = 0, H2O_RANK_MEAN = 1 } h2o_rank_by;

/* How keys are ranked; budgets are per row and live in the slots. What each
 * field means is policy.h's business alone. */
typedef struct {
    int32_t sinks;
    h2o_rank_by rank_by;
    float decay; /* in [0, 1] */
    bool value_weighted;
} h2o_policy;

/* ---- Operations -------------------------------------------------------- */

/* attend: new query i sees every stored key and new keys j <= i that are no
 * pads. Writes out, writes scores of the new keys, and updates slots.scores in
 * place to decay^n * score + what the n real new queries gave. */
typedef struct {
    h2o_view query;  /* [B,H,Q,D] */
    h2o_view keys;   /* [B,G,Q,D] new keys */
    h2o_view values; /* [B,G,Q,D] new values */
    h2o_view mask;   /* [B,Q] u8, optional */
    bool has_slots;  /* slots.keys, values, scores and positions are given */
    h2o_slots slots;
    h2o_view out;    /* [B,Q,H,D], 0 where the query is a pad */
    h2o_view scores; /* [B,G,Q] f32, 0 where the key is a pad */
    float scale;     /* logits = softcap(scale * q.k) */
    float decay;
    float softcap; /* 0: none; else cap * tanh(logit / cap) */
    h2o_dims dims;
} h2o_attend_params;

/* evict: takes the new keys with the scores that attend gave them into the
 * slots; what the budget has no room for, stored or new, is dropped for good.
 * A stored key that stays keeps its slot, unless that lies beyond the last one
 * in use. Advances lengths, adds the dropped scores to lost, sets free. S must
 * be at least min(k, held + new) for every row. */
typedef struct {
    h2o_view keys;   /* [B,G,Q,D] */
    h2o_view values; /* [B,G,Q,D] */
    h2o_view scores; /* [B,G,Q] f32 */
    h2o_view mask;   /* [B,Q] u8, optional */
    h2o_slots slots;
    h2o_policy policy;
    h2o_dims dims;
} h2o_evict_params;

/* step: one decode step in one call. Writes the new key and value into the
 * free slot, attends over all held slots and itself, adds the weights to the
 * scores, and, where the row now holds more than its budget, empties the slot
 * that the policy names and makes it the free one. A row whose token is masked
 * stays as it is and its output is 0. */
typedef struct {
    h2o_view query; /* [B,H,1,D] */
    h2o_view key;   /* [B,G,1,D] */
    h2o_view value; /* [B,G,1,D] */
    h2o_view mask;  /* [B,1] u8, optional */
    h2o_slots slots;
    h2o_view out; /* [B,1,H,D] */
    h2o_policy policy;
    float scale;
    float softcap;
    h2o_dims dims;
} h2o_step_params;

/* simulate: what a cache that is fed prompt[b] tokens at once and the others
 * one by one would answer, in one call over the whole text. evicted_at[b,g,j]
 * is the first row (column number, pads counted) that no longer sees key j, Q
 * if none, 0 for a pad; scores are those at the end, or at eviction. */
typedef struct {
    h2o_view query;      /* [B,H,Q,D] the whole text */
    h2o_view keys;       /* [B,G,Q,D] */
    h2o_view values;     /* [B,G,Q,D] */
    h2o_view mask;       /* [B,Q] u8, optional */
    h2o_view prompt;     /* [B] i32, real tokens before the first eviction, >= 1 */
    h2o_view budget;     /* [B,2] i32: heavy, recent */
    h2o_view out;        /* [B,Q,H,D] */
    h2o_view evicted_at; /* [B,G,Q] i32 */
    h2o_view scores;     /* [B,G,Q] f32 */
    h2o_policy policy;
    float scale;
    float softcap;
    h2o_dims dims;
} h2o_simulate_params;

int h2o_check_attend(h2o_attend_params *params, h2o_error *error);
int h2o_check_evict(h2o_evict_params *params, h2o_error *error);
int h2o_check_step(h2o_step_params *params, h2o_error *error);
int h2o_check_simulate(h2o_simulate_params *params, h2o_error *error);

/* ---- Execution --------------------------------------------------------- */

/* What a kernel runs with. Results must not depend on lanes: work is cut into
 * units that the shapes alone determine, each unit has private sums, and these
 * are added in a fixed order. */
typedef void (*h2o_lane_fn)(int lane, int lanes, void *context);

typedef struct {
    int lanes;                                               /* threads on offer, >= 1 */
    void (*run)(int lanes, h2o_lane_fn function, void *context); /* returns when all are done */
    void *workspace;                                         /* aligned to 64, of the size asked for */
} h2o_exec;

/* One backend at one instruction set level. For each operation: the scratch it
 * wants for these parameters and this many lanes, and the operation itself.
 * CPU kernels always return H2O_OK; a device's launch may fail. */
typedef struct {
    const char *name; /* "generic", "avx2", "avx512", "avx512bf16", "neon" */
    size_t (*attend_workspace)(const h2o_attend_params *params, int lanes);
    int (*attend)(const h2o_attend_params *params, const h2o_exec *exec, h2o_error *error);
    size_t (*evict_workspace)(const h2o_evict_params *params, int lanes);
    int (*evict)(const h2o_evict_params *params, const h2o_exec *exec, h2o_error *error);
    size_t (*step_workspace)(const h2o_step_params *params, int lanes);
    int (*step)(const h2o_step_params *params, const h2o_exec *exec, h2o_error *error);
    size_t (*simulate_workspace)(const h2o_simulate_params *params, int lanes);
    int (*simulate)(const h2o_simulate_params *params, const h2o_exec *exec, h2o_error *error);
} h2o_ops;

/* The tables; each lives in cpu/level_<name>.c. Those that this processor
 * family cannot have are not compiled. */
extern const h2o_ops h2o_ops_generic;
#if defined(__x86_64__)
extern const h2o_ops h2o_ops_avx2;
extern const h2o_ops h2o_ops_avx512;
extern const h2o_ops h2o_ops_avx512bf16;
#elif defined(__aarch64__)
extern const h2o_ops h2o_ops_neon;
#endif

/* dispatch.c: chosen once, at import, from CPUID and the H2O_CPU variable.
 * h2o_init returns H2O_EVALUE for an unknown level, H2O_EBACKEND for one that
 * this machine lacks. h2o_table gives the table for a device, or NULL. */
int h2o_init(h2o_error *error);
const h2o_ops *h2o_table(int32_t device_type);
const char *h2o_cpu_features(void);              /* "avx2 fma f16c avx512f ..." */
const char *const *h2o_cpu_levels(void);         /* names this machine can run, NULL-ended */

/* parallel.c: the borrowed thread pool. */
int h2o_threads(void);                            /* how many lanes to offer now */
const char *h2o_thread_source(void);              /* "torch", "gomp" or "own" */
void h2o_parallel(int lanes, h2o_lane_fn function, void *context);

/* scratch.c: workspace that is kept between calls. Acquire returns 64-byte
 * aligned memory of at least that size or NULL; release gives it back. */
void *h2o_scratch_acquire(size_t bytes);
void h2o_scratch_release(void *memory);

#endif
