/* Barriers of processes that share memory: a sequence word per rank, a bounded spin, then a futex.

   [Note: memory order]
   A rank's words are written by that rank alone, so there are no read-modify-writes: only loads, stores and fences.

   (a) arrive: the store of `arrived` is a RELEASE. What the rank wrote before (data, descriptor) is visible to whoever
       sees the new number, and what it read before has been read: a peer may overwrite it after the barrier.
   (b) see: the load of a peer's `arrived` that satisfies a wait is an ACQUIRE. Reads after the barrier cannot be served
       from before it, and writes after it cannot move before it.
       (a) and (b) cost nothing on x86 (total store order); on aarch64 they are stlr and ldar, and dropping either breaks.
   (c) sleep and wake, Dekker's pattern: the sleeper stores `asleep` then loads `arrived`; the waker stores `arrived` then
       loads `asleep`. If both loads could come before both stores, the waker would see nobody asleep and the sleeper
       nobody arrived, and the wake-up would be lost. A release store and an acquire load do not forbid that, x86
       included (its store buffer lets a load overtake an older store): each side needs a full fence (SEQ_CST) between
       its store and its load. Then at least one of the two sees the other. The kernel closes the rest: FUTEX_WAIT
       compares `arrived` again under the lock that FUTEX_WAKE takes. (A lost wake-up would cost one slice, not a hang.)
       `asleep` itself carries no data: relaxed. A stale value costs one wake-up of nobody.
   (d) state: set_state is a RELEASE after the rank's last arrival, its load an ACQUIRE before a second load of
       `arrived`: whoever sees that a peer left also sees every arrival the peer made. The end of a process (poll) is
       ordered by the kernel in the same way. So a peer counts as gone only if the barrier really lacks it.
   (e) descriptors are plain memory, ordered by (a) and (b) of the barrier between writing and reading.
   (f) `doing` is written and read without order: it is for error texts.

   [Note: one barrier per operation]
   A small operation has a single barrier: ranks write descriptor and data, meet, and read each other's. Then a quick
   rank may begin the next operation while a slow one still reads. It writes to the other slot. To write to this slot
   again it must begin the operation after that, thus have passed the next operation's barrier, at which the slow rank
   arrives only after it finished reading. Two slots are enough, and so are two one-shot areas. */
#define _GNU_SOURCE
#include "_barrier.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SLICE_NS 100000000LL    /* sleep at most this long before looking after the peers */
#define LOOKS_PER_CLOCK 16
#define END_MS 1000 /* how long the end of a process whose memory is gone is waited for */
#define POLL_END (POLLIN | POLLRDHUP | POLLHUP | POLLERR)

static uint32_t *word(const gz_group *group, int rank, int offset) { return (uint32_t *)(group->controls[rank] + offset); }

uint32_t gz_read(const gz_group *group, int rank, int offset) {
    return __atomic_load_n(word(group, rank, offset), __ATOMIC_ACQUIRE);
}

