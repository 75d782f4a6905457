/* Control pages, barriers and their waits. Knows neither Python nor what the ranks do between barriers. */
#ifndef GUOZHUANG_BARRIER_H
#define GUOZHUANG_BARRIER_H

#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Places in a control page: the same numbers as in engine.py. */
#define GZ_MAGIC 0x475A0001u
#define GZ_MAGIC_OFFSET 0
#define GZ_ARRIVED_OFFSET 64
#define GZ_ASLEEP_OFFSET 128
#define GZ_STATE_OFFSET 192
#define GZ_DOING_OFFSET 256
#define GZ_DOING_BYTES 120
#define GZ_FIRST_DESCRIPTOR_OFFSET 512
#define GZ_SECOND_DESCRIPTOR_OFFSET 1024
#define GZ_DESCRIPTOR_BYTES 256
#define GZ_PRIVATE_BYTES 128

enum { GZ_ALIVE, GZ_HAS_LEFT, GZ_IS_BROKEN }; /* State */
enum { /* Status */
    GZ_OK, GZ_LOST, GZ_LEFT, GZ_BROKEN, GZ_LATE, GZ_DIFFER, GZ_UNREAD, GZ_UNEXPECTED, GZ_INTERRUPTED = -1
};

typedef struct {
    int rank, size;
    unsigned char **controls; /* by rank */
    struct pollfd *ends;      /* by rank: tells when the process ends */
    pid_t *pids;              /* by rank, for reading their memory */
    int slot;                 /* descriptor slot of the current operation */
    int agreed;               /* whether the layouts were compared */
    int64_t busy_ns;          /* of a spin, before each look also offers the core to others */
    int *culprits;            /* ranks behind the last status but GZ_OK, ascending */
    int num_culprits;
    int (*interrupted)(void *); /* called between the slices of a wait in the main thread; not 0 ends the wait */
    void *context;              /* its argument */
} gz_group;

int64_t gz_now_ns(void);
void gz_relax(void); /* between two looks of a spin */

/* Fill in what to ask of each rank's `ends[].fd`, and sign the control page. */
void gz_prepare(gz_group *group);

uint32_t gz_read(const gz_group *group, int rank, int offset);
void gz_set_state(gz_group *group, uint32_t state);

/* Take the other slot and write there what the peers shall see after the next barrier. */
void gz_describe(gz_group *group, const void *descriptor, size_t num_bytes, const void *private, size_t private_bytes);
const unsigned char *gz_description(const gz_group *group, int rank);
/* GZ_OK or GZ_DIFFER. After the first barrier of an operation. */
int gz_compare(gz_group *group);

/* Why the memory of a rank cannot be read: it ended, left or broke the group, or GZ_UNREAD. */
int gz_why_unread(gz_group *group, int rank);

/* Arrive, and wait until all ranks have. Waits at most until `deadline_ns` (of gz_now_ns), looking for `spin_ns` before
   it sleeps. GZ_OK, GZ_LOST, GZ_LEFT, GZ_BROKEN, GZ_LATE or GZ_INTERRUPTED. */
int gz_barrier(gz_group *group, int64_t deadline_ns, int64_t spin_ns);

#endif
