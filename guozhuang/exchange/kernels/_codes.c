/* Codes gradients in two passes over a row or a block: one finds its scale, one writes its code. For arguments see __init__.py.
   Every operation rounds as the torch operations in codecs/quantize8.py, dithering.py and onebit.py do, so bits are equal. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Compile a function for several instruction sets; one is chosen when the library is loaded, which needs ifunc, so glibc. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    __GNUC__ >= 11
#define VERSIONS __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define VERSIONS
#endif

#if defined(__clang__)
#define EACH(n) _Pragma("clang loop vectorize(assume_safety)") for (size_t k = 0; k < (n); k++)
#elif defined(__GNUC__)
#define EACH(n) _Pragma("GCC ivdep") for (size_t k = 0; k < (n); k++)
#else
#define EACH(n) for (size_t k = 0; k < (n); k++)
#endif

#define INLINE static inline __attribute__((always_inline)) /* compiles the function into each version of its caller */
#define LANES 64   /* this many minima and maxima are kept at once, so that the compiler vectorizes the loop */
#define CHUNK 2048 /* this many elements are decoded and added at once, so that they stay in the first-level cache; even */
#define MAX_ROWS 4096

/* The addresses of the first row of numbers and of its code, the steps to the next ones, and the sizes. If `lost` is not NULL,
   the sum of a row and its row of `lost` is coded, and the error of that code is written to `lost`. */
typedef struct {
    float *rows, *lost;
    unsigned char *codes;
    size_t row_step, lost_step, code_step; /* in elements, in elements, in bytes */
    size_t num_rows, length;
} shape;

/* ---- 8 bits per element, from the row's least to its greatest element: codecs/quantize8.py ---------------------------- */

#define LEVELS 255.0f
#define HEADER 8

VERSIONS static void bounds_of(const float *x, size_t n, float *bounds) {
    float low[LANES], high[LANES];
    for (size_t k = 0; k < LANES; k++) low[k] = high[k] = x[0];
    size_t at = 0;
    for (; at + LANES <= n; at += LANES) {
        const float *part = x + at;
        EACH(LANES) {
            const float v = part[k], l = low[k], h = high[k];
            low[k] = v < l ? v : l;
            high[k] = v > h ? v : h;
        }
    }
    for (; at < n; at++) {
        if (x[at] < low[0]) low[0] = x[at];
        if (x[at] > high[0]) high[0] = x[at];
    }
    for (size_t k = 1; k < LANES; k++) {
        if (low[k] < low[0]) low[0] = low[k];
        if (high[k] > high[0]) high[0] = high[k];
    }
    bounds[0] = low[0] + 0.0f; /* turns -0.0 into 0.0 */
    bounds[1] = high[0] + 0.0f;
}

INLINE void scale_and_upper(const float *bounds, float *scale, float *upper) {
    const float low = bounds[0], high = bounds[1];
    float most = fabsf(high) > fabsf(low) ? fabsf(high) : fabsf(low);
    if (most < 1e-7f) most = 1e-7f;
    const float span = high - low + 1e-7f, step = LEVELS / span, limit = 1e38f / most;
    *scale = step < limit ? step : limit;
    *upper = rintf(high * *scale);
}

VERSIONS static void to_bytes(const float *x, size_t n, float scale, float upper, unsigned char *q) {
    const float base = upper - LEVELS;
    EACH(n) {
        const float level = rintf(x[k] * scale), most = (level < upper ? level : upper) - base;
        const float least = most > 0.0f ? most : 0.0f; /* rounding of large numbers may have left 0 .. 255 */
        q[k] = (unsigned char)(int32_t)(least < LEVELS ? least : LEVELS);
    }
}

VERSIONS static void from_bytes(const unsigned char *q, size_t n, float scale, float upper, float *x) {
    const float base = upper - LEVELS;
    EACH(n) x[k] = ((float)(int32_t)q[k] + base) / scale;
}

VERSIONS static void add_bytes(const unsigned char *q, size_t n, float scale, float upper, float *x) {
    const float base = upper - LEVELS;
    EACH(n) x[k] += ((float)(int32_t)q[k] + base) / scale;
}

VERSIONS static void divide(float *x, size_t n, float divisor) {
    EACH(n) x[k] /= divisor;
}

VERSIONS static void add(const float *from, size_t n, float *x) {
    EACH(n) x[k] += from[k];
}

