/* test_kernels.c - the scenes at every level, and with several workers, which must produce the same
 * bits. */
#define _GNU_SOURCE
#include "scenes.h"

/* The answer of one worker, which must equal that of several, also if memory is so limited that
 * there is a wave for each head. The other numbers of workers take turns: at every level each is
 * used for each scene with one of the dtypes, and with another one as a simulation. Sanitizers use
 * 5. ThreadSanitizer does without one worker, and an emulator with it alone, since how work is
 * shared depends only on the number of elements in a vector, which native levels have too. */
static answer play(const h2o_ops *ops, const scene *s, const text *t, passage through) {
    static const int others[] = {2, 5, 8};
    const size_t turn = (size_t)s->dtype + (size_t)s->prompt + (through == simulate);
    const bool is_normal = s->dtype == H2O_F32 && s->policy.decay == 1.0f && !s->weird;
    const runner runners[] = {{ops, 1, 0, is_normal},
                              {ops, 3, 1, false},
                              {ops, is_slow() ? 5 : others[turn % 3], 0, false}};
    const size_t first = THREAD_SANITIZER ? 1 : 0, end = is_emulated() ? 1 : 3;
    const answer expected = through(&runners[first], s, t);
    for (size_t i = first + 1; i < end; i++) {
        const answer shared = through(&runners[i], s, t);
        for_each_tensor(&expected, &shared, check_same);
        for_each_tensor(&shared, &shared, free_tensor);
    }
    return expected;
}

