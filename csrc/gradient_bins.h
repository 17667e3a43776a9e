#pragma once

#include <cstdint>

#include "spillway.h"

namespace spillway {

// Adds the squares of `n` values to exact sums per exponent, on one thread. `Gradient` is float or bfloat16.
class ExponentSums {
 public:
  template <class Gradient>
  void add(const Gradient* values, int64_t n);

  void merge(const ExponentSums& other);
  void write(spillway_bins* bins) const;

 private:
  using uint128 = unsigned __int128;
  static constexpr int kNumExponents = 256;  // biased: 0 holds zero and denormals, 255 infinities and NaNs

  template <class Gradient>
  void add_block(const Gradient* values, int64_t n);

  uint128 squares_[kNumExponents] = {};
  uint64_t num_non_finite_ = 0;
};

}  // namespace spillway
