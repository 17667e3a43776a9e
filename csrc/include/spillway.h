/* Spillway's native functions: a plain C ABI, mirrored by spillway_trainer/kernels/native.py (a contract test compares
 * the two).
 *
 * Rules of this header
 *   - The only state is in opaque handles, in one pool of worker threads (started on first use and again after a fork),
 *     and, once it is attached, in the memory pool of large tensors.
 *   - Every function that can fail returns a spillway_error; spillway_strerror has one plain sentence for each.
 *   - Arrays may have any length and any alignment that their element type allows; lengths count elements.
 *   - Results do not depend on num_threads, on the instruction set, or on how a caller cuts an array.
 *   - During a call the floating-point environment is: round to nearest even, no flush-to-zero, no denormals-are-zero,
 *     exceptions masked; the caller's own is restored on return.
 *   - Only the types below cross this interface: a 32-bit enum value is passed as int32_t.
 */
#ifndef SPILLWAY_H
#define SPILLWAY_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SPILLWAY_ABI_VERSION 9

#if defined(__GNUC__)
#define SPILLWAY_API __attribute__((visibility("default")))
#else
#define SPILLWAY_API
#endif

typedef enum spillway_error {
  SPILLWAY_OK = 0,
  SPILLWAY_BAD_ARGUMENT = 1,
  SPILLWAY_ISA_UNAVAILABLE = 2,
  SPILLWAY_NO_MEMORY = 3,
  SPILLWAY_IO_FAILED = 5,
  SPILLWAY_END_OF_FILE = 6,
  SPILLWAY_CHECKSUM_MISMATCH = 7,
  SPILLWAY_NO_RANDOM_BYTES = 9
} spillway_error;

/* Instruction sets; AUTO is the widest that both the library and the processor have. */
typedef enum spillway_isa {
  SPILLWAY_ISA_AUTO = 0,
  SPILLWAY_ISA_SCALAR = 1,
  SPILLWAY_ISA_AVX2 = 2,
  SPILLWAY_ISA_AVX512 = 3,
  SPILLWAY_ISA_NEON = 4
} spillway_isa;

typedef enum spillway_type {
  SPILLWAY_NONE = 0, /* no array: the pointer is ignored */
  SPILLWAY_FLOAT32 = 1,
  SPILLWAY_BFLOAT16 = 2,
  SPILLWAY_FLOAT16 = 3,
  SPILLWAY_INT8 = 4 /* only for moments: blocks of codes, see spillway_map */
} spillway_type;

SPILLWAY_API int32_t spillway_abi_version(void);

/* One sentence without a full stop; never NULL; static storage. */
SPILLWAY_API const char* spillway_strerror(int32_t error);

/* 1 when this library was built with `isa` and this processor and operating system can run it, else 0. */
SPILLWAY_API int32_t spillway_isa_available(int32_t isa);

/* How a gradient changes a parameter. `p` is the master, `m` and `v` are the first and the second moment. Every
 * operation is rounded once, in this order, without fused multiply-add. For every rule, g = gradient_scale * g comes
 * first.
 *   ADAMW         p = decay * p;  then as ADAM, without its first line
 *   ADAM          g = g + weight_decay * p
 *                 m = beta1 * m + one_minus_beta1 * g;  v = beta2 * v + one_minus_beta2 * (g * g)
 *                 p = p - step_size * (m / (sqrt(v) / sqrt_bias_correction2 + eps))
 *   SGD_MOMENTUM  g = g + weight_decay * p;  m = momentum * m + g;  p = p - step_size * m
 *   LION          p = decay * p;  p = p - step_size * sign(beta1 * m + one_minus_beta1 * g)
 *                 m = beta2 * m + one_minus_beta2 * g
 * sign(x) is 1 above 0 and -1 below; a zero or a NaN is its own sign. SGD_MOMENTUM and LION have no `v`. Moments of a
 * type other than float32 are widened when they are read and rounded once more when they are stored (BFLOAT16 to
 * nearest even, INT8 by spillway_map); p is computed from their values before that rounding. */
typedef enum spillway_rule {
  SPILLWAY_ADAMW = 1,
  SPILLWAY_ADAM = 2,
  SPILLWAY_SGD_MOMENTUM = 3,
  SPILLWAY_LION = 4
} spillway_rule;

/* The float32 scalars of one update; the caller rounds each once from fp64 (reference.py: UpdateScalars). A rule reads
 * only those that its lines name. */
typedef struct spillway_update_scalars {
  float gradient_scale;
  float decay; /* 1 - learning_rate * weight_decay */
  float weight_decay;
  float momentum;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float sqrt_bias_correction2;
  float eps;
  float step_size; /* ADAMW, ADAM: learning_rate / bias_correction1; else the learning rate */
} spillway_update_scalars;

