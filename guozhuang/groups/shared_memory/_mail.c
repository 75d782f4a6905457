/* Messages and large payloads of sends and receives: for each pair of ranks and each direction two rings in shared memory.

   [Note: how a large payload moves]
   A payload passes through its ring in pieces, so that both ranks copy at the same time and what they copy stays in the cache.
   At most one payload is on its way in each direction of a pair. Its position in the stream of all bytes is told by a message
   before; the reader begins there, whatever is left of a payload that one side gave up. The ring has the number of the payload
   in it, so that a reader that has not heard yet that one was given up takes no bytes of the next one for it. The pieces are
   copied by whoever looks for messages, without the GIL. The reader is told the end of a payload as if that were a message.

   [Note: memory order of a ring]
   One rank writes a ring and one reads it, each with one thread at a time. `written` and `read` count bytes since the
   beginning. The writer copies a message, then stores `written` (RELEASE); the reader loads it (ACQUIRE), copies the message,
   then stores `read` (RELEASE), and the writer loads that (ACQUIRE) before it writes over the place.

   A rank that is about to sleep in poll() sets its word `asleep` and looks at its rings once more; a writer stores
   `written` and looks at `asleep`. Both have a full fence in between, so that one of them sees the other: see
   [Note: memory order] (c) in _barrier.c. Whoever finds the word set clears it, and sends one byte through the socket of
   the pair, for which the sleeper polls. A writer that finds no room sets `blocked` in the ring in the same way, and
   the reader rings when it has made room. So nobody makes a system call while the other rank is awake. */
#include "_mail.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "_barrier.h"
#include "_program.h"

#define FIRST_RING_OFFSET 4096 /* the word `asleep` is before */
#define DATA_OFFSET 192
#define LONGEST_PIECE_BYTES 65536
#define SETTLE_NS 20000 /* a thread that does not spin looks for so long whether a payload goes on */
#define LOOKS_PER_CLOCK 16

typedef struct {
    uint64_t num_bytes; /* of the whole message, a multiple of 8 */
    uint32_t payload_bytes;
    uint8_t kind, dtype;
    int64_t numbers[3];
} header;

/* Each rank's words on a cache line of their own. */
typedef struct {
    _Alignas(64) uint64_t written;
    int64_t number; /* of the payload that is written now; stored before its first bytes */
    uint64_t retracted; /* how many sends the writer has given up. See [Note: reading payloads] in messages.py */
    _Alignas(64) uint64_t read;
    _Alignas(64) uint32_t blocked;
} ring;

/* A payload on its way. */
typedef struct {
    unsigned char *address; /* of the next piece */
    uint64_t left;
    int64_t number;
    int is_here, is_push;
} payload;

enum { OFFER = 0, DONE = 3, APART = 6 }; /* kinds of messages: the same numbers as in messages.py */
#define PULLED 128 /* the kind of the message that tells the end of a payload: the same number as in messages.py */

typedef struct {
    PyObject_HEAD
    int rank, size, next; /* `next`: whose ring is looked at first */
    int num_payloads;
    int64_t busy_ns; /* of a spin, before each look also offers the core to others */
    size_t ring_bytes[2];  /* of messages, of payloads */
    unsigned char **areas; /* by rank: where it writes */
    int *sockets;          /* by rank */
    pid_t *pids;           /* by rank */
    payload *payloads;     /* by rank, twice: pulled from there, pushed to it */
} mail;

enum { MESSAGES, PAYLOADS };

static ring *ring_of(const mail *self, int kind, int writer, int reader) {
    const size_t both = self->ring_bytes[MESSAGES] + self->ring_bytes[PAYLOADS];
    return (ring *)(self->areas[writer] + FIRST_RING_OFFSET + both * (size_t)reader + (kind ? self->ring_bytes[MESSAGES] : 0));
}

static uint64_t room_of(const mail *self, int kind) { return self->ring_bytes[kind] - DATA_OFFSET; }

static uint32_t *asleep_of(const mail *self, int rank) { return (uint32_t *)self->areas[rank]; }

