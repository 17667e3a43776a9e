// The C ABI: checks arguments, chooses the instruction set, divides ranges among threads. No exception leaves this
// file.
#include "spillway.h"

#if defined(SPILLWAY_HAVE_AVX2)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <type_traits>

#include "aes_xts.h"
#include "crc32c.h"
#include "elementwise.h"
#include "float_mode.h"
#include "io_engine.h"
#include "spill_cipher.h"
#include "square_sum.h"
#include "thread_pool.h"
#include "torch_memory.h"

using namespace spillway;

struct spillway_io {
  std::unique_ptr<IoEngine> engine;
};

struct spillway_cipher {
  HeldKeys keys;
};

namespace {

// The range that one thread takes at a time; a multiple of every vector and cache line, so only an array's end has a
// tail.
constexpr int64_t kElementwiseRange = int64_t{1} << 16;
constexpr int64_t kSquaresRange = int64_t{1} << 20;
constexpr uint64_t kCopyRange = uint64_t{4} << 20;
constexpr uint64_t kCipherRange = uint64_t{1} << 18;

#if defined(SPILLWAY_HAVE_AVX2)
// __builtin_cpu_supports of older compilers does not know F16C.
bool has_f16c() {
  unsigned int eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C) != 0;
}
#endif

const Elementwise* elementwise_of(int32_t isa) {
  switch (isa) {
    case SPILLWAY_ISA_AUTO:
      for (int32_t wide : {SPILLWAY_ISA_AVX512, SPILLWAY_ISA_AVX2, SPILLWAY_ISA_NEON}) {
        if (const Elementwise* functions = elementwise_of(wide)) return functions;
      }
      return &scalar::kElementwise;
    case SPILLWAY_ISA_SCALAR:
      return &scalar::kElementwise;
#if defined(SPILLWAY_HAVE_AVX2)
    case SPILLWAY_ISA_AVX2:
      return __builtin_cpu_supports("avx2") && has_f16c() ? &avx2::kElementwise : nullptr;
#endif
#if defined(SPILLWAY_HAVE_AVX512)
    case SPILLWAY_ISA_AVX512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") ? &avx512::kElementwise : nullptr;
#endif
#if defined(SPILLWAY_HAVE_NEON)
    case SPILLWAY_ISA_NEON:
      return &neon::kElementwise;
#endif
    default:
      return nullptr;
  }
}

bool is_gradient_type(int32_t type) { return type >= SPILLWAY_FLOAT32 && type <= SPILLWAY_FLOAT16; }

int64_t element_bytes(int32_t type) { return type == SPILLWAY_FLOAT32 ? 4 : is_gradient_type(type) ? 2 : 0; }

template <class Pointer>
Pointer* advance(Pointer* array, int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<Pointer>, const char, char>;
  return array == nullptr ? nullptr : reinterpret_cast<Pointer*>(reinterpret_cast<Byte*>(array) + bytes);
}

constexpr int64_t kBlockBytes = SPILLWAY_BLOCK_VALUES + sizeof(float);
static_assert(kElementwiseRange % SPILLWAY_BLOCK_VALUES == 0, "ranges begin at blocks");

// The states from value `begin` on, a multiple of kElementwiseRange.
spillway_states from(const spillway_states& states, int64_t begin, int32_t moment_type, bool has_moment2) {
  const int64_t bytes = moment_type == SPILLWAY_INT8 ? begin / SPILLWAY_BLOCK_VALUES * kBlockBytes
                                                     : begin * element_bytes(moment_type);
  return {states.master + begin, advance(states.moment1, bytes), has_moment2 ? advance(states.moment2, bytes) : nullptr};
}

// Calls work(begin, count) for consecutive ranges of [0, n), each in the declared floating-point mode.
template <class Work>
int32_t for_ranges(int64_t n, int64_t range, int32_t num_threads, const Work& work) try {
  compute_pool().run((n + range - 1) / range, num_threads, [&](int64_t i) {
    const FloatMode declared;
    work(i * range, std::min(range, n - i * range));
  });
  return SPILLWAY_OK;
} catch (const std::bad_alloc&) {
  return SPILLWAY_NO_MEMORY;
}