static void minmax8_encode_all(const shape *s) {
    for (size_t i = 0; i < s->num_rows; i++) {
        const float *row = s->rows + i * s->row_step;
        unsigned char *code = s->codes + i * s->code_step;
        float bounds[2], scale, upper;
        bounds_of(row, s->length, bounds);
        scale_and_upper(bounds, &scale, &upper);
        memcpy(code, bounds, HEADER);
        to_bytes(row, s->length, scale, upper, code + HEADER);
    }
}

static void minmax8_decode_all(const shape *s) {
    for (size_t i = 0; i < s->num_rows; i++) {
        const unsigned char *code = s->codes + i * s->code_step;
        float bounds[2], scale, upper;
        memcpy(bounds, code, HEADER);
        scale_and_upper(bounds, &scale, &upper);
        from_bytes(code + HEADER, s->length, scale, upper, s->rows + i * s->row_step);
    }
}

/* Write one row: the mean of the decoded values of all codes, added in the order of the codes. */
static void minmax8_mean_all(const shape *s) {
    float scales[MAX_ROWS], uppers[MAX_ROWS];
    for (size_t i = 0; i < s->num_rows; i++) {
        float bounds[2];
        memcpy(bounds, s->codes + i * s->code_step, HEADER);
        scale_and_upper(bounds, &scales[i], &uppers[i]);
    }
    for (size_t at = 0, n; at < s->length; at += n) {
        n = s->length - at < CHUNK ? s->length - at : CHUNK;
        for (size_t i = 0; i < s->num_rows; i++) {
            const unsigned char *q = s->codes + i * s->code_step + HEADER + at;
            (i == 0 ? from_bytes : add_bytes)(q, n, scales[i], uppers[i], s->rows + at);
        }
        divide(s->rows + at, n, (float)s->num_rows);
    }
}

/* ---- rounding at random in blocks, whose scale is their greatest magnitude: codecs/dithering.py ------------------------ */

typedef struct {
    int bits, natural; /* bits of an element; whether levels are powers of two */
    size_t block;
    uint32_t seeds[2];
} blocks;

static size_t num_blocks(const shape *s, const blocks *b) { return (s->length + b->block - 1) / b->block; }
static size_t packed_at(const shape *s, const blocks *b) { return (4 * num_blocks(s, b) + 7) / 8 * 8; }

/* Return the random number in [0, 1) that chances() in dithering.py gives at this position: the upper 24 bits of a hash. */
INLINE float chance(uint32_t at, uint32_t first, uint32_t second) {
    uint32_t x = at + first;
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    x ^= x >> 13;
    x += second;
    x *= 0xc2b2ae35u;
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    return (float)(int32_t)(x >> 8) * 0x1p-24f;
}

