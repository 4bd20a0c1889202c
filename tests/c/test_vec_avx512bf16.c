/* test_vec_avx512bf16.c - products of bytes (csrc/cpu/vec_bytes.h) of level_avx512bf16.c, where the
 * processor has them. They are held against loops over single bytes. */
#define _GNU_SOURCE
#include "h2o.h"

#include "test.h"

#if defined(__x86_64__)
#include "cpu/level_x86.h"

H2O_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni")

#define H2O_VEC_AVX512
#define H2O_DOT_BYTES
#include "cpu/vec_bytes.h"

enum { BYTES = 4 * VL };

static void fill(test_random *random, void *bytes, size_t count) {
    for (size_t i = 0; i < count; i++) ((uint8_t *)bytes)[i] = (uint8_t)random_bits(random);
}

/* Lane by lane: sums wrap, and halves are rounded to -infinity. */
static void lanes_are_whole_numbers(test_random *random) {
    int32_t a[VL], b[VL], got[VL];
    fill(random, a, sizeof a);
    fill(random, b, sizeof b);
    vb_store(got, vb_held(vb_add(vb_load(a), vb_load(b))));
    for (int i = 0; i < VL; i++) CHECK((uint32_t)got[i] == (uint32_t)a[i] + (uint32_t)b[i]);
    vb_store(got, vb_high(vb_load(a)));
    for (int i = 0; i < VL; i++) CHECK(got[i] == (int32_t)floor(a[i] / 256.0));
    vb_store(got, vb_number(vb_load(a), vb_load(b)));
    for (int i = 0; i < VL; i++) CHECK((uint32_t)got[i] == 256u * (uint32_t)a[i] + (uint32_t)b[i]);
    vb_store(got, vb_add(vb_zero(), vb_set1(a[3])));
    for (int i = 0; i < VL; i++) CHECK(got[i] == a[3]);
    vb_store(got, vb_set1_word((const char *)a + 1)); /* from any address */
    for (int i = 0; i < VL; i++) CHECK(memcmp(&got[i], (const char *)a + 1, 4) == 0);
}

/* To nearest, ties to even, and the low bytes of the numbers. */
static void floats_are_rounded(void) {
    float x[VL], back[VL];
    int32_t got[VL];
    int8_t bytes[VL + 1];
    for (int first = -400; first < 400; first += VL) {
        for (int i = 0; i < VL; i++) x[i] = 0.25f * (float)(first + i);
        const vb rounded = vb_rounded(vf_load(x));
        vb_store(got, rounded);
        vf_store(back, vb_floats(rounded));
        bytes[VL] = 77;
        vb_store_bytes(bytes, rounded);
        for (int i = 0; i < VL; i++) {
            CHECK(got[i] == (int32_t)nearbyintf(x[i]) && back[i] == (float)got[i]);
            CHECK(bytes[i] == (int8_t)got[i]);
        }
        CHECK(bytes[VL] == 77);
    }
}

static void products_are_of_unsigned_and_signed_bytes(test_random *random) {
    uint8_t u[BYTES];
    int8_t s[BYTES];
    int32_t c[VL], got[VL];
    for (int repeat = 0; repeat < 100; repeat++) {
        fill(random, u, sizeof u);
        fill(random, s, sizeof s);
        fill(random, c, sizeof c);
        for (int i = 0; i < VL; i++) c[i] >>= 8;
        vb_store(got, vb_dot(vb_load(c), vb_load(u), vb_load(s)));
        for (int i = 0; i < VL; i++) {
            int32_t sum = c[i];
            for (int k = 4 * i; k < 4 * i + 4; k++) sum += u[k] * s[k];
            CHECK(got[i] == sum);
        }
        vb_store(u, vb_unsigned(vb_load(s)));
        for (int i = 0; i < BYTES; i++) CHECK(u[i] == s[i] + 128);
    }
}

/* Of each four lanes a word of high bytes of x, one of y's, and their low ones. */
static void limbs_lie_by_fours(test_random *random) {
    int32_t x[VL], y[VL];
    uint8_t got[BYTES];
    for (int i = 0; i < VL; i++) {
        x[i] = i == 0 ? 65535 : (int32_t)random_int(random, 0, 65535);
        y[i] = i == 1 ? 0 : (int32_t)random_int(random, 0, 65535);
    }
    vb_store_limbs(got, vb_load(x), vb_load(y));
    for (int i = 0; i < VL; i++) {
        const uint8_t *const limbs = got + i / 4 * 16 + i % 4;
        CHECK(limbs[0] == x[i] >> 8 && limbs[4] == y[i] >> 8);
        CHECK(limbs[8] == (x[i] & 255) && limbs[12] == (y[i] & 255));
    }
}

