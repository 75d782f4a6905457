/* A program (program.py) as C structures, and the work of one of its rounds. */
#ifndef GUOZHUANG_PROGRAM_H
#define GUOZHUANG_PROGRAM_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sys/types.h>

enum { GZ_COPY, GZ_REDUCE, GZ_READ }; /* StreamKind */

typedef struct {
    long long base, ring_bytes;
} gz_place;

typedef struct {
    long long stage, num_bytes, chunk_bytes, num_chunks;
    size_t first_place, num_dsts, num_srcs; /* in places: destinations, then sources */
    int kind, dtype, op; /* of a READ: `dtype` is the rank whose memory is read */
    double scale;
} gz_stream;

/* Filled anew for each run; the arrays only grow. */
typedef struct {
    gz_stream *streams;
    gz_place *places;
    unsigned char **addresses; /* room for those of one chunk */
    size_t num_streams, num_places, room_streams, room_places, room_addresses;
    long long num_rounds;
    int trailing_barrier;
} gz_program;

/* Set a ValueError; -1. */
int gz_invalid(const char *why);
int gz_integer(PyObject *object, long long *value);

/* Read a Program; -1 with an exception set where it makes no sense. */
int gz_program_read(gz_program *program, PyObject *tuple);

/* Copy from the memory of another process. 0, or -1 if that cannot be read (any more). Needs no GIL. */
int gz_read_process(pid_t pid, void *to, uint64_t from, size_t num_bytes);

/* What this rank does in a round. Needs no GIL. -1, or a rank whose memory could not be read. `pids`: by rank. */
int gz_program_work(const gz_program *program, long long round, const pid_t *pids, int num_ranks);
void gz_program_free(gz_program *program);

/* Whether a stream has a chunk to process in a round. */
static inline int gz_has_chunk(const gz_stream *s, long long round) {
    return round >= s->stage && round - s->stage < s->num_chunks;
}

#endif
