/* Messages of sends and receives: for each pair of ranks and each direction a ring in shared memory.

   [Note: memory order of a ring]
   One rank writes a ring and one reads it, each with one thread at a time. `written` and `read` count bytes since the
   beginning. The writer copies a message, then stores `written` (RELEASE); the reader loads it (ACQUIRE), copies the message,
   then stores `read` (RELEASE), and the writer loads that (ACQUIRE) before it writes over the place.

   A rank that is about to sleep in poll() sets its word `asleep` and looks at its rings once more; a writer stores
   `written` and looks at `asleep`. Both have a full fence in between, so that one of them sees the other: see
   [Note: memory order] (c) in _barrier.c. Whoever finds the word set clears it, and sends one byte through the socket of
   the pair, for which the sleeper polls. A writer that finds no room sets `blocked` in the ring in the same way, and
   the reader rings when it has made room. So nobody makes a system call while the other rank is awake. */
#define _GNU_SOURCE
#include "_mail.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "_barrier.h"
#include "_program.h"

#define FIRST_RING_OFFSET 4096 /* the word `asleep` is before */
#define DATA_OFFSET 192
#define BUSY_SPIN_NS 10000 /* of a spin, before each look also offers the core to others */
#define LOOKS_PER_CLOCK 16

typedef struct {
    uint64_t num_bytes; /* of the whole message, a multiple of 8 */
    uint32_t payload_bytes;
    uint8_t kind, dtype;
    int64_t numbers[3];
} header;

/* Each word on a cache line of its own. */
typedef struct {
    _Alignas(64) uint64_t written;
    _Alignas(64) uint64_t read;
    _Alignas(64) uint32_t blocked;
} ring;

typedef struct {
    PyObject_HEAD
    int rank, size, next; /* `next`: whose ring is looked at first */
    uint64_t room;        /* for messages in a ring */
    size_t ring_bytes;
    unsigned char **areas; /* by rank: where it writes */
    int *sockets;          /* by rank */
} mail;

static ring *ring_of(const mail *self, int writer, int reader) {
    return (ring *)(self->areas[writer] + FIRST_RING_OFFSET + self->ring_bytes * (size_t)reader);
}

static uint32_t *asleep_of(const mail *self, int rank) { return (uint32_t *)self->areas[rank]; }

/* Wake a rank if the word says that it waits for this. After the store that it waits for. */
static void wake_if(const mail *self, int rank, uint32_t *word) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(word, __ATOMIC_RELAXED) && __atomic_exchange_n(word, 0, __ATOMIC_RELAXED))
        (void)!send(self->sockets[rank], "!", 1, MSG_DONTWAIT | MSG_NOSIGNAL); /* a full socket wakes as well */
}

static void copy_in(const mail *self, ring *to, uint64_t at, const void *from, size_t num_bytes) {
    unsigned char *data = (unsigned char *)to + DATA_OFFSET;
    const uint64_t start = at % self->room, left = self->room - start;
    memcpy(data + start, from, num_bytes < left ? num_bytes : left);
    if (num_bytes > left) memcpy(data, (const char *)from + left, num_bytes - left);
}

static void copy_out(const mail *self, const ring *from, uint64_t at, void *to, size_t num_bytes) {
    const unsigned char *data = (const unsigned char *)from + DATA_OFFSET;
    const uint64_t start = at % self->room, left = self->room - start;
    memcpy(to, data + start, num_bytes < left ? num_bytes : left);
    if (num_bytes > left) memcpy((char *)to + left, data, num_bytes - left);
}

static int integers(PyObject *const *args, Py_ssize_t num, long long *values) {
    for (Py_ssize_t i = 0; i < num; i++)
        if (gz_integer(args[i], &values[i]) < 0) return -1;
    return 0;
}