/* Wake a rank if the word says that it waits for this. After the store that it waits for. */
static void wake_if(const mail *self, int rank, uint32_t *word) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(word, __ATOMIC_RELAXED) && __atomic_exchange_n(word, 0, __ATOMIC_RELAXED))
        (void)!send(self->sockets[rank], "!", 1, MSG_DONTWAIT | MSG_NOSIGNAL); /* a full socket wakes as well */
}

static void copy_in(ring *to, uint64_t room, uint64_t at, const void *from, size_t num_bytes) {
    unsigned char *data = (unsigned char *)to + DATA_OFFSET;
    const uint64_t start = at % room, left = room - start;
    memcpy(data + start, from, num_bytes < left ? num_bytes : left);
    if (num_bytes > left) memcpy(data, (const char *)from + left, num_bytes - left);
}

static void copy_out(const ring *from, uint64_t room, uint64_t at, void *to, size_t num_bytes) {
    const unsigned char *data = (const unsigned char *)from + DATA_OFFSET;
    const uint64_t start = at % room, left = room - start;
    memcpy(to, data + start, num_bytes < left ? num_bytes : left);
    if (num_bytes > left) memcpy((char *)to + left, data, num_bytes - left);
}

/* ---- payloads ---- */

static ring *ring_of_payload(const mail *self, int peer, const payload *one) {
    return one->is_push ? ring_of(self, PAYLOADS, self->rank, peer) : ring_of(self, PAYLOADS, peer, self->rank);
}

/* How many bytes of a payload can be copied now, at most a piece. */
static uint64_t movable(const mail *self, int peer, const payload *one) {
    if (one->left == 0) return 0;
    const ring *through = ring_of_payload(self, peer, one);
    const uint64_t room = room_of(self, PAYLOADS), piece = room / 4 < LONGEST_PIECE_BYTES ? room / 4 : LONGEST_PIECE_BYTES;
    const uint64_t wanted = one->left < piece ? one->left : piece;
    const uint64_t written = __atomic_load_n(&through->written, __ATOMIC_ACQUIRE);
    if (__atomic_load_n(&through->number, __ATOMIC_RELAXED) != one->number) return 0; /* what was written may be the next one */
    const int64_t there = (int64_t)(written - __atomic_load_n(&through->read, __ATOMIC_ACQUIRE));
    const uint64_t now = one->is_push ? room - (uint64_t)there : there > 0 ? (uint64_t)there : 0;
    return now < wanted ? 0 : wanted; /* whole pieces: less would cost as much */
}

static void stop(mail *self, payload *one) {
    self->num_payloads -= one->is_here;
    one->is_here = 0;
}

static int move(mail *self, int peer, payload *one) {
    const uint64_t num_bytes = movable(self, peer, one), room = room_of(self, PAYLOADS);
    if (num_bytes == 0) return 0;
    ring *through = ring_of_payload(self, peer, one);
    if (one->is_push) {
        copy_in(through, room, through->written, one->address, num_bytes);
        __atomic_store_n(&through->written, through->written + num_bytes, __ATOMIC_RELEASE);
        wake_if(self, peer, asleep_of(self, peer));
    } else {
        copy_out(through, room, through->read, one->address, num_bytes);
        __atomic_store_n(&through->read, through->read + num_bytes, __ATOMIC_RELEASE);
        wake_if(self, peer, &through->blocked);
    }
    one->address += num_bytes;
    one->left -= num_bytes;
    if (one->is_push && one->left == 0) stop(self, one);
    return 1;
}

/* Copy a piece of each payload that can go on, of all peers or (unless -1) of one. Whether there was one. */
static int move_all(mail *self, int peer) {
    int moved = 0;
    for (int i = 0; self->num_payloads && i < 2 * self->size; i++)
        if (self->payloads[i].is_here && (peer < 0 || i / 2 == peer)) moved |= move(self, i / 2, &self->payloads[i]);
    return moved;
}

