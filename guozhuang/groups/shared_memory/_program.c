/* Reading programs, and doing the work of their rounds. Types and meanings: program.py. */
#define _GNU_SOURCE
#include "_program.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "_reduce.h"

#define LONGEST_READ_BYTES (1u << 30) /* of one system call */
#define RING_SLOTS 3

int gz_invalid(const char *why) {
    PyErr_SetString(PyExc_ValueError, why);
    return -1;
}

/* The array, with room for `needed` items; NULL with an exception set (the array is then as it was). */
static void *grown(void *items, size_t *room, size_t needed, size_t item_bytes) {
    if (needed <= *room) return items;
    void *larger = realloc(items, (needed * 2 + 16) * item_bytes);
    if (larger == NULL) return PyErr_NoMemory();
    *room = needed * 2 + 16;
    return larger;
}

int gz_integer(PyObject *object, long long *value) {
    *value = PyLong_AsLongLong(object);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

static int read_places(gz_program *program, PyObject *tuple, const gz_stream *s) {
    if (!PyTuple_Check(tuple)) return gz_invalid("dsts and srcs must be tuples of Place");
    const long long element = s->kind == GZ_REDUCE ? (long long)gz_element_bytes(s->dtype) : 1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        PyObject *item = PyTuple_GET_ITEM(tuple, i);
        if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 2) return gz_invalid("dsts and srcs must be tuples of Place");
        gz_place *more = grown(program->places, &program->room_places, program->num_places + 1, sizeof(gz_place));
        if (more == NULL) return -1;
        program->places = more;
        gz_place *p = &program->places[program->num_places++];
        if (gz_integer(PyTuple_GET_ITEM(item, 0), &p->base) < 0 || gz_integer(PyTuple_GET_ITEM(item, 1), &p->ring_bytes) < 0)
            return -1;
        if (p->ring_bytes < 0 || p->base % element || p->ring_bytes % element)
            return gz_invalid("base and ring_bytes must be multiples of the element size, ring_bytes not negative");
    }
    return 0;
}

static int read_stream(gz_program *program, PyObject *tuple) {
    long long kind, dtype, op;
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 9) return gz_invalid("streams must be a tuple of Stream");
    gz_stream *more = grown(program->streams, &program->room_streams, program->num_streams + 1, sizeof(gz_stream));
    if (more == NULL) return -1;
    program->streams = more;
    gz_stream *s = &program->streams[program->num_streams];
    if (gz_integer(PyTuple_GET_ITEM(tuple, 0), &kind) < 0 || gz_integer(PyTuple_GET_ITEM(tuple, 1), &s->stage) < 0 ||
        gz_integer(PyTuple_GET_ITEM(tuple, 2), &s->num_bytes) < 0 ||
        gz_integer(PyTuple_GET_ITEM(tuple, 3), &s->chunk_bytes) < 0 ||
        gz_integer(PyTuple_GET_ITEM(tuple, 6), &dtype) < 0 || gz_integer(PyTuple_GET_ITEM(tuple, 7), &op) < 0)
        return -1;
    s->scale = PyFloat_AsDouble(PyTuple_GET_ITEM(tuple, 8));
    if (s->scale == -1.0 && PyErr_Occurred()) return -1;
    if (kind != GZ_COPY && kind != GZ_REDUCE && kind != GZ_READ) return gz_invalid("no such kind of stream");
    if (s->stage < 0 || s->num_bytes < 0 || s->chunk_bytes <= 0)
        return gz_invalid("stage and num_bytes must not be negative, chunk_bytes must be positive");
    if (kind == GZ_REDUCE) {
        const char *refused = gz_reduce_refused(dtype, op, s->scale);
        if (refused) return gz_invalid(refused);
        const long long element = (long long)gz_element_bytes(dtype);
        if (s->num_bytes % element || s->chunk_bytes % element)
            return gz_invalid("num_bytes and chunk_bytes of a reduction must be multiples of the element size");
    }
    s->kind = (int)kind;
    s->dtype = (int)dtype;
    s->op = (int)op;
    s->num_chunks = s->num_bytes / s->chunk_bytes + (s->num_bytes % s->chunk_bytes != 0);
    s->first_place = program->num_places;
    if (read_places(program, PyTuple_GET_ITEM(tuple, 4), s) < 0) return -1;
    s->num_dsts = program->num_places - s->first_place;
    if (read_places(program, PyTuple_GET_ITEM(tuple, 5), s) < 0) return -1;
    s->num_srcs = program->num_places - s->first_place - s->num_dsts;
    if (s->num_dsts == 0 || s->num_srcs == 0 || (kind != GZ_REDUCE && (s->num_dsts != 1 || s->num_srcs != 1)))
        return gz_invalid("a copy or read has one dst and one src, a reduction at least one of each");
    program->num_streams++;
    return 0;
}

