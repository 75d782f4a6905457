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

/* [Note: denormal numbers]
   A sum must have the same bits on whichever thread and rank it runs, but torch.set_flush_denormal() changes how the processor
   treats denormal numbers on the thread that calls it alone. So arithmetic runs with denormal numbers as they are:
   gz_keep_denormals() sets that for this thread, and gz_restore() takes back what it returned. */
#if defined(__x86_64__)
#include <xmmintrin.h>
#define GZ_FLUSHES 0x8040u /* flush to zero, denormals are zero */
static inline unsigned long long gz_read_mode(void) { return _mm_getcsr(); }
static inline void gz_write_mode(unsigned long long mode) { _mm_setcsr((unsigned)mode); }
#elif defined(__aarch64__)
#define GZ_FLUSHES 0x1080000u /* FZ, FZ16 */
static inline unsigned long long gz_read_mode(void) {
    unsigned long long mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static inline void gz_write_mode(unsigned long long mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
#define GZ_FLUSHES 0u
static inline unsigned long long gz_read_mode(void) { return 0; }
static inline void gz_write_mode(unsigned long long mode) { (void)mode; }
#endif
static inline unsigned long long gz_keep_denormals(void) {
    const unsigned long long mode = gz_read_mode();
    if (mode & GZ_FLUSHES) gz_write_mode(mode & ~(unsigned long long)GZ_FLUSHES);
    return mode;
}
static inline void gz_restore(unsigned long long mode) {
    if (mode & GZ_FLUSHES) gz_write_mode(mode);
}

/* dst_k[:] = op over srcs in their order, times scale. A dst may be one of the srcs; apart from that nothing overlaps.
   Addresses are multiples of the element size. */
void gz_reduce(unsigned char *const *dsts, size_t num_dsts, unsigned char *const *srcs, size_t num_srcs,
               size_t num_elements, int dtype, int op, double scale);

#endif
