#include "square_sum.h"

#include <algorithm>
#include <cstring>

namespace spillway {
namespace {

using uint128 = unsigned __int128;

uint32_t bits_of(const float* at) {
  uint32_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return bits;
}

uint32_t bits_of(const bfloat16* at) { return static_cast<uint32_t>(at->bits) << 16; }

// 2^exponent, which must be normal in float64.
double power_of_two(int exponent) {
  const uint64_t bits = static_cast<uint64_t>(1023 + exponent) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof power);
  return power;
}

// Sums by biased exponent. A batch adds at most 2^97 units and a single value less than 2^48, so a range of 2^37 values
// fits.
class ExponentTable {
 public:
  // In units of 2^(2 * exponent - 338). `low` may be negative, but its sum with `high` is not.
  void add(const SquareBatch& sum) {
    const double unit = power_of_two(338 - 2 * sum.exponent);
    const auto high = static_cast<__int128>(sum.high * power_of_two(294 - 2 * sum.exponent));
    batches[sum.exponent] += static_cast<uint128>((high << 44) + static_cast<__int128>(sum.low * unit));
  }

  // One value at a time, for batches that square_batch cannot sum.
  template <class Gradient>
  void add(const Gradient* values, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t magnitude = bits_of(values + i) & 0x7FFFFFFF;
      const uint32_t exponent = magnitude >> 23;
      const uint64_t mantissa = (magnitude & 0x7FFFFF) | (exponent > 0 ? 0x800000 : 0);
      if (exponent == 255) {
        ++num_non_finite;
      } else {
        singles[exponent] += mantissa * mantissa;
      }
    }
  }

  uint128 batches[256] = {};
  uint128 singles[256] = {};
  uint64_t num_non_finite = 0;
};

template <class Gradient>
void add_values(ExponentTable& table, const Elementwise& functions, const Gradient* values, int32_t type, int64_t n) {
  SquareBatch sum;
  int64_t i = 0;
  for (; i + kSquareBatch <= n; i += kSquareBatch) {
    if (functions.square_batch(sum, values + i, type)) {
      table.add(sum);
    } else {
      table.add(values + i, kSquareBatch);
    }
  }
  table.add(values + i, n - i);
}

// Adds float16 values through float32, which holds each of them exactly.
void add_widened(ExponentTable& table, const Elementwise& functions, const float16* values, int64_t n) {
  float wide[kSquareBatch];
  for (int64_t i = 0; i < n; i += kSquareBatch) {
    const int64_t count = std::min(kSquareBatch, n - i);
    functions.accumulate(wide, values + i, SPILLWAY_FLOAT16, true, count);
    add_values(table, functions, wide, SPILLWAY_FLOAT32, count);
  }
}

}  // namespace

SquareSum::SquareSum(const Elementwise& functions, const void* values, int32_t type, int64_t n) {
  ExponentTable table;
  if (type == SPILLWAY_BFLOAT16) {
    add_values(table, functions, static_cast<const bfloat16*>(values), type, n);
  } else if (type == SPILLWAY_FLOAT16) {
    add_widened(table, functions, static_cast<const float16*>(values), n);
  } else {
    add_values(table, functions, static_cast<const float*>(values), type, n);
  }
  num_non_finite_ = table.num_non_finite;
  for (int exponent = 0; exponent < 255; ++exponent) {
    add(table.singles[exponent], 2 * std::max(exponent - 1, 0));  // denormals have the weight of biased exponent 1
    if (table.batches[exponent] != 0) add(table.batches[exponent], 2 * exponent - 40);
  }
}

void SquareSum::add(uint128 units, int shift) {
  const int limb = shift / 64, bit = shift % 64;
  const uint64_t parts[3] = {static_cast<uint64_t>(units << bit), static_cast<uint64_t>((units << bit) >> 64),
                             bit == 0 ? 0 : static_cast<uint64_t>(units >> 64 >> (64 - bit))};
  bool carry = false;
  for (int i = limb; i < SPILLWAY_NUM_LIMBS; ++i) {
    const uint128 sum = uint128{limbs_[i]} + (i - limb < 3 ? parts[i - limb] : 0) + carry;
    limbs_[i] = static_cast<uint64_t>(sum);
    carry = (sum >> 64) != 0;
  }
}

void SquareSum::merge(const SquareSum& other) {
  for (int i = 0; i < SPILLWAY_NUM_LIMBS; ++i) add(other.limbs_[i], 64 * i);
  num_non_finite_ += other.num_non_finite_;
}

void SquareSum::write(spillway_square_sum* sum) const {
  std::memcpy(sum->limbs, limbs_, sizeof limbs_);
  sum->num_non_finite = num_non_finite_;
}

}  // namespace spillway