int gz_program_read(gz_program *program, PyObject *tuple) {
    program->num_streams = program->num_places = 0;
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 3 || !PyTuple_Check(PyTuple_GET_ITEM(tuple, 0)))
        return gz_invalid("a Program is needed");
    PyObject *streams = PyTuple_GET_ITEM(tuple, 0), *rounds = PyTuple_GET_ITEM(tuple, 1);
    long long needed = 1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(streams); i++) {
        if (read_stream(program, PyTuple_GET_ITEM(streams, i)) < 0) return -1;
        const gz_stream *s = &program->streams[i];
        if (s->num_chunks && s->num_chunks + s->stage > needed) needed = s->num_chunks + s->stage;
    }
    program->num_rounds = needed;
    if (rounds != Py_None) {
        if (gz_integer(rounds, &program->num_rounds) < 0) return -1;
        if (program->num_rounds < needed) return gz_invalid("num_rounds is less than the streams need");
    }
    unsigned char **more = grown(program->addresses, &program->room_addresses, program->num_places + 1, sizeof *more);
    if (more == NULL) return -1;
    program->addresses = more;
    program->trailing_barrier = PyObject_IsTrue(PyTuple_GET_ITEM(tuple, 2));
    return program->trailing_barrier < 0 ? -1 : 0;
}

int gz_read_process(pid_t pid, void *to, uint64_t from, size_t num_bytes) {
    while (num_bytes) {
        const size_t wanted = num_bytes < LONGEST_READ_BYTES ? num_bytes : LONGEST_READ_BYTES;
        const struct iovec here = {to, wanted}, there = {(void *)(uintptr_t)from, wanted};
        const ssize_t done = process_vm_readv(pid, &here, 1, &there, 1, 0);
        if (done <= 0) return -1;
        to = (char *)to + done;
        from += (uint64_t)done;
        num_bytes -= (size_t)done;
    }
    return 0;
}

/* Whether it could be done. */
static int work_on_chunk(const gz_program *program, const gz_stream *s, long long chunk, const pid_t *pids, int num_ranks) {
    const long long done = chunk * s->chunk_bytes, left = s->num_bytes - done;
    const size_t num_bytes = (size_t)(left < s->chunk_bytes ? left : s->chunk_bytes);
    const gz_place *places = program->places + s->first_place;
    unsigned char **at = program->addresses;
    for (size_t i = 0; i < s->num_dsts + s->num_srcs; i++)
        at[i] = (unsigned char *)(uintptr_t)(places[i].base +
                                             (places[i].ring_bytes ? chunk % RING_SLOTS * places[i].ring_bytes : done));
    if (s->kind == GZ_REDUCE)
        gz_reduce(at, s->num_dsts, at + s->num_dsts, s->num_srcs, num_bytes / gz_element_bytes(s->dtype), s->dtype, s->op,
                  s->scale);
    else if (s->kind == GZ_READ)
        return s->dtype >= 0 && s->dtype < num_ranks &&
               gz_read_process(pids[s->dtype], at[0], (uint64_t)(uintptr_t)at[1], num_bytes) == 0;
    else if (at[0] != at[1])
        memcpy(at[0], at[1], num_bytes);
    return 1;
}

int gz_program_work(const gz_program *program, long long round, const pid_t *pids, int num_ranks) {
    const unsigned long long mode = gz_keep_denormals(); /* See [Note: denormal numbers] in _reduce.h */
    int unread = -1;
    for (size_t i = 0; i < program->num_streams && unread < 0; i++) {
        const gz_stream *s = &program->streams[i];
        if (gz_has_chunk(s, round) && !work_on_chunk(program, s, round - s->stage, pids, num_ranks))
            unread = s->dtype;
    }
    gz_restore(mode);
    return unread;
}

void gz_program_free(gz_program *program) {
    free(program->streams);
    free(program->places);
    free(program->addresses);
}
