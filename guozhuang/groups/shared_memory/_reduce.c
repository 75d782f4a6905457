/* Element-wise reductions: one small loop per type and operation, which the compiler vectorises, over blocks that stay
   in the first-level cache.

   [Note: in place]
   A block is combined source by source into an accumulator, and only the last combination writes to the first
   destination; the other destinations are copies of that. So every source has been read, for the whole block, before
   anything is written, and a destination may be any of the sources. Within the last loop element k is read before it is
   written, and no other element depends on it: that is what EACH promises to the compiler, whose own test for overlap
   would send the in-place case to a slow loop. */
#include "_reduce.h"

#include <stdint.h>
#include <string.h>

#define BLOCK_BYTES 8192 /* of one place; two sources, and an accumulator twice as wide for halves, fit in 32 KB */

/* Several versions of a loop, chosen when the library is loaded. Needs ifunc, thus glibc. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    __GNUC__ >= 11 && !defined(GZ_ONE_VERSION)
#define VERSIONS __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define VERSIONS
#endif

#if defined(__clang__)
#define EACH _Pragma("clang loop vectorize(assume_safety)") for (size_t k = 0; k < n; k++)
#elif defined(__GNUC__)
#define EACH _Pragma("GCC ivdep") for (size_t k = 0; k < n; k++)
#else
#define EACH for (size_t k = 0; k < n; k++)
#endif

typedef void (*combine_fn)(void *dst, const void *first, const void *second, size_t n);

#define COMBINE(name, type, expression)                                                       \
    VERSIONS static void name(void *dst, const void *first, const void *second, size_t n) {  \
        type *d = dst;                                                                        \
        const type *p = first, *q = second;                                                   \
        EACH {                                                                                \
            const type a = p[k], b = q[k];                                                    \
            d[k] = (type)(expression);                                                        \
        }                                                                                     \
    }

/* NaN wins, and of equal values the first. `b != b` is false for integers, and drops out. */
#define FOUR(name, type, wrapping)                      \
    COMBINE(name##_sum, wrapping, a + b)                \
    COMBINE(name##_prod, wrapping, WIDE(wrapping, a) * b) \
    COMBINE(name##_min, type, b < a || b != b ? b : a)  \
    COMBINE(name##_max, type, b > a || b != b ? b : a)

/* Unsigned types wrap around; narrow ones are widened to `unsigned`, since the product of two uint16_t as int may not. */
#define WIDE(type, value) _Generic((type)0, uint8_t: (unsigned)(value), uint16_t: (unsigned)(value), default: (value))

FOUR(f32, float, float)
FOUR(f64, double, double)
FOUR(i8, int8_t, uint8_t)
FOUR(u8, uint8_t, uint8_t)
FOUR(i16, int16_t, uint16_t)
FOUR(i32, int32_t, uint32_t)
FOUR(i64, int64_t, uint64_t)
COMBINE(bytes_and, uint8_t, a & b)
COMBINE(bytes_or, uint8_t, a | b)
COMBINE(bytes_xor, uint8_t, a ^ b)

VERSIONS static void f32_scale(void *dst, double scale, size_t n) {
    float *d = dst;
    const float factor = (float)scale;
    EACH d[k] *= factor;
}

VERSIONS static void f64_scale(void *dst, double scale, size_t n) {
    double *d = dst;
    EACH d[k] *= scale;
}

/* Halves by bit arithmetic: the same on every processor, also where denormal numbers are flushed to zero. */
static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float f16_to_f32(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, body = (uint32_t)(half & 0x7fffu) << 13;
    const uint32_t normal = body + (112u << 23); /* the exponent's bias: 127 - 15 */
    const uint32_t infinite = body + (224u << 23); /* exponent 31 becomes 255: infinity and NaN */
    const uint32_t denormal = as_bits(as_float(body + (113u << 23)) - as_float(113u << 23));
    return as_float(sign | (body >= (31u << 23) ? infinite : body < (1u << 23) ? denormal : normal));
}

static inline uint16_t f32_to_f16(float value) {
    const uint32_t bits = as_bits(value), sign = bits >> 16 & 0x8000u, body = bits & 0x7fffffffu;
    const uint32_t infinite = body > (255u << 23) ? 0x7e00u : 0x7c00u;
    /* Adding 0.5 puts the last bit of a denormal half (2^-24) at the last bit of the sum: the addition rounds. */
    const uint32_t denormal = as_bits(as_float(body) + 0.5f) - (126u << 23);
    /* To nearest, ties to even: add just under half of the last bit that stays, and that bit itself. */
    const uint32_t normal = (body - (112u << 23) + 0xfffu + (body >> 13 & 1u)) >> 13;
    return (uint16_t)(sign | (body >= (143u << 23) ? infinite : body < (113u << 23) ? denormal : normal));
}

static inline float bf16_to_f32(uint16_t half) { return as_float((uint32_t)half << 16); }

static inline uint16_t f32_to_bf16(float value) {
    const uint32_t bits = as_bits(value);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > (255u << 23) ? 0x7fc0u : rounded);
}

typedef struct {
    void (*load)(float *acc, const void *src, size_t n);
    void (*add)(float *acc, const void *src, size_t n);
    void (*store)(void *dst, const float *acc, size_t n);
} half_kind;

#define HALF(name)                                                            \
    VERSIONS static void name##_load(float *acc, const void *src, size_t n) {  \
        const uint16_t *s = src;                                              \
        EACH acc[k] = name##_to_f32(s[k]);                                    \
    }                                                                         \
    VERSIONS static void name##_add(float *acc, const void *src, size_t n) {   \
        const uint16_t *s = src;                                              \
        EACH acc[k] += name##_to_f32(s[k]);                                   \
    }                                                                         \
    VERSIONS static void name##_store(void *dst, const float *acc, size_t n) { \
        uint16_t *d = dst;                                                    \
        EACH d[k] = f32_to_##name(acc[k]);                                    \
    }                                                                         \
    static const half_kind name = {name##_load, name##_add, name##_store};

HALF(f16)
HALF(bf16)

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

/* The processor's own conversion, several times as fast; it differs in the payload of NaN only. */
#define F16C_STEP 8
#define F16C __attribute__((target("avx,f16c")))

F16C static void f16c_load(float *acc, const void *src, size_t n) {
    const uint16_t *s = src;
    size_t k = 0;
    for (; k + F16C_STEP <= n; k += F16C_STEP)
        _mm256_storeu_ps(acc + k, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(s + k))));
    for (; k < n; k++) acc[k] = f16_to_f32(s[k]);
}