static int integers(PyObject *const *args, Py_ssize_t num, long long *values) {
    for (Py_ssize_t i = 0; i < num; i++)
        if (gz_integer(args[i], &values[i]) < 0) return -1;
    return 0;
}

/* Write a message with its payload. 0: there is no room, and the reader tells when there is; -1 with an exception set: never. */
static int put(mail *self, int peer, header *head, const void *payload) {
    const uint64_t room = room_of(self, MESSAGES);
    head->num_bytes = (sizeof *head + (uint64_t)head->payload_bytes + 7) / 8 * 8;
    if (head->num_bytes > room) return gz_invalid("no such rank, or too long a message"), -1;
    ring *to = ring_of(self, MESSAGES, self->rank, peer);
    const uint64_t at = to->written;
    for (int look = 0; at + head->num_bytes - __atomic_load_n(&to->read, __ATOMIC_ACQUIRE) > room; look++) {
        if (look) return 0;
        __atomic_store_n(&to->blocked, 1, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
    }
    copy_in(to, room, at, head, sizeof *head);
    copy_in(to, room, at + sizeof *head, payload, head->payload_bytes);
    __atomic_store_n(&to->written, at + head->num_bytes, __ATOMIC_RELEASE);
    wake_if(self, peer, asleep_of(self, peer));
    return 1;
}

/* Read the eight arguments of a message; return the peer, -1 with an exception set if they make no sense. */
static int read_message(const mail *self, PyObject *const *args, header *head, const void **payload) {
    long long given[8]; /* peer, kind, dtype, three numbers, address, bytes */
    if (integers(args, 8, given) < 0) return -1;
    if (given[0] < 0 || given[0] >= self->size || given[0] == self->rank || given[7] < 0 || given[7] > UINT32_MAX)
        return gz_invalid("no such rank, or too long a message"), -1;
    *head = (header){.payload_bytes = (uint32_t)given[7], .kind = (uint8_t)given[1], .dtype = (uint8_t)given[2]};
    memcpy(head->numbers, given + 3, sizeof head->numbers);
    *payload = (const void *)(uintptr_t)given[6];
    return (int)given[0];
}

static PyObject *mail_put(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    mail *self = (mail *)object;
    header head;
    const void *payload;
    if (num_args != 8) return PyErr_Format(PyExc_TypeError, "put takes 8 arguments by position (%zd given)", num_args);
    const int peer = read_message(self, args, &head, &payload);
    const int was_put = peer < 0 ? -1 : put(self, peer, &head, payload);
    return was_put < 0 ? NULL : PyBool_FromLong(was_put);
}

static int has_pulled(const mail *self, int peer) { return self->payloads[2 * peer].is_here && !self->payloads[2 * peer].left; }

static int has_message(const mail *self, int peer) {
    if (peer == self->rank) return 0;
    const ring *from = ring_of(self, MESSAGES, peer, self->rank);
    return __atomic_load_n(&from->written, __ATOMIC_ACQUIRE) != from->read || has_pulled(self, peer);
}

/* The next rank with a message, in turn; -1: none. */
static int next_with_message(const mail *self) {
    for (int step = 0; step < self->size; step++) {
        const int peer = (self->next + step) % self->size;
        if (has_message(self, peer)) return peer;
    }
    return -1;
}

/* Move payloads and look for a message until there is one, or nothing has happened for so long. Without the GIL. */
static int look(mail *self, int64_t limit_ns) {
    int64_t begin = gz_now_ns();
    for (int looks = 1;; looks++) {
        const int moved = move_all(self, -1);
        if (next_with_message(self) >= 0) return 1;
        if (moved) {
            looks = 0;
            begin = gz_now_ns();
            continue;
        }
        gz_relax();
        if (limit_ns > 0 && looks % LOOKS_PER_CLOCK) continue;
        const int64_t spent = gz_now_ns() - begin;
        if (spent >= limit_ns) return 0;
        if (spent >= self->busy_ns) sched_yield();
    }
}

static PyObject *mail_take(PyObject *object, PyObject *argument) {
    mail *self = (mail *)object;
    long peer = PyLong_AsLong(argument);
    if (peer == -1 && PyErr_Occurred()) return NULL;
    if (peer >= self->size) return gz_invalid("no such rank"), NULL;
    if (self->num_payloads && (peer < 0 ? next_with_message(self) < 0 : !has_message(self, (int)peer))) {
        Py_BEGIN_ALLOW_THREADS
        if (peer < 0) look(self, SETTLE_NS);
        else
            while (move_all(self, (int)peer)) continue;
        Py_END_ALLOW_THREADS
    }
    if (peer < 0) peer = next_with_message(self);
    if (peer < 0 || !has_message(self, (int)peer)) Py_RETURN_NONE;
    self->next = ((int)peer + 1) % self->size;
    if (has_pulled(self, (int)peer)) {
        stop(self, &self->payloads[2 * peer]);
        const long long number = self->payloads[2 * peer].number;
        return Py_BuildValue("(iiiLiiy)", (int)peer, PULLED, 0, number, 0, 0, "");
    }
    ring *from = ring_of(self, MESSAGES, (int)peer, self->rank);
    const uint64_t at = from->read, room = room_of(self, MESSAGES);
    header head;
    copy_out(from, room, at, &head, sizeof head);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, head.payload_bytes);
    if (bytes == NULL) return NULL;
    copy_out(from, room, at + sizeof head, PyBytes_AS_STRING(bytes), head.payload_bytes);
    __atomic_store_n(&from->read, at + head.num_bytes, __ATOMIC_RELEASE);
    wake_if(self, (int)peer, &from->blocked);
    return Py_BuildValue("(iiiLLLN)", (int)peer, head.kind, head.dtype, (long long)head.numbers[0],
                         (long long)head.numbers[1], (long long)head.numbers[2], bytes);
}

