/* A table of collectives that were called before: what Python prepared for a call is found by the call's arguments.

   [Note: calls that repeat]
   To check the arguments of a call and to find the program for it costs Python several times what a small call itself costs, and
   a training script makes the same calls in every step. So the job of a call is stored under everything that it depends
   on: the kind of the call, the one-shot area whose turn it is, the operation or the root, and of each tensor the address, the
   number of elements and the dtype. Each call reads all of these again, and whether its tensors are plain: of the class Tensor
   itself, in the memory of the CPU, aligned, contiguous, neither conjugated nor negated, and not over each other, so that no
   copy of them is needed. A call that is not like that, that has a time-out of its own, or that is asynchronous has no key, and
   whatever raises while its arguments are read has none either: the ordinary way then raises what is right. Where the tensors of
   the other ranks lie is no part of the key: the job of a large call compares that each time (`Endpoint.begin_placed`).

   A job is stored when its key comes for the second time: tensors that are new in each step have keys that never come again. */
#include "_repeats.h"

#include <datetime.h>
#include <stdint.h>
#include <string.h>

#define NUM_ENTRIES 2048 /* a power of 2 */
#define MOST_STORED 1536
#define NUM_SEEN 4096 /* a power of 2 */

enum { ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, BARRIER, NUM_KINDS }; /* the order of calls.py */
#define LAST_PLAIN_OP 7 /* of PyTorch's ReduceOp; those after it have more than a number */

typedef struct {
    int64_t kind, turn, op;
    uint64_t addresses[2];
    int64_t lengths[2];
    PyObject *dtype; /* a singleton of torch, which lives as long as the process */
} key;

typedef struct {
    key key;
    PyObject *job; /* NULL: an empty entry */
} entry;

typedef struct {
    PyObject_HEAD
    PyObject *tensor_type, *strided;
    int rank, size;
    int num_stored;
    uint64_t seen[NUM_SEEN]; /* hashes of keys that have come */
    entry entries[NUM_ENTRIES];
} repeats;

enum {
    ASYNC_OP, TIMEOUT, REDUCE_OP, OP, ROOT_RANK, DEVICE, TYPE, IS_CPU, LAYOUT, DTYPE, DATA_PTR, NUMEL, IS_CONTIGUOUS, IS_NEG,
    IS_CONJ, ITEMSIZE, NUM_NAMES
};
static const char *const NAMES[NUM_NAMES] = {"asyncOp",  "timeout", "reduceOp",      "op",     "rootRank", "device",
                                             "type",     "is_cpu",  "layout",        "dtype",  "data_ptr", "numel",
                                             "is_contiguous", "is_neg", "is_conj", "itemsize"};
static PyObject *names[NUM_NAMES];

/* ---- reading a call; 0: it has no key, and an exception may be set ---- */

/* Whether an attribute is this very object, which is borrowed. */
static int is_there(PyObject *object, int name, PyObject *wanted) {
    PyObject *found = PyObject_GetAttr(object, names[name]);
    Py_XDECREF(found);
    return found == wanted;
}

static int returns(PyObject *object, int method, PyObject *wanted) {
    PyObject *found = PyObject_CallMethodNoArgs(object, names[method]);
    Py_XDECREF(found);
    return found == wanted;
}

/* Take over a reference to a number. */
static int number(PyObject *found, int64_t *value) {
    if (found == NULL) return 0;
    *value = PyLong_AsLongLong(found);
    Py_DECREF(found);
    return *value != -1 || !PyErr_Occurred();
}

static int read_tensor(const repeats *self, PyObject *tensor, key *to, int place, int64_t *num_bytes) {
    int64_t address, itemsize;
    if ((PyObject *)Py_TYPE(tensor) != self->tensor_type || !is_there(tensor, IS_CPU, Py_True) ||
        !is_there(tensor, LAYOUT, self->strided) || !returns(tensor, IS_CONTIGUOUS, Py_True) ||
        !returns(tensor, IS_NEG, Py_False) || !returns(tensor, IS_CONJ, Py_False) ||
        !number(PyObject_CallMethodNoArgs(tensor, names[DATA_PTR]), &address) || address == 0 ||
        !number(PyObject_CallMethodNoArgs(tensor, names[NUMEL]), &to->lengths[place]) ||
        !number(PyObject_GetAttr(tensor, names[ITEMSIZE]), &itemsize) || itemsize <= 0 || address % itemsize)
        return 0;
    PyObject *dtype = PyObject_GetAttr(tensor, names[DTYPE]);
    Py_XDECREF(dtype);
    if (dtype == NULL || (place && dtype != to->dtype)) return 0;
    to->dtype = dtype;
    to->addresses[place] = (uint64_t)address;
    *num_bytes = to->lengths[place] * itemsize;
    return 1;
}