bool overlap(const spillway_copy& copy) {
  const auto dst = reinterpret_cast<uintptr_t>(copy.dst), src = reinterpret_cast<uintptr_t>(copy.src);
  return dst < src + copy.nbytes && src < dst + copy.nbytes;
}

}  // namespace

int32_t spillway_abi_version(void) { return SPILLWAY_ABI_VERSION; }

const char* spillway_strerror(int32_t error) {
  switch (error) {
    case SPILLWAY_OK:
      return "no error";
    case SPILLWAY_BAD_ARGUMENT:
      return "a null pointer, a negative count, or a rule, type or direction that spillway.h does not list was given";
    case SPILLWAY_ISA_UNAVAILABLE:
      return "the instruction set is unknown, was not compiled into this library, or is missing on this processor";
    case SPILLWAY_NO_MEMORY:
      return "the system has no memory left for the library's own bookkeeping";
    case SPILLWAY_IO_FAILED:
      return "the operating system rejected the read or write";
    case SPILLWAY_END_OF_FILE:
      return "the file ended before all bytes were read";
    case SPILLWAY_CHECKSUM_MISMATCH:
      return "the bytes read are not the bytes that were written: their CRC-32C differs";
    case SPILLWAY_NO_RANDOM_BYTES:
      return "the system gives no random bytes for a key: getrandom(2) is rejected";
    default:
      return "an error code that this library does not define";
  }
}

int32_t spillway_isa_available(int32_t isa) { return elementwise_of(isa) != nullptr; }

int32_t spillway_update(int32_t rule, const spillway_update_scalars* scalars, const spillway_states* before,
                        const spillway_states* after, int32_t moment_type, const spillway_map* maps,
                        const void* gradient, int32_t gradient_type, void* out, int32_t out_type, int64_t n, int32_t isa,
                        int32_t num_threads) {
  const bool has_out = is_gradient_type(out_type), has_moment2 = rule == SPILLWAY_ADAMW || rule == SPILLWAY_ADAM;
  if (rule < SPILLWAY_ADAMW || rule > SPILLWAY_LION || scalars == nullptr || n < 0) return SPILLWAY_BAD_ARGUMENT;
  if (!is_gradient_type(gradient_type) || (!has_out && out_type != SPILLWAY_NONE)) return SPILLWAY_BAD_ARGUMENT;
  const bool quantized = moment_type == SPILLWAY_INT8;
  if (moment_type != SPILLWAY_FLOAT32 && moment_type != SPILLWAY_BFLOAT16 && !quantized) return SPILLWAY_BAD_ARGUMENT;
  for (int32_t i = 0; quantized && i < (has_moment2 ? 2 : 1); ++i) {
    if (maps == nullptr || !maps[i].values || !maps[i].nearest) return SPILLWAY_BAD_ARGUMENT;
  }
  if (before == nullptr || after == nullptr || (n > 0 && (!gradient || (has_out && !out)))) return SPILLWAY_BAD_ARGUMENT;
  for (const spillway_states* states : {before, after}) {
    const bool all_there = states->master && states->moment1 && (states->moment2 || !has_moment2);
    if (n > 0 && !all_there) return SPILLWAY_BAD_ARGUMENT;
  }
  const Elementwise* functions = elementwise_of(isa);
  if (functions == nullptr) return SPILLWAY_ISA_UNAVAILABLE;
  return for_ranges(n, kElementwiseRange, num_threads, [=](int64_t begin, int64_t count) {
    functions->update(rule, *scalars, from(*before, begin, moment_type, has_moment2),
                      from(*after, begin, moment_type, has_moment2), moment_type, maps,
                      advance(gradient, begin * element_bytes(gradient_type)), gradient_type,
                      has_out ? advance(out, begin * element_bytes(out_type)) : nullptr, out_type, count);
  });
}

