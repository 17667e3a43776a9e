// Element-wise functions: one algorithm (elementwise-inl.h), compiled once per instruction set into its own namespace.
#pragma once

#include <cstdint>

#include "spillway.h"

namespace spillway {

struct bfloat16 {
  uint16_t bits;
};

// One instruction set's functions over one range on one thread. Types are checked by the caller.
struct Elementwise {
  void (*adamw)(const spillway_adamw_scalars& scalars, float* p, float* m, float* v, const void* gradient,
                int32_t gradient_type, void* out, int32_t out_type, int64_t n);
  void (*accumulate)(float* accumulator, const void* gradient, int32_t gradient_type, bool first, int64_t n);
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

}  // namespace spillway
