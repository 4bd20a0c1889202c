/* vec_bytes.h - products of bytes as they are stored, where the level has them (H2O_DOT_BYTES):
 * AVX-512 VNNI, and aarch64 with FEAT_DotProd. A vb carries 4 * VL bytes, or VL whole numbers of 32
 * bits, whose sums wrap.
 *
 *   vb_zero vb_load         and vb_set1(word), a word's four bytes in all lanes
 *   vb_held(x)              x in a register: gcc would load it for each product that it enters, and
 *                           copy sums, for which there are not enough registers
 *   KEY_BIAS vb_key(x)      signed bytes plus this, which is what vb_dot_key takes
 *   vb_dot_key(c, k, s)     c + the sum of four products of such bytes and signed ones per lane
 *   VALUE_BIAS              what vb_interleave adds to signed bytes
 *   vb_dot_value(c, l, i, v)  c + the sum of four products of the unsigned bytes of word l[i] and
 *                           bytes of vb_interleave or vb_interleave_u4 per lane; l: two words
 *   vb_add vb_high(x)       x / 256 toward -infinity
 *   vb_number(hi, lo)       256 * hi + lo
 *   vb_zip(a, b, *lo, *hi)  words of two rows in turn, some in lo and the others in hi
 *   vb_hsum_pairs(a, b)     of sums of two such pairs of rows those of four, in turn
 *   vb_hsum_quarters(v)     of four such sums those of sixteen rows; with VL 4 of one those of four
 *   vb_rounded(x) vb_floats(x)       floats to nearest whole numbers, and whole numbers as floats
 *   vb_store_bytes(p, x)    the low bytes of the VL numbers
 *   vb_store_limbs(p, x, y) numbers of 16 bits: of four lanes a word of the high bytes of x, one of
 *                           its low ones, then y's; and so on
 *   vb_interleave(p, o)     four rows of 4 * VL bytes from p[] on: each lane of o[4] has the four
 *                           rows' bytes of a column, in an order of columns that vb_columns undoes
 *   vb_interleave_u4(p, o)  the same of four rows of 2 * VL bytes of groups in halves of bytes: o[0]
 *                           has the low halves of VL bytes, o[1] their high ones, and so on; in
 *                           their order
 *   vb_columns(x)           x[4] sums of lanes of vb_interleave: x[j] the columns from VL * j on
 *   vf_from_f16(h)          VL halves in variables as floats
 *   vf_load_pairs(p)        of VL / 4 rows scale and minimum of two groups, f16, as floats: a row's
 *                           in four lanes side by side
 *   vf_transpose_pairs(x)   x[4] of VL rows become the scales of the first group, its minima, and
 *                           those of the second
 *
 * with H2O_TILE_BYTES, where a matrix unit multiplies them (step_bytes_tiles.inc):
 *
 *   vb_even_quarters(a, b)  the first and third quarter of the lanes of each; and vb_odd_quarters
 *   vb_transpose(x)         x[4], lanes i of quarters k in x[j] become lanes 4 * j + k of x[i]
 *
 * and with H2O_MATRIX_BYTES, where two rows of eight bytes are multiplied by two others at once, so
 * that both limbs of a query are one factor:
 *
 *   vb_zip(a, b, *lo, *hi)  eights of bytes instead of words
 *   vb_dot_key(c, k, s)     c + products of each row of k with each of s: those of the first come
 *                           first
 *   vb_numbers(a, b)        of two such sums, where s is the high limbs and then the low ones, the
 *                           numbers of the four rows
 */
#ifndef H2O_VEC_BYTES_H
#define H2O_VEC_BYTES_H

#include "vec.h"

/* How many vectors the limbs of a query are that products are summed with apart. */
#ifdef H2O_MATRIX_BYTES
enum { LIMB_SUMS = 1 };
#else
enum { LIMB_SUMS = 2 };
#endif

#ifdef H2O_DOT_BYTES
#if defined(H2O_VEC_AVX512)
#include "vec_bytes_avx512.h"
#else
#include "vec_bytes_neon.h"
#endif

#ifndef H2O_MATRIX_BYTES
VEC vb vb_numbers(vb a, vb b) { return (void)b, a; } /* for compilers only */
#endif
#endif
#endif