/* Return the greatest magnitude of a block, found among the bits as integers, which have the same order. */
VERSIONS static float greatest_of(const float *x, size_t n) {
    uint32_t most = 0;
    for (size_t k = 0; k < n; k++) {
        uint32_t bits;
        memcpy(&bits, x + k, sizeof bits);
        bits &= 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    float value;
    memcpy(&value, &most, sizeof value);
    return value;
}

/* Write the level of each element of a block with greatest magnitude `most`: integers from 1 to 2 count + 1. */
VERSIONS static void dither(const float *x, size_t n, float most, float count, uint32_t at, uint32_t first,
                            uint32_t second, unsigned char *levels) {
    const float least = 0x1p-126f, divisor = most < least ? least : most;
    EACH(n) {
        float level = floorf(x[k] / divisor * count + chance(at + (uint32_t)k, first, second));
        level = level > count ? count : level;
        level = level < -count ? -count : level;
        levels[k] = (unsigned char)(int32_t)(level + (count + 1.0f));
    }
}

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Write levels as dither() does, but for magnitudes that are 0 and powers of two. A magnitude is 1.fraction times the level
   just below it, unless it is less than the least level, 2^(1 - count): then it lies between 0 and that level. */
VERSIONS static void dither_naturally(const float *x, size_t n, float most, float count, uint32_t at, uint32_t first,
                                      uint32_t second, unsigned char *levels) {
    const float least = 0x1p-126f, divisor = most < least ? least : most;
    const int32_t top = (int32_t)count;
    const float smallest = float_of((uint32_t)(128 - top) << 23);
    EACH(n) {
        const float value = x[k] / divisor, drawn = chance(at + (uint32_t)k, first, second);
        const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
        const int32_t lower = (int32_t)(magnitude >> 23) - 127 + top;
        const float fraction = float_of((magnitude & 0x7fffffu) | 0x3f800000u) - 1.0f;
        const int32_t above = drawn < fraction, small = drawn < float_of(magnitude) / smallest;
        int32_t level = lower >= 1 ? lower + above : small;
        level = level > top ? top : level;
        levels[k] = (unsigned char)((bits >> 31 ? -level : level) + top + 1);
    }
}

/* Return the value of a level, from -top to top, as a share of the greatest magnitude. */
INLINE float power_of(int32_t level, int32_t top) {
    const int32_t size = level < 0 ? -level : level;
    const float power = float_of((uint32_t)(size - top + 127) << 23), value = size == 0 ? 0.0f : power;
    return level < 0 ? -value : value;
}

/* Replace levels by their values, as shares of the greatest magnitude. */
VERSIONS static void to_powers(float *levels, size_t n, float count) {
    const int32_t top = (int32_t)count;
    EACH(n) levels[k] = power_of((int32_t)levels[k], top);
}

VERSIONS static void pack4(const unsigned char *levels, size_t num_bytes, unsigned char *packed) {
    EACH(num_bytes) packed[k] = (unsigned char)(levels[2 * k] << 4 | levels[2 * k + 1]);
}

VERSIONS static void pack2(const unsigned char *l, size_t num_bytes, unsigned char *packed) {
    EACH(num_bytes)
        packed[k] = (unsigned char)(l[4 * k] << 6 | l[4 * k + 1] << 4 | l[4 * k + 2] << 2 | l[4 * k + 3]);
}

/* Unpack the bytes of a block, two levels in each, to levels from -count to count. */
VERSIONS static void unpack4(const unsigned char *packed, size_t num_bytes, float zero, float *levels) {
    EACH(num_bytes) {
        levels[2 * k] = (float)(int32_t)(packed[k] >> 4) - zero;
        levels[2 * k + 1] = (float)(int32_t)(packed[k] & 15) - zero;
    }
}

VERSIONS static void unpack_any(const unsigned char *packed, size_t num_bytes, int bits, float zero, float *levels) {
    const int each = 8 / bits, mask = (1 << bits) - 1;
    for (size_t k = 0; k < num_bytes; k++)
        for (int i = 0; i < each; i++)
            levels[k * (size_t)each + (size_t)i] = (float)(packed[k] >> bits * (each - 1 - i) & mask) - zero;
}

VERSIONS static void store_levels(const float *levels, size_t n, float count, float scale, float *x) {
    EACH(n) x[k] = levels[k] / count * scale;
}

VERSIONS static void add_levels(const float *levels, size_t n, float count, float scale, float *x) {
    EACH(n) x[k] += levels[k] / count * scale;
}

VERSIONS static void sum_of(const float *x, const float *y, size_t n, float *sum) {
    EACH(n) sum[k] = x[k] + y[k];
}

VERSIONS static void keep_levels(const float *x, const unsigned char *levels, size_t n, float count, float scale,
                                 float *lost) {
    EACH(n) lost[k] = x[k] - ((float)(int32_t)levels[k] - (count + 1.0f)) / count * scale;
}

VERSIONS static void keep_powers(const float *x, const unsigned char *levels, size_t n, float count, float scale,
                                 float *lost) {
    const int32_t top = (int32_t)count;
    EACH(n) lost[k] = x[k] - power_of((int32_t)levels[k] - top - 1, top) * scale;
}

static void dither_encode_all(const shape *s, const blocks *b, float *room) {
    const float count = (float)((1 << (b->bits - 1)) - 1);
    const size_t whole = num_blocks(s, b), num_bytes = b->block * (size_t)b->bits / 8;
    unsigned char *levels = (unsigned char *)(room + b->block);
    for (size_t i = 0; i < s->num_rows; i++) {
        const float *row = s->rows + i * s->row_step;
        unsigned char *code = s->codes + i * s->code_step, *packed = code + packed_at(s, b);
        for (size_t j = 0; j < whole; j++) {
            const size_t at = j * b->block, left = s->length - at, n = left < b->block ? left : b->block;
            float *lost = s->lost == NULL ? NULL : s->lost + i * s->lost_step + at;
            const float *from = row + at;
            if (lost != NULL) {
                sum_of(from, lost, n, room);
                from = room;
            }
            const float most = greatest_of(from, n);
            memcpy(code + 4 * j, &most, sizeof most);
            (b->natural ? dither_naturally : dither)(from, n, most, count, (uint32_t)((i * whole + j) * b->block),
                                                     b->seeds[0], b->seeds[1], levels);
            if (lost != NULL) (b->natural ? keep_powers : keep_levels)(from, levels, n, count, most, lost);
            memset(levels + n, (int)count + 1, b->block - n); /* the padding is coded as zeros, without random rounding */
            unsigned char *into = packed + j * num_bytes;
            if (b->bits == 4)
                pack4(levels, num_bytes, into);
            else if (b->bits == 2)
                pack2(levels, num_bytes, into);
            else
                memcpy(into, levels, num_bytes);
        }
    }
}

/* Decode each code into a row of its own or, if `mean`, the mean of all codes into one row. */
static void dither_decode_all(const shape *s, const blocks *b, int mean, float *levels) {
    const float count = (float)((1 << (b->bits - 1)) - 1);
    const size_t whole = num_blocks(s, b), num_bytes = b->block * (size_t)b->bits / 8, begin = packed_at(s, b);
    for (size_t j = 0; j < whole; j++) {
        const size_t at = j * b->block, left = s->length - at, n = left < b->block ? left : b->block;
        for (size_t i = 0; i < s->num_rows; i++) {
            const unsigned char *code = s->codes + i * s->code_step, *packed = code + begin + j * num_bytes;
            float scale;
            memcpy(&scale, code + 4 * j, sizeof scale);
            if (b->bits == 4)
                unpack4(packed, num_bytes, count + 1.0f, levels);
            else
                unpack_any(packed, num_bytes, b->bits, count + 1.0f, levels);
            if (b->natural) to_powers(levels, n, count);
            float *row = s->rows + (mean ? 0 : i * s->row_step) + at;
            (mean && i > 0 ? add_levels : store_levels)(levels, n, b->natural ? 1.0f : count, scale, row);
        }
        if (mean) divide(s->rows + at, n, (float)s->num_rows);
    }
}

/* ---- signs: codecs/onebit.py --------------------------------------------------------------------------------------------- */

/* Return the sum of magnitudes times `power`; the second half is added to the first half, until one element is left. */
VERSIONS static float sum_of_magnitudes(const float *x, size_t n, size_t block, float power, float *room) {
    EACH(n) room[k] = fabsf(x[k]) * power;
    for (size_t k = n; k < block; k++) room[k] = 0.0f;
    for (size_t left = block; left > 1; left -= left / 2) {
        const size_t half = left / 2, kept = left - half;
        EACH(half) room[k] += room[kept + k];
    }
    return room[0];
}

VERSIONS static void pack_signs(const float *x, size_t num_bytes, unsigned char *packed) {
    for (size_t k = 0; k < num_bytes; k++) {
        const float *part = x + 8 * k;
        unsigned byte = 0;
        for (int i = 0; i < 8; i++) byte |= (unsigned)(part[i] < 0.0f) << (7 - i);
        packed[k] = (unsigned char)byte;
    }
}

VERSIONS static void store_signs(const unsigned char *packed, size_t n, float scale, float *x) {
    for (size_t k = 0; k < n / 8; k++)
        for (int i = 0; i < 8; i++) x[8 * k + (size_t)i] = (packed[k] >> (7 - i) & 1) ? -scale : scale;
    for (size_t k = n / 8 * 8; k < n; k++) x[k] = (packed[k / 8] >> (7 - k % 8) & 1) ? -scale : scale;
}

VERSIONS static void keep_signs(const float *x, size_t n, float scale, float *lost) {
    EACH(n) lost[k] = x[k] - (x[k] < 0.0f ? -scale : scale);
}

static float mean_magnitude(const float *x, size_t n, size_t block, float *room) {
    const float mean = sum_of_magnitudes(x, n, block, 1.0f, room) / (float)n;
    if (isfinite(mean)) return mean;
    const float again = sum_of_magnitudes(x, n, block, 0x1p-64f, room) / (float)n * 0x1p64f;
    return again > FLT_MAX ? FLT_MAX : again;
}

static void signs_encode_all(const shape *s, const blocks *b, int scaling, float *room) {
    const size_t whole = num_blocks(s, b), num_bytes = b->block / 8, begin = packed_at(s, b);
    for (size_t i = 0; i < s->num_rows; i++) {
        const float *row = s->rows + i * s->row_step;
        unsigned char *code = s->codes + i * s->code_step;
        for (size_t j = 0; j < whole; j++) {
            const size_t at = j * b->block, left = s->length - at, n = left < b->block ? left : b->block;
            float *lost = s->lost == NULL ? NULL : s->lost + i * s->lost_step + at, *copy = room + b->block;
            const float *from = row + at;
            if (lost != NULL) {
                sum_of(from, lost, n, copy);
                from = copy;
            } else if (n < b->block) {
                memcpy(copy, from, n * sizeof *copy);
                from = copy;
            }
            const float scale = scaling ? mean_magnitude(from, n, b->block, room) : 1.0f;
            memcpy(code + 4 * j, &scale, sizeof scale);
            if (lost != NULL) keep_signs(from, n, scale, lost);
            if (n < b->block) memset(copy + n, 0, (b->block - n) * sizeof *copy); /* the padding is coded as positive */
            pack_signs(from, num_bytes, code + begin + j * num_bytes);
        }
    }
}

static void signs_decode_all(const shape *s, const blocks *b, int mean, float *room) {
    const size_t whole = num_blocks(s, b), num_bytes = b->block / 8, begin = packed_at(s, b);
    for (size_t j = 0; j < whole; j++) {
        const size_t at = j * b->block, left = s->length - at, n = left < b->block ? left : b->block;
        for (size_t i = 0; i < s->num_rows; i++) {
            const unsigned char *code = s->codes + i * s->code_step;
            float scale, *row = s->rows + (mean ? 0 : i * s->row_step) + at;
            memcpy(&scale, code + 4 * j, sizeof scale);
            const int adds = mean && i > 0;
            store_signs(code + begin + j * num_bytes, n, scale, adds ? room : row);
            if (adds) add(room, n, row);
        }
        if (mean) divide(s->rows + at, n, (float)s->num_rows);
    }
}

/* ---- the module and its function `code` ------------------------------------------------------------------------------- */

enum { MINMAX8, DITHER, SIGNS, SIGNS_ALONE, DITHER_NATURALLY, NUM_KINDS };
enum { ENCODE, DECODE, MEAN, NUM_TASKS };

static void work(const shape *s, const blocks *b, int kind, int task, float *room) {
    if (kind == MINMAX8)
        (task == ENCODE ? minmax8_encode_all : task == DECODE ? minmax8_decode_all : minmax8_mean_all)(s);
    else if ((kind == DITHER || kind == DITHER_NATURALLY) && task == ENCODE)
        dither_encode_all(s, b, room);
    else if (kind == DITHER || kind == DITHER_NATURALLY)
        dither_decode_all(s, b, task == MEAN, room);
    else if (task == ENCODE)
        signs_encode_all(s, b, kind == SIGNS, room);
    else
        signs_decode_all(s, b, task == MEAN, room);
}

static PyObject *code(PyObject *module, PyObject *args) {
    (void)module;
    int kind, task;
    unsigned long long rows, lost, codes, first, second;
    Py_ssize_t row_step, lost_step, code_step, num_rows, length, block;
    shape s;
    blocks b;
    if (!PyArg_ParseTuple(args, "ii(Kn)(Kn)(Kn)nn(inKK)", &kind, &task, &rows, &row_step, &codes, &code_step, &lost,
                          &lost_step, &num_rows, &length, &b.bits, &block, &first, &second))
        return NULL;
    if (kind < 0 || kind >= NUM_KINDS || task < 0 || task >= NUM_TASKS || num_rows < 1 || num_rows > MAX_ROWS ||
        length < 1 || row_step < 0 || lost_step < 0 || (lost != 0 && (task != ENCODE || kind == MINMAX8)) || code_step < 0 || block < 8 || block % 8 != 0 ||
        (b.bits != 1 && b.bits != 2 && b.bits != 4 && b.bits != 8)) {
        PyErr_SetString(PyExc_ValueError, "no such code: kind, task, lost, rows, length, bits and block must be in range");
        return NULL;
    }
    s.rows = (float *)(uintptr_t)rows;
    s.lost = (float *)(uintptr_t)lost;
    s.codes = (unsigned char *)(uintptr_t)codes;
    s.row_step = (size_t)row_step, s.lost_step = (size_t)lost_step, s.code_step = (size_t)code_step;
    s.num_rows = (size_t)num_rows, s.length = (size_t)length;
    b.natural = kind == DITHER_NATURALLY;
    b.block = (size_t)block, b.seeds[0] = (uint32_t)first, b.seeds[1] = (uint32_t)second;
    float *room = PyMem_Malloc(2 * b.block * sizeof *room);
    if (room == NULL) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    work(&s, &b, kind, task, room);
    Py_END_ALLOW_THREADS
    PyMem_Free(room);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"code", code, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_codes", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__codes(void) { return PyModuleDef_Init(&module_definition); }