#define SPILLWAY_BLOCK_VALUES 256
#define SPILLWAY_NUM_BUCKETS 3074

/* How a moment of type INT8 is kept: in blocks of BLOCK_VALUES values; the last block holds the rest. A block is its
 * scale (the largest magnitude in it, 4 bytes, float32, at any address) and then one byte per value, the code of the
 * value divided by the scale. So n values take n + 4 * ceil(n / BLOCK_VALUES) bytes. A code stands for values[code] *
 * scale; each operation is rounded once.
 *   The code of x: if |x| is at least 2^-24, t = the bits of |x| minus the bits of 2^-24, plus 2^16; otherwise t = 0 if
 *   x is 0, else 1. bucket = t >> 16 and low = t & 0xFFFF; if x has a minus sign, bucket + NUM_BUCKETS and 0xFFFF - low
 *   instead. code = ((nearest[bucket] + low) >> 16) & 0xFF. So a bucket has one code, and one limit of `low` from which
 *   on the code is the next one.
 * A block of zeros has scale 0 and the codes of 0. A block with an infinity or a NaN has scale 0x7FC00000 and codes
 * whose bits are 0. */
typedef struct spillway_map {
  const float* values;     /* 256 */
  const uint32_t* nearest; /* 2 * NUM_BUCKETS */
} spillway_map;

/* The states of one update, n values each: `p`, `m` and `v` of spillway_rule. */
typedef struct spillway_states {
  float* master;
  void* moment1;
  void* moment2; /* ignored by rules that have no `v` */
} spillway_states;

/* One update. The states are read from `before` and written to `after`: the same arrays (in place), or arrays that
 * overlap none of `before`, which then stay unchanged; arrays that begin at a cache line are written past the cache.
 * `moment_type` is FLOAT32, BFLOAT16 or INT8. For INT8, `maps` has two maps, for `m` and for `v`; otherwise it is
 * ignored. `gradient_type` is FLOAT32, BFLOAT16 or FLOAT16. `out_type` is BFLOAT16 or FLOAT16 (round to nearest even;
 * beyond FLOAT16's range an infinity), FLOAT32 (a copy of p) or NONE. Every NaN that is stored is the quiet NaN
 * 0x7FC00000 (0x7FC0, 0x7E00), because IEEE 754 does not specify payloads. */
SPILLWAY_API int32_t spillway_update(int32_t rule, const spillway_update_scalars* scalars, const spillway_states* before,
                                     const spillway_states* after, int32_t moment_type, const spillway_map* maps,
                                     const void* gradient, int32_t gradient_type, void* out, int32_t out_type,
                                     int64_t n, int32_t isa, int32_t num_threads);

/* accumulator = float(gradient) when `first` is not 0, else accumulator + float(gradient), rounded once. A FLOAT16 NaN
 * becomes the quiet one. */
SPILLWAY_API int32_t spillway_accumulate(float* accumulator, const void* gradient, int32_t gradient_type, int32_t first,
                                         int64_t n, int32_t isa, int32_t num_threads);

#define SPILLWAY_NUM_LIMBS 10

/* The exact sum of squares: sum of limbs[i] * 2^(64 * i - 298). (2^-298 is the square of the smallest denormal; ten limbs
 * hold 2^63 times the square of the largest float32.) Infinities and NaNs are counted in num_non_finite, never summed. */
typedef struct spillway_square_sum {
  uint64_t limbs[SPILLWAY_NUM_LIMBS];
  uint64_t num_non_finite;
} spillway_square_sum;

/* Sets *sum to the sum of squares of `n` values. */
SPILLWAY_API int32_t spillway_sum_squares(spillway_square_sum* sum, const void* values, int32_t type, int64_t n,
                                          int32_t isa, int32_t num_threads);

typedef struct spillway_copy {
  void* dst;
  const void* src;
  uint64_t nbytes;
} spillway_copy;

/* memmove of each element of `copies`, in any order: no destination may overlap another element. */
SPILLWAY_API int32_t spillway_copy_batch(const spillway_copy* copies, int64_t num_copies, int32_t num_threads);

/* CRC-32C (Castagnoli; RFC 3720 B.4) of `nbytes`, continuing from `crc32c` (0 to begin). */
SPILLWAY_API uint32_t spillway_crc32c(uint32_t crc32c, const void* bytes, uint64_t nbytes);

/* CRC-32C of A followed by B, given that of A, that of B, and B's length. */
SPILLWAY_API uint32_t spillway_crc32c_combine(uint32_t crc32c_a, uint32_t crc32c_b, uint64_t nbytes_b);

/* ---- I/O: batches of positional transfers between memory and an open file ---- */

typedef enum spillway_direction { SPILLWAY_READ = 0, SPILLWAY_WRITE = 1 } spillway_direction;

typedef struct spillway_io spillway_io;