/* Two rows at a time, four, and then all sixteen. */
static void zipped_rows_are_added_over_lanes(test_random *random) {
    int32_t x[VL][VL], got[VL];
    vb four[4], two[2];
    fill(random, x, sizeof x);
    for (int i = 0; i < VL; i += 4) {
        for (int k = 0; k < 2; k++) {
            vb lo, hi;
            vb_zip(vb_load(x[i + 2 * k]), vb_load(x[i + 2 * k + 1]), &lo, &hi);
            two[k] = vb_add(lo, hi);
        }
        four[i / 4] = vb_hsum_pairs(two[0], two[1]);
    }
    vb_store(got, vb_hsum_quarters(four));
    for (int i = 0; i < VL; i++) {
        uint32_t sum = 0;
        for (int k = 0; k < VL; k++) sum += (uint32_t)x[i][k];
        CHECK((uint32_t)got[i] == sum);
    }
}

/* Products with interleaved rows are sums over the four, in the order of columns at last. */
static void interleaved_rows_are_columns(test_random *random) {
    int8_t rows[4][BYTES];
    uint8_t weights[4];
    int32_t got[BYTES];
    vb x[4];
    fill(random, rows, sizeof rows);
    fill(random, weights, sizeof weights);
    const char *const row[4] = {(char *)rows[0], (char *)rows[1], (char *)rows[2], (char *)rows[3]};
    vb_interleave(row, x);
    for (int j = 0; j < 4; j++) x[j] = vb_dot(vb_zero(), vb_set1_word(weights), x[j]);
    vb_columns(x);
    for (int j = 0; j < 4; j++) vb_store(got + j * VL, x[j]);
    for (int d = 0; d < BYTES; d++) {
        int32_t sum = 0;
        for (int k = 0; k < 4; k++) sum += weights[k] * rows[k][d];
        CHECK(got[d] == sum);
    }
}

/* Byte j of a group has its elements j and j + 16. */
static void halves_of_bytes_are_interleaved_in_order(test_random *random) {
    uint8_t rows[4][2 * H2O_GROUP / 2], got[4][BYTES];
    vb x[4];
    fill(random, rows, sizeof rows);
    const char *const row[4] = {(char *)rows[0], (char *)rows[1], (char *)rows[2], (char *)rows[3]};
    vb_interleave_u4(row, x);
    for (int j = 0; j < 4; j++) vb_store(got[j], x[j]);
    for (int d = 0; d < 2 * H2O_GROUP; d++) {
        for (int k = 0; k < 4; k++) {
            const uint8_t both = rows[k][d / H2O_GROUP * (H2O_GROUP / 2) + d % (H2O_GROUP / 2)];
            const bool high = d % H2O_GROUP >= H2O_GROUP / 2;
            CHECK(got[d / VL][d % VL * 4 + k] == (high ? both >> 4 : both & 15));
        }
    }
}

static void scales_and_minima_become_vectors(test_random *random) {
    uint16_t halves[4 * VL]; /* four of a row */
    float got[4][VL];
    vf x[4];
    for (int i = 0; i < 4 * VL; i++) halves[i] = (uint16_t)random_int(random, 0, 0x7bff);
    for (int i = 0; i < 4; i++) {
        const char *row[4];
        for (int k = 0; k < 4; k++) row[k] = (const char *)(halves + 4 * (4 * i + k));
        x[i] = vf_load_pairs(row);
    }
    vf_transpose_pairs(x);
    for (int j = 0; j < 4; j++) vf_store(got[j], x[j]);
    for (int i = 0; i < 4 * VL; i++) CHECK(got[i % 4][i / 4] == float_from_f16(halves[i]));
    vf_store(got[0], vf_from_f16(halves));
    for (int i = 0; i < VL; i++) CHECK(got[0][i] == float_from_f16(halves[i]));
}

static void test_products_of_bytes(void) {
    test_random random = {.state = 1};
    lanes_are_whole_numbers(&random);
    floats_are_rounded();
    products_are_of_unsigned_and_signed_bytes(&random);
    limbs_lie_by_fours(&random);
    zipped_rows_are_added_over_lanes(&random);
    interleaved_rows_are_columns(&random);
    halves_of_bytes_are_interleaved_in_order(&random);
    scales_and_minima_become_vectors(&random);
}

H2O_TARGET_END

int main(void) {
    h2o_error error;
    CHECK(unsetenv("H2O_CPU") == 0 && h2o_init(&error) == H2O_OK);
    if (has_level("avx512bf16")) {
        test_products_of_bytes();
    } else {
        puts("no avx512bf16 here: its products of bytes are not tested");
    }
    return 0;
}
#else
int main(void) { return 0; }
#endif
