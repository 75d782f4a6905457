/* Element-wise reductions over plain memory. Knows neither Python nor ranks. */
#ifndef GUOZHUANG_REDUCE_H
#define GUOZHUANG_REDUCE_H

#include <stddef.h>

/* The numbers of DType and Op in program.py. */
enum { GZ_F32, GZ_F64, GZ_F16, GZ_BF16, GZ_I8, GZ_U8, GZ_I16, GZ_I32, GZ_I64, GZ_BOOL, GZ_NUM_DTYPES };
enum { GZ_SUM, GZ_PROD, GZ_MIN, GZ_MAX, GZ_BAND, GZ_BOR, GZ_BXOR, GZ_NUM_OPS };

/* Bytes of an element; 0 for a number that is no dtype. */
size_t gz_element_bytes(long long dtype);

/* NULL, or why this reduction cannot be. */
const char *gz_reduce_refused(long long dtype, long long op, double scale);

/* dst_k[:] = op over srcs in their order, times scale. A dst may be one of the srcs; apart from that nothing overlaps.
   Addresses are multiples of the element size. */
void gz_reduce(unsigned char *const *dsts, size_t num_dsts, unsigned char *const *srcs, size_t num_srcs,
               size_t num_elements, int dtype, int op, double scale);

#endif