static PyObject *mail_spin(PyObject *object, PyObject *argument) {
    const double limit_s = PyFloat_AsDouble(argument);
    if (limit_s == -1.0 && PyErr_Occurred()) return NULL;
    int found;
    Py_BEGIN_ALLOW_THREADS
    found = look((mail *)object, (int64_t)(limit_s * 1e9));
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(found);
}

/* ---- one message ---- */

/* Where the rank's next message begins, with its header; NULL: it has none, or the end of a payload is to be told first. */
static ring *next_of(const mail *self, int peer, header *head) {
    ring *from = ring_of(self, MESSAGES, peer, self->rank);
    if (has_pulled(self, peer) || __atomic_load_n(&from->written, __ATOMIC_ACQUIRE) == from->read) return NULL;
    copy_out(from, room_of(self, MESSAGES), from->read, head, sizeof *head);
    return from;
}

static void drop(mail *self, int peer, ring *from, const header *head) {
    __atomic_store_n(&from->read, from->read + head->num_bytes, __ATOMIC_RELEASE);
    wake_if(self, peer, &from->blocked);
}

/* Whether a rank other than the peer has a message, which must not wait for ever behind the peer's. */
static int others_wait(const mail *self, int peer) {
    for (int other = 0; other < self->size; other++)
        if (other != peer && has_message(self, other)) return 1;
    return 0;
}

/* Copy from a peer's memory. Whether all that was copied is what the send had. */
static int fetch(const mail *self, int peer, void *to, uint64_t num_bytes, uint64_t source, uint64_t retracted) {
    const ring *of_peer = ring_of(self, PAYLOADS, peer, self->rank);
    if (gz_read_process(self->pids[peer], to, source, num_bytes) < 0) return 0;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(&of_peer->retracted, __ATOMIC_ACQUIRE) == retracted;
}

/* Look for so long for a message of a peer, and remove it if it is this one. */
static int confirm(mail *self, int peer, int kind, int64_t number, double limit_s) {
    header head;
    Py_BEGIN_ALLOW_THREADS
    look(self, (int64_t)(limit_s * 1e9));
    Py_END_ALLOW_THREADS
    ring *from = next_of(self, peer, &head);
    if (from == NULL || head.kind != kind || head.numbers[0] != number || others_wait(self, peer)) return 0;
    drop(self, peer, from, &head);
    return 1;
}