/* Whether one tensor, the smaller one, lies apart from the other, or is this rank's part of it. */
static int lie_apart(const repeats *self, uint64_t whole, int64_t whole_bytes, uint64_t part, int64_t part_bytes) {
    if (part >= whole + (uint64_t)whole_bytes || whole >= part + (uint64_t)part_bytes) return 1;
    return part == whole + (uint64_t)(part_bytes * self->rank) && part_bytes * self->size == whole_bytes;
}

static int read_operation(PyObject *options, key *to) {
    PyObject *outer = PyObject_GetAttr(options, names[REDUCE_OP]);
    PyObject *op = outer ? PyObject_GetAttr(outer, names[OP]) : NULL;
    Py_XDECREF(outer);
    PyObject *value = op ? PyNumber_Index(op) : NULL;
    Py_XDECREF(op);
    return number(value, &to->op) && to->op <= LAST_PLAIN_OP;
}

/* Whether a barrier's device is None or the CPU; takes over the reference. */
static int is_of_cpu(PyObject *device) {
    PyObject *type = device && device != Py_None ? PyObject_GetAttr(device, names[TYPE]) : NULL;
    const int is = device == Py_None || (type && PyUnicode_Check(type) && !PyUnicode_CompareWithASCIIString(type, "cpu"));
    Py_XDECREF(device);
    Py_XDECREF(type);
    return is;
}

static int read_options(PyObject *options, key *to) {
    if (!is_there(options, ASYNC_OP, Py_False)) return 0;
    PyObject *timeout = PyObject_GetAttr(options, names[TIMEOUT]);
    const int is_unset = timeout != NULL && PyDelta_Check(timeout) && PyDateTime_DELTA_GET_DAYS(timeout) < 0;
    Py_XDECREF(timeout);
    if (!is_unset) return 0;
    if (to->kind == BROADCAST) return number(PyObject_GetAttr(options, names[ROOT_RANK]), &to->op);
    if (to->kind == BARRIER) return is_of_cpu(PyObject_GetAttr(options, names[DEVICE]));
    return to->kind == ALL_GATHER || read_operation(options, to);
}

static int read_call(const repeats *self, PyObject *args, key *to) {
    const Py_ssize_t num_tensors = to->kind == BARRIER ? 0 : to->kind <= BROADCAST ? 1 : 2;
    int64_t num_bytes[2];
    if (!PyTuple_Check(args) || PyTuple_GET_SIZE(args) != num_tensors + 1) return 0;
    if (!read_options(PyTuple_GET_ITEM(args, num_tensors), to)) return 0;
    if (num_tensors == 1) {
        PyObject *list = PyTuple_GET_ITEM(args, 0);
        return PyList_Check(list) && PyList_GET_SIZE(list) == 1 &&
               read_tensor(self, PyList_GET_ITEM(list, 0), to, 0, &num_bytes[0]);
    }
    for (int i = 0; i < (int)num_tensors; i++)
        if (!read_tensor(self, PyTuple_GET_ITEM(args, i), to, i, &num_bytes[i])) return 0;
    const int whole = to->kind == REDUCE_SCATTER;
    return num_tensors == 0 ||
           lie_apart(self, to->addresses[whole], num_bytes[whole], to->addresses[!whole], num_bytes[!whole]);
}

/* find(kind, turn, args); put(kind, turn, args, job): read the key. -1 with an exception set: arguments that make no sense. */
static int read_key(const repeats *self, PyObject *const *args, key *to) {
    memset(to, 0, sizeof *to);
    to->kind = PyLong_AsLong(args[0]);
    to->turn = PyLong_AsLong(args[1]);
    if (PyErr_Occurred()) return -1;
    if (to->kind < 0 || to->kind >= NUM_KINDS) return PyErr_SetString(PyExc_ValueError, "no such kind of call"), -1;
    const int has_key = read_call(self, args[2], to);
    if (!has_key) PyErr_Clear();
    return has_key;
}

/* ---- the table ---- */

