#pragma once

#include <cstdint>

#include "elementwise.h"
#include "spillway.h"

namespace spillway {

// The exact sum of squares of float32 or bfloat16 values, as an integer number of 2^-298 (the square of the smallest
// denormal float32): the same for every order, cut and number of threads.
class SquareSum {
 public:
  // The sum of `n` values of `type`, on one thread. The parts of a sum may use different `functions`.
  SquareSum(const Elementwise& functions, const void* values, int32_t type, int64_t n);
  SquareSum() = default;

  void merge(const SquareSum& other);
  void write(spillway_square_sum* sum) const;

 private:
  using uint128 = unsigned __int128;

  void add(uint128 units, int shift);

  uint64_t limbs_[SPILLWAY_NUM_LIMBS] = {};  // least significant first
  uint64_t num_non_finite_ = 0;
};

}  // namespace spillway