int main(void) {
    static const h2o_dtype dtypes[] = {H2O_F32, H2O_F16, H2O_BF16};
    const h2o_policy plain = {.decay = 1.0f};
    const h2o_policy all = {4, H2O_SCORE_MEAN, 0.99f, true};
    const h2o_policy largest = {4, H2O_SCORE_MAX, 0.99f, false};
    const scene scenes[] = {
        /* several chunks of slots, fewer units than workers need */
        {.dims = make_dims(2, 1, 3, 780, 700, 64),
         .prompt = 720,
         .chunk_at = 735,
         .chunk = 12,
         .heavy = 400,
         .recent = 180,
         .policy = plain,
         .scale = 0.1f},
        /* enough units for all workers; all parameters; vectors that are not full at the end */
        {.dims = make_dims(5, 4, 5, 150, 120, 50),
         .prompt = 100,
         .chunk_at = 120,
         .chunk = 7,
         .heavy = 60,
         .recent = 31,
         .policy = all,
         .softcap = 5.0f,
         .scale = 0.1f,
         .how = SPREAD,
         .sinks = true},
        /* so many candidates that evict uses threads, and long enough for these to meet */
        {.dims = make_dims(4, 32, 1, 260, 100, 8),
         .prompt = 170,
         .chunk_at = 175,
         .chunk = 80,
         .heavy = 60,
         .recent = 30,
         .policy = plain,
         .scale = -0.1f},
        /* so few heads that workers share a head's eviction: with a few new keys, and with more new
         * keys than slots */
        {.dims = make_dims(1, 31, 1, 190, 100, 8),
         .prompt = 170,
         .chunk_at = 175,
         .chunk = 9,
         .heavy = 60,
         .recent = 30,
         .policy = plain,
         .scale = 0.1f},
        {.dims = make_dims(3, 5, 1, 560, 97, 8),
         .prompt = 91,
         .chunk_at = 96,
         .chunk = 460,
         .heavy = 60,
         .recent = 31,
         .policy = all,
         .scale = 0.1f,
         .how = SPREAD},
        /* scores that are maxima: rows in several items, ragged vectors, chunks of slots */
        {.dims = make_dims(2, 2, 3, 420, 300, 20),
         .prompt = 330,
         .chunk_at = 345,
         .chunk = 30,
         .heavy = 150,
         .recent = 100,
         .policy = largest,
         .scale = 0.1f},
        /* several chunks of slots, and learned sinks */
        {.dims = make_dims(1, 1, 3, 560, 520, 16),
         .prompt = 530,
         .chunk_at = 540,
         .chunk = 12,
         .heavy = 300,
         .recent = 180,
         .policy = plain,
         .scale = 0.1f,
         .sinks = true},
        /* so many heads that a step uses matrix products and workers divide the heads: several
         * chunks of slots, full and ragged panels of values, an odd number of heads */
        {.dims = make_dims(2, 1, 37, 330, 300, 64),
         .spare = 3,
         .prompt = 290,
         .chunk_at = 305,
         .chunk = 8,
         .heavy = 150,
         .recent = 120,
         .policy = all,
         .softcap = 5.0f,
         .scale = 0.1f,
         .sinks = true},
        {.dims = make_dims(2, 1, 35, 330, 300, 51),
         .prompt = 290,
         .chunk_at = 305,
         .chunk = 8,
         .heavy = 150,
         .recent = 121,
         .policy = all,
         .scale = -0.1f,
         .how = SPREAD},
        /* fewer chunks of slots than workers, which divide the chunks: columns of values do not
         * fill vectors, rows differ in length, and in some of them a step has nothing to do */
        {.dims = make_dims(2, 1, 3, 150, 120, 410),
         .spare = 1,
         .prompt = 100,
         .chunk_at = 120,
         .chunk = 8,
         .heavy = 60,
         .recent = 45,
         .policy = all,
         .scale = 0.01f,
         .how = SPREAD,
         .sinks = true},
        {.dims = make_dims(1, 1, 18, 320, 300, 576),
         .prompt = 290,
         .chunk_at = 296,
         .chunk = 8,
         .heavy = 150,
         .recent = 130,
         .policy = plain,
         .scale = 0.01f},
        /* heads of latents, in one vector: an odd number of pairs; the last tile is not full */
        {.dims = make_dims(2, 1, 13, 150, 120, 514),
         .prompt = 100,
         .chunk_at = 105,
         .chunk = 8,
         .heavy = 60,
         .recent = 41,
         .policy = all,
         .scale = 0.05f,
         .weird = true},
        {.dims = make_dims(2, 1, 32, 120, 60, 80),
         .prompt = 40,
         .chunk_at = 50,
         .chunk = 20,
         .heavy = 20,
         .recent = 20,
         .policy = plain,
         .scale = 0.1f,
         .weird = true},
        /* a prompt much longer than what is kept of it plus a window */
        {.dims = make_dims(2, 2, 2, 400, 120, 16),
         .spare = 1,
         .prompt = 370,
         .chunk_at = 380,
         .chunk = 9,
         .heavy = 60,
         .recent = 30,
         .policy = all,
         .scale = 0.1f,
         .how = SPREAD},
        /* in the end all scores are NaN */
        {.dims = make_dims(2, 2, 2, 200, 60, 24),
         .prompt = 40,
         .chunk_at = 50,
         .chunk = 20,
         .heavy = 20,
         .recent = 20,
         .policy = plain,
         .scale = 0.1f,
         .how = SPREAD,
         .weird = true},
        {.dims = make_dims(2, 2, 3, 120, 60, 24),
         .prompt = 40,
         .chunk_at = 50,
         .chunk = 20,
         .heavy = 20,
         .recent = 20,
         .policy = plain,
         .scale = 0.1f,
         .sinks = true,
         .weird = true},
        {.dims = make_dims(2, 2, 2, 120, 60, 24),
         .prompt = 40,
         .chunk_at = 50,
         .chunk = 20,
         .heavy = 20,
         .recent = 20,
         .policy = largest,
         .scale = 0.1f,
         .weird = true},
        /* all keys get the same attention */
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
    CHECK(setenv("H2O_THREADS", "3", 1) == 0 && h2o_init(&error) == H2O_OK);
    for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++) {
        for (size_t type = 0; type < 3; type++) {
            const h2o_ops *ops[LEVELS];
            size_t count = 0;
            for (size_t l = 0; l < LEVELS; l++) {
                if (has_level(levels[l]->name) && !is_left_out(levels[l]->name, l + i, type))
                    ops[count++] = levels[l];
            }
            if (count == 0) continue;
            scene s = scenes[i];
            s.dtype = dtypes[type];
            test_scene(ops, count, &s, type + 1, play);
        }
    }
    return 0;
}
