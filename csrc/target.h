/* target.h - lets headers be compiled for the host and for a device. */
#ifndef H2O_TARGET_H
#define H2O_TARGET_H

#ifdef __CUDACC__
#define H2O_INLINE static inline __host__ __device__
#else
#define H2O_INLINE static inline
#endif

#ifdef __cplusplus /* kernels are compiled as C++, which has no `restrict` */
#define H2O_RESTRICT __restrict__
#else
#define H2O_RESTRICT restrict
#endif

#endif