int32_t spillway_accumulate(float* accumulator, const void* gradient, int32_t gradient_type, int32_t first, int64_t n,
                            int32_t isa, int32_t num_threads) {
  if (n < 0 || !is_gradient_type(gradient_type) || (n > 0 && (!accumulator || !gradient))) return SPILLWAY_BAD_ARGUMENT;
  const Elementwise* functions = elementwise_of(isa);
  if (functions == nullptr) return SPILLWAY_ISA_UNAVAILABLE;
  return for_ranges(n, kElementwiseRange, num_threads, [=](int64_t begin, int64_t count) {
    functions->accumulate(accumulator + begin, advance(gradient, begin * element_bytes(gradient_type)), gradient_type,
                          first != 0, count);
  });
}

int32_t spillway_sum_squares(spillway_square_sum* sum, const void* values, int32_t type, int64_t n, int32_t isa,
                             int32_t num_threads) {
  if (sum == nullptr || n < 0 || !is_gradient_type(type) || (n > 0 && !values)) return SPILLWAY_BAD_ARGUMENT;
  const Elementwise* functions = elementwise_of(isa);
  if (functions == nullptr) return SPILLWAY_ISA_UNAVAILABLE;
  SquareSum total;
  std::mutex merging;
  const int32_t error = for_ranges(n, kSquaresRange, num_threads, [&](int64_t begin, int64_t count) {
    const SquareSum part(*functions, advance(values, begin * element_bytes(type)), type, count);
    std::lock_guard<std::mutex> lock(merging);
    total.merge(part);
  });
  total.write(sum);
  return error;
}

int32_t spillway_copy_batch(const spillway_copy* copies, int64_t num_copies, int32_t num_threads) {
  if (num_copies < 0 || (num_copies > 0 && copies == nullptr)) return SPILLWAY_BAD_ARGUMENT;
  for (int64_t i = 0; i < num_copies; ++i) {
    const spillway_copy& copy = copies[i];
    if (copy.nbytes > 0 && (!copy.dst || !copy.src)) return SPILLWAY_BAD_ARGUMENT;
    // If the arrays overlap, pieces on several threads would read bytes that another has overwritten; one memmove does
    // not.
    const uint64_t range = overlap(copy) ? std::max<uint64_t>(copy.nbytes, 1) : kCopyRange;
    const auto move = [&](int64_t begin, int64_t count) {
      std::memmove(advance(copy.dst, begin), advance(copy.src, begin), static_cast<size_t>(count));
    };
    const int32_t error = for_ranges(static_cast<int64_t>(copy.nbytes), static_cast<int64_t>(range), num_threads, move);
    if (error != SPILLWAY_OK) return error;
  }
  return SPILLWAY_OK;
}

uint32_t spillway_crc32c(uint32_t crc, const void* bytes, uint64_t nbytes) { return crc32c(crc, bytes, nbytes); }

uint32_t spillway_crc32c_combine(uint32_t crc32c_a, uint32_t crc32c_b, uint64_t nbytes_b) {
  return crc32c_combine(crc32c_a, crc32c_b, nbytes_b);
}

int32_t spillway_io_open(int32_t file, int32_t queue_depth, spillway_io_call call, void* context, spillway_io** io) try {
  if (io == nullptr || file < 0 || queue_depth < 1) return SPILLWAY_BAD_ARGUMENT;
  *io = new spillway_io{open_thread_engine(file, queue_depth, call, context)};
  return SPILLWAY_OK;
} catch (const std::bad_alloc&) {
  return SPILLWAY_NO_MEMORY;
}

