/* Gradients that are mostly zeros, such as those of an embedding: pages of zeros are neither written nor read.
   Meanings and rules: sparse.py. Arithmetic: _reduce.c. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#include "_reduce.h"

#define PAGE 4096
#define MAX_SOURCES 1024

typedef struct {
    unsigned char *dst;
    const unsigned char *src;
    size_t num_bytes;
    unsigned char *marks; /* of the page that dst begins in; NULL for a plain copy */
} piece;

/* Bit patterns decide: -0.0 counts as something. */
static int is_zero(const unsigned char *page) {
    for (size_t at = 0; at < PAGE; at += 64) {
        uint64_t words[8], any = 0;
        memcpy(words, page + at, sizeof words);
        for (int k = 0; k < 8; k++) any |= words[k];
        if (any) return 0;
    }
    return 1;
}

static size_t up_to_page_end(const unsigned char *at, size_t left) {
    const size_t room = PAGE - ((uintptr_t)at & (PAGE - 1));
    return room < left ? room : left;
}

static void take_piece(const piece *p) {
    if (p->marks == NULL) {
        memcpy(p->dst, p->src, p->num_bytes);
        return;
    }
    unsigned char *mark = p->marks;
    for (size_t at = 0, n; at < p->num_bytes; at += n, mark++) {
        n = up_to_page_end(p->dst + at, p->num_bytes - at);
        if (n == PAGE && is_zero(p->src + at)) {
            if (*mark) memset(p->dst + at, 0, PAGE);
            *mark = 0;
        } else {
            memcpy(p->dst + at, p->src + at, n);
            *mark = 1;
        }
    }
}

static int read_piece(PyObject *item, piece *p) {
    unsigned long long dst, src, marks;
    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_ValueError, "a piece is a tuple (dst, src, num_bytes, marks)");
        return -1;
    }
    if (!PyArg_ParseTuple(item, "KKnK", &dst, &src, (Py_ssize_t *)&p->num_bytes, &marks)) return -1;
    p->dst = (unsigned char *)(uintptr_t)dst;
    p->src = (const unsigned char *)(uintptr_t)src;
    p->marks = (unsigned char *)(uintptr_t)marks;
    return 0;
}

static PyObject *take(PyObject *module, PyObject *pieces) {
    (void)module;
    PyObject *items = PySequence_Fast(pieces, "take() wants a sequence of pieces");
    if (items == NULL) return NULL;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(items);
    piece *read = PyMem_Malloc(sizeof(piece) * (size_t)(count ? count : 1));
    if (read == NULL) {
        Py_DECREF(items);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (read_piece(PySequence_Fast_GET_ITEM(items, i), &read[i]) < 0) {
            PyMem_Free(read);
            Py_DECREF(items);
            return NULL;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++) take_piece(&read[i]);
    Py_END_ALLOW_THREADS
    PyMem_Free(read);
    Py_DECREF(items);
    Py_RETURN_NONE;
}

static Py_ssize_t read_addresses(PyObject *tuple, unsigned char **addresses) {
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) < 1 || PyTuple_GET_SIZE(tuple) > MAX_SOURCES) {
        PyErr_SetString(PyExc_ValueError, "sources and marks are tuples of 1 to 1024 addresses");
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        addresses[i] = (unsigned char *)(uintptr_t)PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(tuple, i));
        if (PyErr_Occurred()) return -1;
    }
    return PyTuple_GET_SIZE(tuple);
}

/* Several versions of a loop, chosen when the library is loaded; as in _reduce.c. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    __GNUC__ >= 11
#define VERSIONS __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define VERSIONS
#endif

#define LINE 16 /* floats in 64 bytes */

/* [Note: asking ahead]
   The processor by itself fetches ahead within a page only, so a sum of buffers in memory waits at every page, for every
   source. While a page is summed, the same line of the next page is asked for: a third less time where nothing is in the
   cache. `ahead` says which sources have anything there. */
#if defined(__GNUC__)
typedef float line __attribute__((vector_size(64), aligned(4), may_alias));

VERSIONS static void sum_lines(float *dst, const float *const *srcs, const unsigned char *ahead, size_t count,
                               size_t num_lines, float scale) {
    for (size_t at = 0; at < num_lines * LINE; at += LINE) {
        line total = *(const line *)(srcs[0] + at);
        if (ahead[0]) __builtin_prefetch(srcs[0] + at + PAGE / sizeof(float), 0, 2);
        for (size_t i = 1; i < count; i++) {
            if (ahead[i]) __builtin_prefetch(srcs[i] + at + PAGE / sizeof(float), 0, 2);
            total += *(const line *)(srcs[i] + at);
        }
        *(line *)(dst + at) = total * scale;
    }
}
#endif

static void combine(unsigned char *dst, unsigned char *const *srcs, unsigned char *const *marks, size_t count,
                    size_t num_bytes, size_t element, int dtype, double scale) {
    unsigned char *chosen[MAX_SOURCES], ahead[MAX_SOURCES];
    const unsigned long long mode = gz_keep_denormals(); /* See [Note: denormal numbers] in _reduce.h */
    for (size_t at = 0, page = 0, n; at < num_bytes; at += n, page++) {
        n = up_to_page_end(srcs[0] + at, num_bytes - at);
        const int is_last = at + n == num_bytes;
        size_t k = 0;
        for (size_t i = 0; i < count; i++) {
            if (!marks[i][page]) continue;
            ahead[k] = !is_last && marks[i][page + 1];
            chosen[k++] = srcs[i] + at;
        }
        unsigned char *out = dst + at;
        if (k == 0)
            memset(out, 0, n);
#if defined(__GNUC__)
        else if (dtype == GZ_F32 && n % (LINE * sizeof(float)) == 0)
            sum_lines((float *)(void *)out, (const float *const *)chosen, ahead, k, n / (LINE * sizeof(float)), (float)scale);
#endif
        else
            gz_reduce(&out, 1, chosen, k, n / element, dtype, GZ_SUM, scale);
    }
    gz_restore(mode);
}

static PyObject *add(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long dst;
    PyObject *src_tuple, *mark_tuple;
    Py_ssize_t num_bytes;
    int dtype;
    double scale;
    if (!PyArg_ParseTuple(args, "KOOnid", &dst, &src_tuple, &mark_tuple, &num_bytes, &dtype, &scale)) return NULL;
    const char *why = gz_reduce_refused(dtype, GZ_SUM, scale);
    if (why != NULL) {
        PyErr_SetString(PyExc_ValueError, why);
        return NULL;
    }
    unsigned char *srcs[MAX_SOURCES], *marks[MAX_SOURCES];
    const Py_ssize_t count = read_addresses(src_tuple, srcs);
    if (count < 0) return NULL;
    const Py_ssize_t num_marks = read_addresses(mark_tuple, marks);
    if (num_marks < 0) return NULL;
    const size_t element = gz_element_bytes(dtype);
    if (num_marks != count || num_bytes < 0 || (size_t)num_bytes % element != 0) {
        PyErr_SetString(PyExc_ValueError, "as many marks as sources, and whole elements");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    combine((unsigned char *)(uintptr_t)dst, srcs, marks, (size_t)count, (size_t)num_bytes, element, dtype, scale);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"take", take, METH_O, NULL},
    {"add", add, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_sparse", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__sparse(void) { return PyModuleDef_Init(&module_definition); }
