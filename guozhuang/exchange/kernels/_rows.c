/* Finds the rows of a table that are not all zeros; each row is read only up to its first nonzero element. See __init__.py. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#define WORDS 32 /* this many words are tested at once, so that the compiler vectorizes the loop */

/* Return a mask of all bits of the elements in a word but their signs, so that -0.0 counts as zero. */
static uint64_t mask_of(int item_bytes) {
    switch (item_bytes) {
    case 2: return 0x7fff7fff7fff7fffu;
    case 4: return 0x7fffffff7fffffffu;
    default: return 0x7fffffffffffffffu;
    }
}

static int is_used(const unsigned char *row, size_t length, uint64_t mask) {
    uint64_t words[WORDS];
    size_t at = 0;
    for (; at + sizeof words <= length; at += sizeof words) {
        uint64_t any = 0;
        memcpy(words, row + at, sizeof words);
        for (size_t k = 0; k < WORDS; k++) any |= words[k];
        if (any & mask) return 1;
    }
    for (; at < length; at += sizeof *words) {
        const size_t left = length - at;
        words[0] = 0;
        memcpy(words, row + at, left < sizeof *words ? left : sizeof *words);
        if (words[0] & mask) return 1;
    }
    return 0;
}

static PyObject *used(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long table, numbers;
    Py_ssize_t num_rows, row_bytes, found = 0;
    int item_bytes;
    if (!PyArg_ParseTuple(args, "KnniK", &table, &num_rows, &row_bytes, &item_bytes, &numbers)) return NULL;
    if (num_rows < 0 || row_bytes < 1 || (item_bytes != 2 && item_bytes != 4 && item_bytes != 8)) {
        PyErr_SetString(PyExc_ValueError, "rows must have bytes, and elements 2, 4 or 8");
        return NULL;
    }
    const unsigned char *row = (const unsigned char *)(uintptr_t)table;
    int64_t *out = (int64_t *)(uintptr_t)numbers;
    const uint64_t mask = mask_of(item_bytes);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < num_rows; i++, row += row_bytes)
        if (is_used(row, (size_t)row_bytes, mask)) out[found++] = i;
    Py_END_ALLOW_THREADS
    return PyLong_FromSsize_t(found);
}

static PyMethodDef methods[] = {
    {"used", used, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_rows", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rows(void) { return PyModuleDef_Init(&module_definition); }
