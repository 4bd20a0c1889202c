/* vec_bytes.h - products of bytes as they are stored, at levels that have them (H2O_DOT_BYTES):
 * AVX-512 VNNI, and aarch64 with FEAT_DotProd. AVX2 widens bytes to 16-bit words (H2O_DOT_WORDS). A
 * vb holds 4 * VL bytes, 2 * VL words or VL 32-bit integers, whose sums wrap around.
 *
 *   vb_zero vb_load         and vb_set1(word), the four bytes of a word in all lanes
 *   vb_held(x)              x, forced into a register: otherwise gcc loads it again for each
 *                           product and copies sums, for which there are not enough registers
 *   vb_add(a, b)
 *   vb_rounded(x) vb_floats(x)       floats to nearest integers, and integers to floats
 *   WEIGHT_LIMBS LANE_ROWS  words for the weights of LANE_ROWS rows: 2 and 4; 1 and 2 with words
 *   VALUE_BIAS              what vb_interleave adds to signed bytes
 *   vb_interleave(p, o)     LANE_ROWS rows of 4 * VL bytes from p[] on: each lane of o[4] has the
 *                           rows' elements of a column, in an order of columns that vb_columns
 *                           undoes
 *   vb_interleave_u4(p, o)  the same for rows of 2 * VL bytes that hold groups of 4-bit elements:
 *                           o[0] has the low halves of VL bytes, o[1] their high halves, and so on,
 *                           in order
 *   vb_dot_value(c, l, i, v)  per lane c + the sum of the products of the unsigned bytes of word
 *                           l[i] (or of its words, below 2^15) and the elements of vb_interleave or
 *                           vb_interleave_u4
 *   vb_columns(x)           x[4], sums of lanes of vb_interleave: x[j] gets the columns from VL * j
 *                           on
 *   vb_store_limbs(p, x, y) unsigned 16-bit integers (below 2^15 with words): for every LANE_ROWS
 *                           lanes a word with the high bytes of x, one with its low bytes, then the
 *                           same for y; with words, a word with x and one with y
 *   vf_from_f16(h)          VL f16 in variables as floats
 *   vf_load_pairs(p)        scales and minima of two groups in VL / 4 rows, f16, as floats: four
 *                           adjacent lanes for each row
 *   vf_transpose_pairs(x)   x[4] of VL rows become the scales of the first group, its minima, and
 *                           the scales and minima of the second
 *
 * with H2O_DOT_WORDS:
 *
 *   vb_widen(p)             2 * VL signed bytes as words
 *   vb_dot_words(c, a, b)   per lane c + a.first * b.first + a.second * b.second
 *   vb_hsums(v)             lane i is the sum over the lanes of v[i], i < VL
 *   vb_regroup(v, n, x)     lane VL / n * h + k of v[i] becomes lane VL / n * i + k of x[h], for
 *                           i and h below n, which is 1, 2 or 4
 *   vb_store_words(p, x)    the low words of VL integers
 *
 * and without:
 *
 *   KEY_BIAS vb_key(x)      signed bytes plus KEY_BIAS, as vb_dot_key expects them
 *   vb_dot_key(c, k, s)     per lane c + the sum of four products of such bytes and signed ones
 *   vb_high(x)              x / 256, rounded toward -infinity
 *   vb_number(hi, lo)       256 * hi + lo
 *   vb_zip(a, b, *lo, *hi)  words of two rows, alternating; some in lo, the others in hi
 *   vb_hsum_pairs(a, b)     turns sums of two such pairs of rows into those of four, alternating
 *   vb_hsum_quarters(v)     turns four such vectors into the sums of sixteen rows; with VL 4, one
 *                           into the sums of four
 *   vb_store_bytes(p, x)    the low bytes of VL integers
 *
 * with H2O_TILE_BYTES, if a matrix unit multiplies bytes and bf16 (step_unit.inc):
 *
 *   vb_even_quarters(a, b)  the first and third quarter of the lanes of each; and vb_odd_quarters
 *   vb_transpose(x)         x[4]: lane i of quarter k in x[j] becomes lane 4 * j + k of x[i]
 *   vb_zip_words(a, b, *lo, *hi)     16-bit words, alternating, of each quarter's halves
 *   vb_zip_quarters(a, b, *lo, *hi)  quarters, alternating, of the first halves and of the second
 *   vf_gather_f16(p, stride)         VL f16 that are `stride` bytes apart, as floats
 *
 * and with H2O_MATRIX_BYTES, if two rows of eight bytes are multiplied by two others at once, so
 * that both limbs of a query are one factor:
 *
 *   vb_zip(a, b, *lo, *hi)  eight bytes at a time instead of words
 *   vb_dot_key(c, k, s)     c + products of each row of k with each row of s; those of the first
 *                           row of k come first
 *   vb_numbers(a, b)        the numbers of four rows, given two such sums in which s is the high
 *                           limbs and then the low ones
 */
#ifndef H2O_VEC_BYTES_H
#define H2O_VEC_BYTES_H

#include "vec.h"

/* Number of vectors of a query's limbs with which products are summed separately. */
#ifdef H2O_MATRIX_BYTES
enum { LIMB_SUMS = 1 };
#else
enum { LIMB_SUMS = 2 };
#endif

#ifdef H2O_DOT_WORDS
enum { WEIGHT_LIMBS = 1, LANE_ROWS = 2 };
#else
enum { WEIGHT_LIMBS = 2, LANE_ROWS = 4 };
#endif

#ifdef H2O_DOT_BYTES
#if defined(H2O_VEC_AVX2)
#include "vec_bytes_avx2.h"
VEC vb vb_number(vb hi, vb lo) { return (void)lo, hi; } /* only satisfies the compiler */
#elif defined(H2O_VEC_AVX512)
#include "vec_bytes_avx512.h"
#else
#include "vec_bytes_neon.h"
#endif

#if !defined(H2O_MATRIX_BYTES) && !defined(H2O_DOT_WORDS)
VEC vb vb_numbers(vb a, vb b) { return (void)b, a; } /* only satisfies the compiler */
#endif
#endif
#endif