static PyObject *mail_confirm(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    mail *self = (mail *)object;
    long long given[3]; /* peer, kind, number */
    if (num_args != 4) return PyErr_Format(PyExc_TypeError, "confirm takes 4 arguments by position (%zd given)", num_args);
    const double limit_s = PyFloat_AsDouble(args[3]);
    if (integers(args, 3, given) < 0 || (limit_s == -1.0 && PyErr_Occurred())) return NULL;
    if (given[0] < 0 || given[0] >= self->size || given[0] == self->rank) return gz_invalid("no such rank"), NULL;
    return PyBool_FromLong(confirm(self, (int)given[0], (int)given[1], given[2], limit_s));
}

/* offer(the eight arguments of put, limit_s): None: no room; else whether the peer has all of it already. */
static PyObject *mail_offer(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    mail *self = (mail *)object;
    header head;
    const void *payload;
    if (num_args != 9) return PyErr_Format(PyExc_TypeError, "offer takes 9 arguments by position (%zd given)", num_args);
    const double limit_s = PyFloat_AsDouble(args[8]);
    if (limit_s == -1.0 && PyErr_Occurred()) return NULL;
    const int peer = read_message(self, args, &head, &payload);
    if (peer < 0) return NULL;
    const int was_put = put(self, peer, &head, payload);
    if (was_put < 0) return NULL;
    if (was_put == 0) Py_RETURN_NONE;
    return PyBool_FromLong(confirm(self, peer, DONE, head.numbers[0], limit_s));
}

/* receive(peer, tag, dtype, num_elements, address, num_bytes, limit_s); without the GIL: whether it was received. */
static int receive(mail *self, const long long *given, int64_t limit_ns) {
    const int peer = (int)given[0];
    void *to = (void *)(uintptr_t)given[4];
    const uint64_t num_bytes = (uint64_t)given[5], room = room_of(self, MESSAGES);
    ring *back = ring_of(self, MESSAGES, self->rank, peer);
    header head, answer = {.kind = DONE};
    if (!look(self, limit_ns) || others_wait(self, peer)) return 0;
    ring *from = next_of(self, peer, &head);
    if (from == NULL || (head.kind != OFFER && head.kind != APART) || head.numbers[1] != given[1] || head.dtype != given[2] ||
        head.numbers[2] != given[3] || back->written + sizeof answer - __atomic_load_n(&back->read, __ATOMIC_ACQUIRE) > room)
        return 0;
    if (head.kind == APART) {
        uint64_t place[2]; /* the address, and the number of sends given up */
        copy_out(from, room, from->read + sizeof head, place, sizeof place);
        if (!fetch(self, peer, to, num_bytes, place[0], place[1])) return 0;
    } else {
        if (head.payload_bytes != num_bytes) return 0;
        copy_out(from, room, from->read + sizeof head, to, num_bytes);
    }
    drop(self, peer, from, &head);
    answer.numbers[0] = head.numbers[0];
    return put(self, peer, &answer, &answer); /* of no bytes; there is room */
}

static PyObject *mail_receive(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    mail *self = (mail *)object;
    long long given[6];
    int received;
    if (num_args != 7) return PyErr_Format(PyExc_TypeError, "receive takes 7 arguments by position (%zd given)", num_args);
    const double limit_s = PyFloat_AsDouble(args[6]);
    if (integers(args, 6, given) < 0 || (limit_s == -1.0 && PyErr_Occurred())) return NULL;
    if (given[0] < 0 || given[0] >= self->size || given[0] == self->rank || given[5] < 0) return gz_invalid("no such rank"), NULL;
    Py_BEGIN_ALLOW_THREADS
    received = receive(self, given, (int64_t)(limit_s * 1e9));
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(received);
}

