/* In place of pread(2) and pwrite(2) of every spill file of a soak: some calls go wrong, in one of seven ways. In C, so that
 * an engine's thread does not take the interpreter's lock at every call. Which calls go wrong depends on the seed and the
 * number of the call alone; of writes, as of reads, every way has its turn, so that a short soak has them all. Delays pass in
 * virtual time. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "spillway.h"

enum fault { SOUND, SHORT, INTERRUPTED, IO_ERROR, NO_SPACE, OVER_QUOTA, FLIPPED, DELAYED, NUM_FAULTS };

static const int64_t kNanosecondsOfACall = 1000, kNanosecondsOfADelay = 12000000000;
static const uint64_t kSectorBytes = 512, kBlockBytes = 4096;

static uint64_t seed, faulty_per_million;
static _Atomic uint64_t num_calls, num_faulty[2]; /* [direction] */
static _Atomic int64_t num_faults[NUM_FAULTS], nanoseconds;

/* The finaliser of SplitMix64: every value has an image of its own, and neighbours have nothing in common. */
static uint64_t mixed(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

void faulty_begin(uint64_t with_seed, uint64_t per_million) {
  seed = mixed(with_seed), faulty_per_million = per_million;
  num_calls = num_faulty[SPILLWAY_READ] = num_faulty[SPILLWAY_WRITE] = 0;
  nanoseconds = 0;
  for (int fault = 0; fault < NUM_FAULTS; ++fault) num_faults[fault] = 0;
}

/* Calls that ended so; with SOUND those that nothing happened to. */
int64_t faulty_count(int32_t fault) { return num_faults[fault]; }

int64_t faulty_nanoseconds(void) { return nanoseconds; }

static int64_t moved(int32_t direction, int32_t file, void* memory, uint64_t nbytes, uint64_t offset) {
  const ssize_t result = direction == SPILLWAY_WRITE ? pwrite(file, memory, nbytes, (off_t)offset)
                                                     : pread(file, memory, nbytes, (off_t)offset);
  return result < 0 ? -errno : result;
}

static int64_t flipped(int32_t direction, int32_t file, char* memory, uint64_t nbytes, uint64_t offset, uint64_t bit) {
  char* wrong = memory;
  if (direction == SPILLWAY_WRITE) { /* what is written stays as it is: others may still need it */
    wrong = aligned_alloc(kBlockBytes, (nbytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes);
    if (wrong == NULL) abort();
    memcpy(wrong, memory, nbytes);
    wrong[bit / 8 % nbytes] ^= (char)(1 << bit % 8);
  }
  const int64_t result = moved(direction, file, wrong, nbytes, offset);
  if (direction == SPILLWAY_READ && result > 0) memory[bit / 8 % (uint64_t)result] ^= (char)(1 << bit % 8);
  if (wrong != memory) free(wrong);
  return result;
}

/* The ways in turn; each round begins with another one. */
static enum fault next_fault(int32_t direction) {
  const uint64_t num_ways = NUM_FAULTS - 1, turn = num_faulty[direction]++;
  const enum fault fault = (enum fault)(1 + (turn + mixed(seed + turn / num_ways)) % num_ways);
  return direction == SPILLWAY_READ && (fault == NO_SPACE || fault == OVER_QUOTA) ? IO_ERROR : fault;
}

/* spillway_io_call */
int64_t faulty_call(void* context, int32_t direction, int32_t file, void* memory, uint64_t nbytes, uint64_t offset) {
  (void)context;
  const uint64_t number = num_calls++, bit = mixed(seed + 2 * number + 1);
  const enum fault fault = mixed(seed + 2 * number) % 1000000 < faulty_per_million ? next_fault(direction) : SOUND;
  ++num_faults[fault];
  nanoseconds += fault == DELAYED ? kNanosecondsOfADelay : kNanosecondsOfACall;
  switch (fault) {
    case SHORT:
      if (nbytes > kSectorBytes) nbytes = nbytes / 2 / kSectorBytes * kSectorBytes;
      return moved(direction, file, memory, nbytes, offset);
    case INTERRUPTED: return -EINTR;
    case IO_ERROR: return -EIO;
    case NO_SPACE: return -ENOSPC;
    case OVER_QUOTA: return -EDQUOT;
    case FLIPPED: return flipped(direction, file, memory, nbytes, offset, bit);
    default: return moved(direction, file, memory, nbytes, offset);
  }
}