/* One transfer. The caller sets the first four fields; `crc32c` is an input of READ (expected) and an output of WRITE;
 * the rest are outputs. */
typedef struct spillway_io_request {
  void* buffer;
  uint64_t nbytes;
  uint64_t offset;
  uint32_t crc32c;
  uint32_t crc32c_found; /* READ: that of the bytes that arrived */
  int32_t error;         /* spillway_error of this request */
  int32_t os_error;      /* errno when error is SPILLWAY_IO_FAILED, else 0 */
  uint64_t error_offset; /* file offset at which the transfer stopped, when error is not SPILLWAY_OK */
} spillway_io_request;

/* Test hook that replaces pread(2) and pwrite(2). Returns bytes moved, or -errno. Called from several threads. */
typedef int64_t (*spillway_io_call)(void* context, int32_t direction, int32_t file, void* buffer, uint64_t nbytes,
                                    uint64_t offset);

/* Moves bytes of the open file descriptor `file`, which stays the caller's and must outlive the handle, by pread and
 * pwrite on at most `queue_depth` threads. `call` is NULL except in fault tests; `context` is passed to it. A child
 * process may continue to use the handle: it gets threads of its own. */
SPILLWAY_API int32_t spillway_io_open(int32_t file, int32_t queue_depth, spillway_io_call call, void* context,
                                      spillway_io** io);

/* Performs every request, in any order, and returns when all have ended: SPILLWAY_OK, or the error of the first (in
 * `requests` order) that failed. A short transfer is resumed; EINTR and EAGAIN are retried. A read is SPILLWAY_OK only
 * when every byte arrived and its CRC-32C is the expected one; the contents of a failed read's buffer are undefined.
 * Several threads may transfer through one handle at a time. */
SPILLWAY_API int32_t spillway_io_transfer(spillway_io* io, int32_t direction, spillway_io_request* requests,
                                          int64_t num_requests);

/* Ends the threads. The handle must be idle; NULL is allowed. */
SPILLWAY_API void spillway_io_close(spillway_io* io);

/* ---- the cipher of spill files: AES-256 in XTS mode (IEEE 1619, NIST SP 800-38E) ---- */

typedef struct spillway_cipher spillway_cipher;

/* Makes a cipher with a key: the 64 bytes at `key` (first the data's, then the tweak's), which is for test vectors, or,
 * for NULL, random bytes that never leave this library. They are kept in a page that is in no core dump and, where
 * RLIMIT_MEMLOCK allows it, is never swapped out. A child process has the key, too. */
SPILLWAY_API int32_t spillway_cipher_open(const void* key, spillway_cipher** cipher);

/* dst = src encrypted (WRITE) or decrypted (READ), in units of `unit_bytes`, a multiple of 16; `nbytes` is a multiple
 * of `unit_bytes`. The number of the i-th unit, its tweak, is `sequence` * 2^64 + first_unit + i. dst and src are the
 * same array, or do not overlap. `isa` is SCALAR, which is portable and slow, or AUTO. */
SPILLWAY_API int32_t spillway_cipher_apply(const spillway_cipher* cipher, int32_t direction, void* dst, const void* src,
                                           uint64_t nbytes, uint64_t unit_bytes, uint64_t first_unit, uint64_t sequence,
                                           int32_t isa, int32_t num_threads);

/* Wipes the key. No call may be in progress; NULL is allowed. */
SPILLWAY_API void spillway_cipher_close(spillway_cipher* cipher);

/* ---- the memory pool of large tensors ---- */

/* From now on until the process ends, the loaded library whose file name begins with `library` (torch's allocator is in
 * libc10.so) gets its posix_memalign blocks of `least_bytes` or more from one pool: page-aligned, in huge pages if the
 * kernel has them, with freed blocks reused. At most `slack_bytes` are resident beyond the peak between the last two
 * calls of spillway_pool_mark. `capacity_bytes` of addresses are reserved; blocks that do not fit come from the C
 * library as before. A second call returns SPILLWAY_OK and has no effect. SPILLWAY_NO_MEMORY: the addresses or the
 * import do not exist, and nothing has changed. A child process may continue to use the pool. */
SPILLWAY_API int32_t spillway_pool_attach(const char* library, uint64_t capacity_bytes, uint64_t least_bytes,
                                          uint64_t slack_bytes);

/* Tells the pool that a step begins: memory that is resident beyond the peak since the last call plus the slack returns
 * to the system. */
SPILLWAY_API void spillway_pool_mark(void);

/* The bytes of blocks in use, and of memory that the system has given for the pool; 0 if no pool is attached. */
SPILLWAY_API uint64_t spillway_pool_held_bytes(void);
SPILLWAY_API uint64_t spillway_pool_resident_bytes(void);

#ifdef __cplusplus
}
#endif

#endif /* SPILLWAY_H */