static PyObject *mail_fetch(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    mail *self = (mail *)object;
    long long given[5]; /* peer, address, num_bytes, source, retracted */
    int fetched;
    if (num_args != 5) return PyErr_Format(PyExc_TypeError, "fetch takes 5 arguments by position (%zd given)", num_args);
    if (integers(args, 5, given) < 0) return NULL;
    if (given[0] < 0 || given[0] >= self->size || given[0] == self->rank || given[2] < 0) return gz_invalid("no such rank"), NULL;
    Py_BEGIN_ALLOW_THREADS
    fetched = fetch(self, (int)given[0], (void *)(uintptr_t)given[1], (uint64_t)given[2], (uint64_t)given[3], (uint64_t)given[4]);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(fetched);
}

/* The count of this rank's retracted sends to a peer; NULL with an exception set: there is no such rank. */
static uint64_t *retracted_of(const mail *self, PyObject *argument) {
    const long peer = PyLong_AsLong(argument);
    if (peer == -1 && PyErr_Occurred()) return NULL;
    if (peer < 0 || peer >= self->size || peer == self->rank) return gz_invalid("no such rank"), NULL;
    return &ring_of(self, PAYLOADS, self->rank, (int)peer)->retracted;
}

static PyObject *mail_retracted(PyObject *self, PyObject *peer) {
    const uint64_t *count = retracted_of((mail *)self, peer);
    return count ? PyLong_FromUnsignedLongLong(*count) : NULL;
}

