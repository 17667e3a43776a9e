// Bins hold the exact sums, against one 128-bit addition a value.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "spillway.h"

namespace {

spillway_bins plain_bins(const std::vector<uint32_t>& values) {
  unsigned __int128 sums[SPILLWAY_NUM_BINS] = {};
  spillway_bins bins = {};
  for (const uint32_t bits : values) {
    const uint32_t exponent = (bits >> 23) & 0xFF;
    const uint64_t mantissa = (bits & 0x7FFFFF) + (exponent != 0 ? 0x800000 : 0);
    if (exponent == 255) {
      ++bins.num_non_finite;
    } else {
      sums[std::max(exponent, 1u) - 1] += mantissa * mantissa;
    }
  }
  for (int i = 0; i < SPILLWAY_NUM_BINS; ++i) {
    bins.low[i] = static_cast<uint64_t>(sums[i]);
    bins.high[i] = static_cast<uint64_t>(sums[i] >> 64);
  }
  return bins;
}

bool equal(const spillway_bins& a, const spillway_bins& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

spillway_bins native_bins(const void* values, int32_t type, size_t n, int32_t num_threads) {
  spillway_bins bins;
  CHECK(spillway_gradient_bins(&bins, values, type, static_cast<int64_t>(n), num_threads) == SPILLWAY_OK);
  return bins;
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (size_t n : {0, 1, 3, 4, 511, 513, 300000, 3000001}) {
    std::vector<uint32_t> values(n);
    for (uint32_t& bits : values) bits = random();
    for (int32_t num_threads : {1, 4}) {
      CHECK(equal(native_bins(values.data(), SPILLWAY_FLOAT32, n, num_threads), plain_bins(values)));
    }
    std::vector<uint16_t> halves(n);
    for (size_t i = 0; i < n; ++i) halves[i] = static_cast<uint16_t>(values[i] >> 16), values[i] &= 0xFFFF0000;
    CHECK(equal(native_bins(halves.data(), SPILLWAY_BFLOAT16, n, 3), plain_bins(values)));
  }
  for (size_t n : {(1 << 18) - 2, (1 << 18) - 1, 1 << 21}) {
    const std::vector<uint32_t> largest(n, 0x3FFFFFFF);
    CHECK(equal(native_bins(largest.data(), SPILLWAY_FLOAT32, n, 1), plain_bins(largest)));
  }
  std::printf("bins are exact\n");
}