int32_t spillway_io_transfer(spillway_io* io, int32_t direction, spillway_io_request* requests, int64_t num_requests) try {
  const bool known = direction == SPILLWAY_READ || direction == SPILLWAY_WRITE;
  if (io == nullptr || !known || num_requests < 0 || (num_requests > 0 && !requests)) return SPILLWAY_BAD_ARGUMENT;
  for (int64_t i = 0; i < num_requests; ++i) {
    if (requests[i].nbytes > 0 && !requests[i].buffer) return SPILLWAY_BAD_ARGUMENT;
  }
  io->engine->transfer(static_cast<spillway_direction>(direction), requests, num_requests);
  for (int64_t i = 0; i < num_requests; ++i) {
    if (requests[i].error != SPILLWAY_OK) return requests[i].error;
  }
  return SPILLWAY_OK;
} catch (const std::bad_alloc&) {
  return SPILLWAY_NO_MEMORY;
}

void spillway_io_close(spillway_io* io) { delete io; }

int32_t spillway_cipher_open(const void* key, spillway_cipher** cipher) try {
  if (cipher == nullptr) return SPILLWAY_BAD_ARGUMENT;
  bool has_random = false;
  HeldKeys keys = hold_keys(static_cast<const uint8_t*>(key), has_random);
  if (keys == nullptr) return has_random ? SPILLWAY_NO_MEMORY : SPILLWAY_NO_RANDOM_BYTES;
  *cipher = new spillway_cipher{std::move(keys)};
  return SPILLWAY_OK;
} catch (const std::bad_alloc&) {
  return SPILLWAY_NO_MEMORY;
}

int32_t spillway_cipher_apply(const spillway_cipher* cipher, int32_t direction, void* dst, const void* src,
                              uint64_t nbytes, uint64_t unit_bytes, uint64_t first_unit, uint64_t sequence, int32_t isa,
                              int32_t num_threads) {
  const bool known = direction == SPILLWAY_READ || direction == SPILLWAY_WRITE;
  if (cipher == nullptr || !known || (nbytes > 0 && (!dst || !src))) return SPILLWAY_BAD_ARGUMENT;
  if (unit_bytes == 0 || unit_bytes % kAesBlock != 0 || nbytes % unit_bytes != 0) return SPILLWAY_BAD_ARGUMENT;
  if (isa != SPILLWAY_ISA_AUTO && isa != SPILLWAY_ISA_SCALAR) return SPILLWAY_ISA_UNAVAILABLE;
  XtsBlocks* blocks = isa == SPILLWAY_ISA_SCALAR ? xts_portable : xts_blocks();
  const auto range = static_cast<int64_t>(std::max<uint64_t>(kCipherRange / unit_bytes, 1));
  return for_ranges(static_cast<int64_t>(nbytes / unit_bytes), range, num_threads, [=](int64_t begin, int64_t count) {
    const auto skipped = static_cast<int64_t>(unit_bytes) * begin;
    xts_apply(blocks, *cipher->keys, direction == SPILLWAY_WRITE, static_cast<const uint8_t*>(advance(src, skipped)),
              static_cast<uint8_t*>(advance(dst, skipped)),
              {unit_bytes, first_unit + static_cast<uint64_t>(begin), sequence}, static_cast<uint64_t>(count));
  });
}

void spillway_cipher_close(spillway_cipher* cipher) { delete cipher; }

int32_t spillway_pool_attach(const char* library, uint64_t capacity_bytes, uint64_t least_bytes, uint64_t slack_bytes) try {
  if (library == nullptr || capacity_bytes == 0 || least_bytes == 0) return SPILLWAY_BAD_ARGUMENT;
  return attach_tensor_pool(library, capacity_bytes, least_bytes, slack_bytes) ? SPILLWAY_OK : SPILLWAY_NO_MEMORY;
} catch (const std::bad_alloc&) {
  return SPILLWAY_NO_MEMORY;
}

void spillway_pool_mark(void) {
  if (TensorPool* pool = tensor_pool()) pool->mark();
}

uint64_t spillway_pool_held_bytes(void) {
  TensorPool* pool = tensor_pool();
  return pool == nullptr ? 0 : pool->held_bytes();
}

uint64_t spillway_pool_resident_bytes(void) {
  TensorPool* pool = tensor_pool();
  return pool == nullptr ? 0 : pool->resident_bytes();
}