int64_t gz_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* The words lie in memory of several processes: not FUTEX_PRIVATE. */
static void wake_sleepers(uint32_t *arrived) { syscall(SYS_futex, arrived, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

void gz_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory"); /* `yield` is too short on the usual cores */
#endif
}

void gz_prepare(gz_group *group) {
    for (int rank = 0; rank < group->size; rank++) {
        struct stat status;
        struct pollfd *end = &group->ends[rank];
        if (rank == group->rank) end->fd = -1;
        /* A socket with a message waiting is readable and well; a pidfd is readable once the process ended. */
        end->events = end->fd >= 0 && fstat(end->fd, &status) == 0 && S_ISSOCK(status.st_mode) ? POLLRDHUP : POLLIN;
    }
    __atomic_store_n(word(group, group->rank, GZ_MAGIC_OFFSET), GZ_MAGIC, __ATOMIC_RELEASE);
}

void gz_set_state(gz_group *group, uint32_t state) {
    /* See [Note: memory order] (d) */
    __atomic_store_n(word(group, group->rank, GZ_STATE_OFFSET), state, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* before this rank changes memory that a peer may still read */
    wake_sleepers(word(group, group->rank, GZ_ARRIVED_OFFSET)); /* so that they look now, not after their slice */
}

static unsigned char *slot_of(const gz_group *group, int rank) {
    return group->controls[rank] + (group->slot ? GZ_SECOND_DESCRIPTOR_OFFSET : GZ_FIRST_DESCRIPTOR_OFFSET);
}

const unsigned char *gz_description(const gz_group *group, int rank) { return slot_of(group, rank); }

void gz_describe(gz_group *group, const void *descriptor, size_t num_bytes, const void *private, size_t private_bytes) {
    group->slot = !group->slot; /* See [Note: one barrier per operation] */
    unsigned char *slot = slot_of(group, group->rank);
    memcpy(slot, descriptor, num_bytes);
    memset(slot + num_bytes, 0, GZ_DESCRIPTOR_BYTES - num_bytes);
    memcpy(slot + GZ_DESCRIPTOR_BYTES, private, private_bytes);
    memset(slot + GZ_DESCRIPTOR_BYTES + private_bytes, 0, GZ_PRIVATE_BYTES - private_bytes);
}

int gz_compare(gz_group *group) {
    const unsigned char *mine = slot_of(group, group->rank);
    group->num_culprits = 0;
    for (int rank = 0; rank < group->size; rank++) {
        const int same_layout = group->agreed || gz_read(group, rank, GZ_MAGIC_OFFSET) == GZ_MAGIC;
        if (rank == group->rank) continue;
        if (!same_layout || memcmp(mine, slot_of(group, rank), GZ_DESCRIPTOR_BYTES) != 0)
            group->culprits[group->num_culprits++] = rank;
    }
    group->agreed = 1;
    return group->num_culprits ? GZ_DIFFER : GZ_OK;
}

/* Whether a rank has arrived at barrier `target`; numbers wrap around. See [Note: memory order] (b). */
static int has_arrived(const gz_group *group, int rank, uint32_t target) {
    return (int32_t)(gz_read(group, rank, GZ_ARRIVED_OFFSET) - target) >= 0;
}

/* Why a missing rank will not come any more, or GZ_OK. */
static int fate_of(const gz_group *group, int rank, uint32_t target) {
    const int ended = (group->ends[rank].revents & POLL_END) != 0;
    const uint32_t state = gz_read(group, rank, GZ_STATE_OFFSET);
    if (has_arrived(group, rank, target)) return GZ_OK; /* after both of the above: See [Note: memory order] (d) */
    if (state == GZ_HAS_LEFT) return GZ_LEFT;
    if (state == GZ_IS_BROKEN) return GZ_BROKEN;
    return ended ? GZ_LOST : GZ_OK;
}

int gz_why_unread(gz_group *group, int rank) {
    static const int of_state[] = {GZ_UNREAD, GZ_LEFT, GZ_BROKEN};
    group->culprits[0] = rank;
    group->num_culprits = 1;
    /* A process that ends first loses its memory, then tells its end. */
    if (group->ends[rank].fd >= 0 && poll(&group->ends[rank], 1, END_MS) > 0 && (group->ends[rank].revents & POLL_END))
        return GZ_LOST;
    const uint32_t state = gz_read(group, rank, GZ_STATE_OFFSET);
    return state <= GZ_IS_BROKEN ? of_state[state] : GZ_UNREAD;
}

/* What has become of the ranks that are missing at `target`. A lost rank is named before one that left, and that before
   one that only broke because of it. */
static int look_after_peers(gz_group *group, uint32_t target) {
    static const int gravest_first[] = {GZ_LOST, GZ_LEFT, GZ_BROKEN};
    if (poll(group->ends, (nfds_t)group->size, 0) < 0)
        for (int rank = 0; rank < group->size; rank++) group->ends[rank].revents = 0;
    for (int i = 0; i < 3; i++) {
        group->num_culprits = 0;
        for (int rank = 0; rank < group->size; rank++)
            if (rank != group->rank && fate_of(group, rank, target) == gravest_first[i])
                group->culprits[group->num_culprits++] = rank;
        if (group->num_culprits) return gravest_first[i];
    }
    /* Another thread of this rank gave the group back: nobody needs to be waited for. */
    if (gz_read(group, group->rank, GZ_STATE_OFFSET) != GZ_ALIVE) {
        group->culprits[group->num_culprits++] = group->rank;
        return GZ_LEFT;
    }
    return GZ_OK;
}

static int out_of_time(gz_group *group, uint32_t target) {
    group->num_culprits = 0;
    for (int rank = 0; rank < group->size; rank++)
        if (!has_arrived(group, rank, target)) group->culprits[group->num_culprits++] = rank;
    return group->num_culprits ? GZ_LATE : GZ_OK;
}

/* Look for a peer without sleeping, until `*until_ns` (0: not yet begun). Whether it arrived. */
static int spin(const gz_group *group, int peer, uint32_t target, int64_t spin_ns, int64_t *until_ns) {
    for (int looks = 1;; looks++) {
        if (has_arrived(group, peer, target)) return 1;
        gz_relax();
        if (looks % LOOKS_PER_CLOCK) continue;
        const int64_t now = gz_now_ns();
        if (*until_ns == 0) *until_ns = now + spin_ns;
        if (now >= *until_ns) return 0;
        if (now >= *until_ns - spin_ns + group->busy_ns) sched_yield();
    }
}

static int sleep_until(gz_group *group, int peer, uint32_t target, int64_t deadline_ns) {
    uint32_t *asleep = word(group, group->rank, GZ_ASLEEP_OFFSET), *arrived = word(group, peer, GZ_ARRIVED_OFFSET);
    for (int first = 1;; first = 0) {
        const int64_t left = deadline_ns - gz_now_ns();
        if (!first || left <= 0) {
            const int status = look_after_peers(group, target);
            if (status != GZ_OK) return status;
            if (left <= 0) return out_of_time(group, target);
        }
        const int64_t slice = left < SLICE_NS ? left : SLICE_NS;
        const struct timespec limit = {.tv_sec = 0, .tv_nsec = (long)slice};
        /* See [Note: memory order] (c) */
        __atomic_store_n(asleep, (uint32_t)peer + 1, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        const uint32_t seen = __atomic_load_n(arrived, __ATOMIC_ACQUIRE);
        long woken = 0;
        int error = 0;
        if ((int32_t)(seen - target) < 0) {
            woken = syscall(SYS_futex, arrived, FUTEX_WAIT, seen, &limit, NULL, 0);
            error = errno;
        }
        __atomic_store_n(asleep, 0, __ATOMIC_RELAXED);
        if (has_arrived(group, peer, target)) return GZ_OK;
        /* Signal handlers of Python run in the main thread only, whose number is that of the process. */
        if (woken != 0 && (error == EINTR || error == ETIMEDOUT) && syscall(SYS_gettid) == getpid() &&
            group->interrupted(group->context))
            return GZ_INTERRUPTED;
    }
}

int gz_barrier(gz_group *group, int64_t deadline_ns, int64_t spin_ns) {
    uint32_t *mine = word(group, group->rank, GZ_ARRIVED_OFFSET);
    const uint32_t target = __atomic_load_n(mine, __ATOMIC_RELAXED) + 1;
    int64_t spin_until_ns = 0; /* one spin for the whole barrier, however many peers */
    int someone_asleep = 0;
    __atomic_store_n(mine, target, __ATOMIC_RELEASE); /* See [Note: memory order] (a) */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);          /* (c) */
    for (int rank = 0; rank < group->size; rank++)
        someone_asleep |= __atomic_load_n(word(group, rank, GZ_ASLEEP_OFFSET), __ATOMIC_RELAXED) == (uint32_t)group->rank + 1;
    if (someone_asleep) wake_sleepers(mine);
    for (int step = 1; step < group->size; step++) {
        const int peer = (group->rank + step) % group->size; /* not everybody after rank 0 first */
        if (has_arrived(group, peer, target)) continue;
        if (spin_ns > 0 && spin(group, peer, target, spin_ns, &spin_until_ns)) continue;
        const int status = sleep_until(group, peer, target, deadline_ns);
        if (status != GZ_OK) return status;
    }
    return GZ_OK;
}