static PyObject *mail_retract(PyObject *self, PyObject *peer) {
    uint64_t *count = retracted_of((mail *)self, peer);
    if (count == NULL) return NULL;
    __atomic_store_n(count, *count + 1, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* before whatever is written where the payload was */
    Py_RETURN_NONE;
}

/* push(peer, number, address, num_bytes) -> position; pull(peer, number, address, num_bytes, position) -> position */
static PyObject *begin_payload(mail *self, PyObject *const *args, Py_ssize_t num_args, int is_push) {
    long long given[5];
    if (num_args != 5 - is_push) return PyErr_Format(PyExc_TypeError, "%d arguments are needed", 5 - is_push);
    if (integers(args, num_args, given) < 0) return NULL;
    const int peer = (int)given[0];
    if (peer < 0 || peer >= self->size || peer == self->rank || given[3] < 0) return gz_invalid("no such rank"), NULL;
    payload *one = &self->payloads[2 * peer + is_push];
    self->num_payloads += (given[3] > 0) - one->is_here;
    *one = (payload){(unsigned char *)(uintptr_t)given[2], (uint64_t)given[3], given[1], given[3] > 0, is_push};
    ring *through = ring_of_payload(self, peer, one);
    if (is_push) __atomic_store_n(&through->number, one->number, __ATOMIC_RELAXED); /* `written` is stored after it */
    else {
        __atomic_store_n(&through->read, (uint64_t)given[4], __ATOMIC_RELEASE);
        wake_if(self, peer, &through->blocked);
    }
    return PyLong_FromUnsignedLongLong(is_push ? through->written : through->read);
}

static PyObject *mail_push(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    return begin_payload((mail *)self, args, num_args, 1);
}

static PyObject *mail_pull(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    return begin_payload((mail *)self, args, num_args, 0);
}

static PyObject *mail_stop(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    mail *self = (mail *)object;
    long long given[3];
    if (num_args != 3) return PyErr_Format(PyExc_TypeError, "stop takes 3 arguments by position (%zd given)", num_args);
    if (integers(args, num_args, given) < 0) return NULL;
    if (given[0] < 0 || given[0] >= self->size) return gz_invalid("no such rank"), NULL;
    payload *one = &self->payloads[2 * given[0] + (given[1] != 0)];
    if (one->number == given[2]) stop(self, one);
    Py_RETURN_NONE;
}

static PyObject *mail_arm(PyObject *object, PyObject *unused) {
    (void)unused;
    const mail *self = (mail *)object;
    __atomic_store_n(asleep_of(self, self->rank), 1, __ATOMIC_RELAXED);
    for (int i = 0; self->num_payloads && i < 2 * self->size; i++)
        if (self->payloads[i].is_here && self->payloads[i].is_push)
            __atomic_store_n(&ring_of(self, PAYLOADS, self->rank, i / 2)->blocked, 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    int found = next_with_message(self) >= 0;
    for (int i = 0; self->num_payloads && i < 2 * self->size; i++)
        found |= self->payloads[i].is_here && movable(self, i / 2, &self->payloads[i]) > 0;
    return PyBool_FromLong(found);
}

static void mail_dealloc(PyObject *object) {
    mail *self = (mail *)object;
    PyTypeObject *type = Py_TYPE(object);
    free(self->areas);
    free(self->sockets);
    free(self->pids);
    free(self->payloads);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *mail_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    int rank;
    Py_ssize_t ring_bytes[2];
    PyObject *areas, *sockets, *pids;
    static char *names[] = {"rank", "areas", "sockets", "message_bytes", "payload_bytes", "pids", "busy_us", NULL};
    double busy_us;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iO!O!nnO!d:Mail", names, &rank, &PyList_Type, &areas, &PyList_Type,
                                     &sockets, &ring_bytes[0], &ring_bytes[1], &PyList_Type, &pids, &busy_us))
        return NULL;
    const Py_ssize_t size = PyList_GET_SIZE(areas);
    int is_right = rank >= 0 && rank < size && PyList_GET_SIZE(sockets) == size && PyList_GET_SIZE(pids) == size;
    for (int kind = 0; kind < 2; kind++) is_right = is_right && ring_bytes[kind] % 64 == 0 && ring_bytes[kind] >= 1024;
    if (!is_right) {
        gz_invalid("rank must lie in [0, size), rings must have a multiple of 64 bytes, at least 1024");
        return NULL;
    }
    mail *self = (mail *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->rank = rank;
    self->busy_ns = (int64_t)(busy_us * 1000);
    self->size = (int)size;
    for (int kind = 0; kind < 2; kind++) self->ring_bytes[kind] = (size_t)ring_bytes[kind];
    self->areas = calloc((size_t)size, sizeof *self->areas);
    self->sockets = calloc((size_t)size, sizeof *self->sockets);
    self->pids = calloc((size_t)size, sizeof *self->pids);
    self->payloads = calloc(2 * (size_t)size, sizeof *self->payloads);
    if (!self->areas || !self->sockets || !self->pids || !self->payloads) PyErr_NoMemory();
    for (Py_ssize_t peer = 0; peer < size && !PyErr_Occurred(); peer++) {
        long long address = 0, descriptor = 0, pid = 0;
        gz_integer(PyList_GET_ITEM(areas, peer), &address);
        if (!PyErr_Occurred()) gz_integer(PyList_GET_ITEM(sockets, peer), &descriptor);
        if (!PyErr_Occurred()) gz_integer(PyList_GET_ITEM(pids, peer), &pid);
        self->pids[peer] = (pid_t)pid;
        self->areas[peer] = (unsigned char *)(uintptr_t)address;
        self->sockets[peer] = (int)descriptor;
    }
    if (!PyErr_Occurred()) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static PyMethodDef mail_methods[] = {
    {"put", (PyCFunction)(void (*)(void))mail_put, METH_FASTCALL, NULL},
    {"offer", (PyCFunction)(void (*)(void))mail_offer, METH_FASTCALL, NULL},
    {"take", mail_take, METH_O, NULL},
    {"push", (PyCFunction)(void (*)(void))mail_push, METH_FASTCALL, NULL},
    {"pull", (PyCFunction)(void (*)(void))mail_pull, METH_FASTCALL, NULL},
    {"confirm", (PyCFunction)(void (*)(void))mail_confirm, METH_FASTCALL, NULL},
    {"receive", (PyCFunction)(void (*)(void))mail_receive, METH_FASTCALL, NULL},
    {"fetch", (PyCFunction)(void (*)(void))mail_fetch, METH_FASTCALL, NULL},
    {"retracted", mail_retracted, METH_O, NULL},
    {"retract", mail_retract, METH_O, NULL},
    {"stop", (PyCFunction)(void (*)(void))mail_stop, METH_FASTCALL, NULL},
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