F16C static void f16c_add(float *acc, const void *src, size_t n) {
    const uint16_t *s = src;
    size_t k = 0;
    for (; k + F16C_STEP <= n; k += F16C_STEP) {
        const __m256 value = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(s + k)));
        _mm256_storeu_ps(acc + k, _mm256_add_ps(_mm256_loadu_ps(acc + k), value));
    }
    for (; k < n; k++) acc[k] += f16_to_f32(s[k]);
}

F16C static void f16c_store(void *dst, const float *acc, size_t n) {
    uint16_t *d = dst;
    size_t k = 0;
    for (; k + F16C_STEP <= n; k += F16C_STEP)
        _mm_storeu_si128((__m128i *)(d + k), _mm256_cvtps_ph(_mm256_loadu_ps(acc + k), _MM_FROUND_TO_NEAREST_INT));
    for (; k < n; k++) d[k] = f32_to_f16(acc[k]);
}

static const half_kind f16c = {f16c_load, f16c_add, f16c_store};

static const half_kind *half_of(int dtype) {
    return dtype == GZ_BF16 ? &bf16 : __builtin_cpu_supports("f16c") ? &f16c : &f16;
}
#else
static const half_kind *half_of(int dtype) { return dtype == GZ_BF16 ? &bf16 : &f16; }
#endif

#define BITWISE bytes_and, bytes_or, bytes_xor
#define WHOLE(name) {name##_sum, name##_prod, name##_min, name##_max, BITWISE}
#define FRACTION(name) {name##_sum, name##_prod, name##_min, name##_max, NULL, NULL, NULL}