static PyObject *mail_put(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    mail *self = (mail *)object;
    long long given[8];
    if (num_args != 8) return PyErr_Format(PyExc_TypeError, "put takes 8 arguments by position (%zd given)", num_args);
    if (integers(args, num_args, given) < 0) return NULL;
    const int peer = (int)given[0];
    header head = {.payload_bytes = (uint32_t)given[7], .kind = (uint8_t)given[1], .dtype = (uint8_t)given[2]};
    memcpy(head.numbers, given + 3, sizeof head.numbers);
    head.num_bytes = (sizeof head + (uint64_t)given[7] + 7) / 8 * 8;
    if (peer < 0 || peer >= self->size || peer == self->rank || given[7] < 0 || head.num_bytes > self->room) {
        gz_invalid("no such rank, or too long a message");
        return NULL;
    }
    ring *to = ring_of(self, self->rank, peer);
    const uint64_t at = to->written;
    for (int look = 0; at + head.num_bytes - __atomic_load_n(&to->read, __ATOMIC_ACQUIRE) > self->room; look++) {
        if (look) Py_RETURN_FALSE;
        __atomic_store_n(&to->blocked, 1, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
    }
    copy_in(self, to, at, &head, sizeof head);
    copy_in(self, to, at + sizeof head, (const void *)(uintptr_t)given[6], (size_t)given[7]);
    __atomic_store_n(&to->written, at + head.num_bytes, __ATOMIC_RELEASE);
    wake_if(self, peer, asleep_of(self, peer));
    Py_RETURN_TRUE;
}

static int has_message(const mail *self, int peer) {
    if (peer == self->rank) return 0;
    const ring *from = ring_of(self, peer, self->rank);
    return __atomic_load_n(&from->written, __ATOMIC_ACQUIRE) != from->read;
}

/* The next rank with a message, in turn; -1: none. */
static int next_with_message(const mail *self) {
    for (int step = 0; step < self->size; step++) {
        const int peer = (self->next + step) % self->size;
        if (has_message(self, peer)) return peer;
    }
    return -1;
}

static PyObject *mail_take(PyObject *object, PyObject *argument) {
    mail *self = (mail *)object;
    long peer = PyLong_AsLong(argument);
    if (peer == -1 && PyErr_Occurred()) return NULL;
    if (peer >= self->size) return gz_invalid("no such rank"), NULL;
    if (peer < 0) peer = next_with_message(self);
    if (peer < 0 || !has_message(self, (int)peer)) Py_RETURN_NONE;
    self->next = ((int)peer + 1) % self->size;
    ring *from = ring_of(self, (int)peer, self->rank);
    const uint64_t at = from->read;
    header head;
    copy_out(self, from, at, &head, sizeof head);
    PyObject *payload = PyBytes_FromStringAndSize(NULL, head.payload_bytes);
    if (payload == NULL) return NULL;
    copy_out(self, from, at + sizeof head, PyBytes_AS_STRING(payload), head.payload_bytes);
    __atomic_store_n(&from->read, at + head.num_bytes, __ATOMIC_RELEASE);
    wake_if(self, (int)peer, &from->blocked);
    return Py_BuildValue("(iiiLLLN)", (int)peer, head.kind, head.dtype, (long long)head.numbers[0],
                         (long long)head.numbers[1], (long long)head.numbers[2], payload);
}

static PyObject *mail_spin(PyObject *object, PyObject *argument) {
    mail *self = (mail *)object;
    const double limit_s = PyFloat_AsDouble(argument);
    if (limit_s == -1.0 && PyErr_Occurred()) return NULL;
    int found;
    Py_BEGIN_ALLOW_THREADS
    const int64_t begin = gz_now_ns();
    for (int looks = 1; !(found = next_with_message(self) >= 0); looks++) {
        gz_relax();
        if (looks % LOOKS_PER_CLOCK) continue;
        const int64_t spent = gz_now_ns() - begin;
        if ((double)spent >= limit_s * 1e9) break;
        if (spent >= BUSY_SPIN_NS) sched_yield();
    }
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(found);
}

static PyObject *mail_arm(PyObject *object, PyObject *unused) {
    (void)unused;
    const mail *self = (mail *)object;
    __atomic_store_n(asleep_of(self, self->rank), 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return PyBool_FromLong(next_with_message(self) >= 0);
}

static void mail_dealloc(PyObject *object) {
    mail *self = (mail *)object;
    PyTypeObject *type = Py_TYPE(object);
    free(self->areas);
    free(self->sockets);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *mail_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    int rank;
    Py_ssize_t ring_bytes;
    PyObject *areas, *sockets;
    static char *names[] = {"rank", "areas", "sockets", "ring_bytes", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iO!O!n:Mail", names, &rank, &PyList_Type, &areas, &PyList_Type,
                                     &sockets, &ring_bytes))
        return NULL;
    const Py_ssize_t size = PyList_GET_SIZE(areas);
    if (rank < 0 || rank >= size || PyList_GET_SIZE(sockets) != size || ring_bytes % 64 || ring_bytes < 1024) {
        gz_invalid("rank must lie in [0, size), rings must have a multiple of 64 bytes, at least 1024");
        return NULL;
    }
    mail *self = (mail *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->rank = rank;
    self->size = (int)size;
    self->ring_bytes = (size_t)ring_bytes;
    self->room = (uint64_t)ring_bytes - DATA_OFFSET;
    self->areas = calloc((size_t)size, sizeof *self->areas);
    self->sockets = calloc((size_t)size, sizeof *self->sockets);
    if (!self->areas || !self->sockets) PyErr_NoMemory();
    for (Py_ssize_t peer = 0; peer < size && !PyErr_Occurred(); peer++) {
        long long address = 0, descriptor = 0;
        gz_integer(PyList_GET_ITEM(areas, peer), &address);
        if (!PyErr_Occurred()) gz_integer(PyList_GET_ITEM(sockets, peer), &descriptor);
        self->areas[peer] = (unsigned char *)(uintptr_t)address;
        self->sockets[peer] = (int)descriptor;
    }
    if (!PyErr_Occurred()) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static PyMethodDef mail_methods[] = {
    {"put", (PyCFunction)(void (*)(void))mail_put, METH_FASTCALL, NULL},
    {"take", mail_take, METH_O, NULL},
    {"spin", mail_spin, METH_O, NULL},
    {"arm", mail_arm, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot mail_slots[] = {
    {Py_tp_new, mail_new},
    {Py_tp_dealloc, mail_dealloc},
    {Py_tp_methods, mail_methods},
    {0, NULL},
};

PyType_Spec gz_mail_spec = {
    .name = "guozhuang.groups.shared_memory._engine.Mail",
    .basicsize = sizeof(mail),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = mail_slots,
};