static uint64_t hash_of(const key *of) {
    uint64_t words[sizeof *of / 8], hash = 0x9e3779b97f4a7c15u;
    memcpy(words, of, sizeof words);
    for (size_t i = 0; i < sizeof words / 8; i++) hash = (hash ^ words[i]) * 0xff51afd7ed558ccdu, hash ^= hash >> 32;
    return hash;
}

/* The entry of a key, or the empty one where it belongs. */
static entry *place_of(repeats *self, const key *of, uint64_t hash) {
    for (uint64_t at = hash;; at++) {
        entry *one = &self->entries[at % NUM_ENTRIES];
        if (one->job == NULL || memcmp(&one->key, of, sizeof *of) == 0) return one;
    }
}

static void empty(repeats *self) {
    self->num_stored = 0;
    for (int i = 0; i < NUM_ENTRIES; i++) Py_CLEAR(self->entries[i].job);
}

static PyObject *repeats_find(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    key wanted;
    if (num_args != 3) return PyErr_Format(PyExc_TypeError, "find takes 3 arguments by position (%zd given)", num_args);
    const int has_key = read_key((repeats *)object, args, &wanted);
    if (has_key < 0) return NULL;
    PyObject *job = has_key ? place_of((repeats *)object, &wanted, hash_of(&wanted))->job : NULL;
    return Py_NewRef(job ? job : Py_None);
}

/* memory_of(tensor) -> (address, number of elements, bytes), or None if it is not plain. See [Note: calls that repeat]. */
static PyObject *repeats_memory_of(PyObject *object, PyObject *tensor) {
    key of = {0};
    int64_t num_bytes;
    if (read_tensor((repeats *)object, tensor, &of, 0, &num_bytes))
        return Py_BuildValue("KLL", (unsigned long long)of.addresses[0], (long long)of.lengths[0], (long long)num_bytes);
    PyErr_Clear();
    Py_RETURN_NONE;
}

static PyObject *repeats_put(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    repeats *self = (repeats *)object;
    key wanted;
    if (num_args != 4) return PyErr_Format(PyExc_TypeError, "put takes 4 arguments by position (%zd given)", num_args);
    const int has_key = read_key(self, args, &wanted);
    if (has_key < 0) return NULL;
    if (!has_key) Py_RETURN_FALSE;
    const uint64_t hash = hash_of(&wanted);
    uint64_t *seen = &self->seen[hash % NUM_SEEN];
    if (*seen != hash) {
        *seen = hash;
        Py_RETURN_FALSE;
    }
    if (self->num_stored >= MOST_STORED) empty(self);
    entry *one = place_of(self, &wanted, hash);
    self->num_stored += one->job == NULL;
    one->key = wanted;
    Py_XSETREF(one->job, Py_NewRef(args[3]));
    Py_RETURN_TRUE;
}

/* ---- making and ending ---- */

static void repeats_dealloc(PyObject *object) {
    repeats *self = (repeats *)object;
    PyTypeObject *type = Py_TYPE(object);
    empty(self);
    Py_XDECREF(self->tensor_type);
    Py_XDECREF(self->strided);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *repeats_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    PyObject *tensor_type, *strided;
    int rank, size;
    static char *words[] = {"tensor_type", "strided", "rank", "size", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOii:Repeats", words, &tensor_type, &strided, &rank, &size)) return NULL;
    if (!PyDateTimeAPI) PyDateTime_IMPORT;
    for (int i = 0; i < NUM_NAMES; i++)
        if (names[i] == NULL && (names[i] = PyUnicode_InternFromString(NAMES[i])) == NULL) return NULL;
    if (!PyDateTimeAPI) return NULL;
    repeats *self = (repeats *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->tensor_type = Py_NewRef(tensor_type);
    self->strided = Py_NewRef(strided);
    self->rank = rank;
    self->size = size;
    return (PyObject *)self;
}

static PyMethodDef repeats_methods[] = {
    {"find", (PyCFunction)(void (*)(void))repeats_find, METH_FASTCALL, NULL},
    {"put", (PyCFunction)(void (*)(void))repeats_put, METH_FASTCALL, NULL},
    {"memory_of", repeats_memory_of, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot repeats_slots[] = {
    {Py_tp_new, repeats_new},
    {Py_tp_dealloc, repeats_dealloc},
    {Py_tp_methods, repeats_methods},
    {0, NULL},
};

PyType_Spec gz_repeats_spec = {
    .name = "guozhuang.groups.shared_memory._engine.Repeats",
    .basicsize = sizeof(repeats),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = repeats_slots,
};