static const combine_fn COMBINATIONS[GZ_NUM_DTYPES][GZ_NUM_OPS] = {
    [GZ_F32] = FRACTION(f32), [GZ_F64] = FRACTION(f64),
    [GZ_F16] = FRACTION(f32), [GZ_BF16] = FRACTION(f32), /* halves are combined as float32 */
    [GZ_I8] = WHOLE(i8),      [GZ_U8] = WHOLE(u8),
    [GZ_I16] = WHOLE(i16),    [GZ_I32] = WHOLE(i32),
    [GZ_I64] = WHOLE(i64),    [GZ_BOOL] = {bytes_or, bytes_and, bytes_and, bytes_or, BITWISE},
};

size_t gz_element_bytes(long long dtype) {
    static const unsigned char sizes[GZ_NUM_DTYPES] = {4, 8, 2, 2, 1, 1, 2, 4, 8, 1};
    return dtype >= 0 && dtype < GZ_NUM_DTYPES ? sizes[dtype] : 0;
}

static int is_float(int dtype) { return dtype <= GZ_BF16; }

const char *gz_reduce_refused(long long dtype, long long op, double scale) {
    if (dtype < 0 || dtype >= GZ_NUM_DTYPES) return "no such dtype";
    if (op < 0 || op >= GZ_NUM_OPS) return "no such op";
    if (COMBINATIONS[dtype][op] == NULL) return "bitwise operations are for integers and bool";
    if (scale != 1.0 && !is_float((int)dtype)) return "scale must be 1.0 for integers and bool";
    return NULL;
}

static void reduce_halves(unsigned char *dst, unsigned char *const *srcs, size_t num_srcs, size_t at_bytes, size_t n,
                          int dtype, int op, double scale) {
    _Alignas(64) float acc[BLOCK_BYTES / 2], other[BLOCK_BYTES / 2];
    const half_kind *half = half_of(dtype);
    half->load(acc, srcs[0] + at_bytes, n);
    for (size_t s = 1; s < num_srcs; s++) {
        if (op == GZ_SUM) {
            half->add(acc, srcs[s] + at_bytes, n);
        } else {
            half->load(other, srcs[s] + at_bytes, n);
            COMBINATIONS[GZ_F32][op](acc, acc, other, n);
        }
    }
    if (scale != 1.0) f32_scale(acc, scale, n);
    half->store(dst, acc, n);
}

static void reduce_block(unsigned char *dst, unsigned char *const *srcs, size_t num_srcs, size_t at_bytes, size_t n,
                         int dtype, int op, double scale) {
    _Alignas(64) unsigned char acc[BLOCK_BYTES];
    const size_t num_bytes = n * gz_element_bytes(dtype), count = op >= GZ_BAND ? num_bytes : n;
    const unsigned char *value = srcs[0] + at_bytes;
    for (size_t s = 1; s < num_srcs; s++) {
        unsigned char *into = s == num_srcs - 1 ? dst : acc; /* See [Note: in place] */
        COMBINATIONS[dtype][op](into, value, srcs[s] + at_bytes, count);
        value = into;
    }
    if (value != dst) memcpy(dst, value, num_bytes);
    if (scale != 1.0) (dtype == GZ_F32 ? f32_scale : f64_scale)(dst, scale, n);
}

void gz_reduce(unsigned char *const *dsts, size_t num_dsts, unsigned char *const *srcs, size_t num_srcs,
               size_t num_elements, int dtype, int op, double scale) {
    const size_t element = gz_element_bytes(dtype), block = BLOCK_BYTES / element;
    const int halves = dtype == GZ_F16 || dtype == GZ_BF16;
    if (num_dsts == 0 || num_srcs == 0) return;
    for (size_t start = 0; start < num_elements; start += block) {
        const size_t n = num_elements - start < block ? num_elements - start : block, at = start * element;
        (halves ? reduce_halves : reduce_block)(dsts[0] + at, srcs, num_srcs, at, n, dtype, op, scale);
        for (size_t d = 1; d < num_dsts; d++)
            if (dsts[d] != dsts[0]) memcpy(dsts[d] + at, dsts[0] + at, n * element);
    }
}
