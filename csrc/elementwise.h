// Element-wise functions: one algorithm (elementwise-inl.h), compiled once per instruction set into its own namespace.
#pragma once

#include <cstdint>

#include "spillway.h"

namespace spillway {

struct bfloat16 {
  uint16_t bits;
};

struct float16 {
  uint16_t bits;
};

// Number of values that one call of Elementwise::square_batch sums.
constexpr int64_t kSquareBatch = 1024;

// The exact sum of a batch's squares: high + low, integer multiples of 2^(2 * exponent - 294) and
// 2^(2 * exponent - 338), each of at most 2^53 units.
struct SquareBatch {
  double high;
  double low;
  int32_t exponent;  // biased, of the largest magnitude in the batch
};

// One instruction set's functions, each over one range on one thread. The caller checks types.
struct Elementwise {
  // `moment2` is null if the rule has one moment, `maps` if moments are not INT8.
  void (*update)(int32_t rule, const spillway_update_scalars& scalars, const spillway_states& before,
                 const spillway_states& after, int32_t moment_type, const spillway_map* maps, const void* gradient,
                 int32_t gradient_type, void* out, int32_t out_type, int64_t n);
  void (*accumulate)(float* accumulator, const void* gradient, int32_t gradient_type, bool first, int64_t n);
  // Returns false if some magnitude is not finite, or too far from the largest for two float64 sums to be exact. `type`
  // is FLOAT32 or BFLOAT16.
  bool (*square_batch)(SquareBatch& sum, const void* values, int32_t type);
};

namespace scalar {
extern const Elementwise kElementwise;
}
namespace avx2 {
extern const Elementwise kElementwise;
}
namespace avx512 {
extern const Elementwise kElementwise;
}
namespace neon {
extern const Elementwise kElementwise;
}

}  // namespace spillway
