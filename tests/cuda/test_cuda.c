/* test_cuda.c - the scenes of tests/c (prompts, chunks and decode steps, checked against a plain
 * implementation) through the kernels for GPUs, emulated. Each runs with several seeds, which order
 * threads and blocks differently: results must agree bit for bit. CAPABILITY 75 emulates a device
 * without bfloat16, whose kernels differ from the others' in float16. */
#define _GNU_SOURCE
#include "../c/scenes.h"

#ifdef CAPABILITY
enum { ONE_DTYPE = true };
#else
enum { ONE_DTYPE = false };
#endif

void shim_seed(uint64_t seed);

static answer play(const h2o_ops *ops, const scene *s, const text *t, passage through) {
    const runner with = {.ops = ops, .workers = 1};
    shim_seed(0);
    const answer first = through(&with, s, t);
    for (uint64_t seed = 1; seed < (is_slow() || ONE_DTYPE ? 2 : 3); seed++) {
        shim_seed(seed);
        const answer other = through(&with, s, t);
        for_each_tensor(&first, &other, check_same);
        for_each_tensor(&other, &other, free_tensor);
    }
    return first;
}

/* Rows of bytes and a scale, at any address, with every alignment of a run of elements: a misaligned
 * load ends the test. tests/core/test_stores.py judges the numbers. */
static void test_quantised(h2o_dtype stored, int64_t D, h2o_policy policy) {
    const scene s = {.dims = make_dims(2, 2, 2, 60, 50, D),
                     .dtype = H2O_F16,
                     .stored = stored,
                     .prompt = 40,
                     .chunk_at = 45,
                     .chunk = 8,
                     .heavy = 18,
                     .recent = 16,
                     .policy = policy,
                     .scale = 0.1f,
                     .how = SPREAD};
    test_random random = {.state = (uint64_t)D};
    const text t = make_text(&s, &random);
    const answer conversation = play(&h2o_ops_generic, &s, &t, converse);
    for_each_tensor(&conversation, &conversation, free_tensor);
    free_text(&t);
}

int main(void) {
    static const h2o_dtype dtypes[] = {H2O_F32, H2O_F16, H2O_BF16};
    const h2o_policy plain = {.decay = 1.0f};
    const h2o_policy all = {4, H2O_RANK_MEAN, 0.99f, true, 0.0f};
    const h2o_policy merging = {4, H2O_RANK_MEAN, 0.99f, true, 0.25f};
    const h2o_policy largest = {4, H2O_RANK_MAX, 0.99f, false, 0.0f};
    const scene scenes[] = {
        {.dims = make_dims(2, 1, 3, 480, 420, 64),
         .prompt = 420,
         .chunk_at = 435,
         .chunk = 12,
         .heavy = 200,
         .recent = 180,
         .policy = plain,
         .scale = 0.1f},
        {.dims = make_dims(2, 2, 5, 90, 80, 50),
         .prompt = 60,
         .chunk_at = 70,
         .chunk = 7,
         .heavy = 30,
         .recent = 20,
         .policy = all,
         .softcap = 5.0f,
         .scale = 0.1f,
         .how = SPREAD,
         .sinks = true},
        /* scores that are maxima */
        {.dims = make_dims(2, 2, 3, 200, 140, 24),
         .prompt = 140,
         .chunk_at = 150,
         .chunk = 10,
         .heavy = 70,
         .recent = 50,
         .policy = largest,
         .scale = 0.1f},
        /* several blocks for a head, and learned sinks */
        {.dims = make_dims(1, 1, 3, 330, 300, 16),
         .prompt = 310,
         .chunk_at = 315,
         .chunk = 5,
         .heavy = 180,
         .recent = 100,
         .policy = plain,
         .scale = 0.1f,
         .sinks = true},
        {.dims = make_dims(2, 2, 2, 90, 60, 24),
         .prompt = 60,
         .chunk_at = 65,
         .chunk = 10,
         .heavy = 20,
         .recent = 20,
         .policy = merging,
         .scale = 0.1f},
        {.dims = make_dims(2, 2, 2, 120, 60, 24),
         .prompt = 40,
         .chunk_at = 50,
         .chunk = 20,
         .heavy = 20,
         .recent = 20,
         .policy = plain,
         .scale = 0.1f,
         .how = SPREAD,
         .weird = true},
        {.dims = make_dims(1, 2, 3, 60, 40, 24),
         .prompt = 40,
         .chunk_at = 45,
         .chunk = 10,
         .heavy = 15,
         .recent = 15,
         .policy = plain,
         .scale = 0.1f,
         .sinks = true,
         .weird = true},
        {.dims = make_dims(1, 1, 2, 60, 30, 7),
         .prompt = 30,
         .chunk_at = 40,
         .chunk = 3,
         .heavy = 10,
         .recent = 10,
         .policy = all,
         .scale = 0.0f,
         .how = SPREAD},
    };
    h2o_error error;
    CHECK(h2o_init(&error) == H2O_OK);
    test_quantised(H2O_Q8, 50, plain); /* rows of 52 bytes, ... */
    test_quantised(H2O_Q8, 31, all);   /* ... of 33, ... */
    test_quantised(H2O_Q8, 24, merging);
    test_quantised(H2O_Q4, 96, all); /* ... and of 60 */
    /* ThreadSanitizer, which takes a hundred times as long, does without the largest. */
    for (size_t i = THREAD_SANITIZER ? 1 : 0; i < sizeof scenes / sizeof *scenes; i++) {
        for (size_t type = 0; type < 3; type++) {
            if (is_left_out(i + 1, type)) continue;
            if (ONE_DTYPE && dtypes[type] != H2O_F16) continue;
            scene s = scenes[i];
            s.dtype = dtypes[type];
            test_scene(&h2o_ops_generic, &s, type + 1, play);
        }
    }
    return 0;
}
