// The sum of squares is exact: it equals one addition of 640 bits per value, on every instruction set.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "spillway.h"

namespace {

spillway_square_sum plain_sum(const std::vector<uint32_t>& values) {
  spillway_square_sum sum = {};
  for (const uint32_t bits : values) {
    const uint32_t exponent = (bits >> 23) & 0xFF;
    const uint64_t mantissa = (bits & 0x7FFFFF) + (exponent != 0 ? 0x800000 : 0);
    if (exponent == 255) {
      ++sum.num_non_finite;
      continue;
    }
    const uint32_t shift = 2 * (std::max(exponent, 1u) - 1);
    unsigned __int128 carried = static_cast<unsigned __int128>(mantissa * mantissa) << shift % 64;
    for (uint32_t i = shift / 64; i < SPILLWAY_NUM_LIMBS; ++i) {
      carried += sum.limbs[i];
      sum.limbs[i] = static_cast<uint64_t>(carried);
      carried >>= 64;
    }
  }
  return sum;
}

void compare(std::vector<uint32_t> values, int32_t isa, int32_t num_threads) {
  const auto check = [&](const void* data, int32_t type) {
    spillway_square_sum found;
    const auto n = static_cast<int64_t>(values.size());
    CHECK(spillway_sum_squares(&found, data, type, n, isa, num_threads) == SPILLWAY_OK);
    const spillway_square_sum wanted = plain_sum(values);
    CHECK(std::memcmp(&found, &wanted, sizeof wanted) == 0);
  };
  check(values.data(), SPILLWAY_FLOAT32);
  std::vector<uint16_t> halves;
  for (uint32_t& bits : values) halves.push_back(static_cast<uint16_t>(bits >> 16)), bits &= 0xFFFF0000;
  check(halves.data(), SPILLWAY_BFLOAT16);
}

// `n` values with exponents lowest..highest, including zeros and both signs.
std::vector<uint32_t> values_between(size_t n, uint32_t lowest, uint32_t highest, std::mt19937& random) {
  std::vector<uint32_t> values(n);
  for (uint32_t& bits : values) {
    const uint32_t exponent = lowest + random() % (highest - lowest + 1);
    bits = random() % 16 == 0 ? 0 : (exponent << 23 | (random() & 0x807FFFFF));
  }
  return values;
}

}  // namespace

int main() {
  for (int32_t isa : {SPILLWAY_ISA_SCALAR, SPILLWAY_ISA_AVX2, SPILLWAY_ISA_AVX512, SPILLWAY_ISA_NEON}) {
    if (!spillway_isa_available(isa)) {
      std::printf("instruction set %d: not on this machine, skipped\n", isa);
      continue;
    }
    std::mt19937 random(1);
    for (size_t n : {0, 1, 1023, 1024, 1025, 5000}) compare(values_between(n, 0, 255, random), isa, 1);
    compare(values_between(3 << 20, 100, 120, random), isa, 4);
    // At, inside and outside every limit of the fast sums: 19 exponents, the smallest and the largest.
    for (uint32_t highest : {1u, 19u, 20u, 21u, 22u, 63u, 77u, 78u, 127u, 190u, 191u, 254u, 255u}) {
      for (uint32_t span : {0u, 1u, 12u, 13u, 14u, 19u, 20u, 21u, 36u}) {
        compare(values_between(4096, highest - std::min(highest, span), highest, random), isa, 1);
      }
    }
    // Every square is rounded up, or down, by as much as possible: the sums that must still be exact are at their
    // largest.
    for (uint32_t bits : {0x3FFFFFFFu, 0x3F800001u, 0x3FB504F3u, 0x7F7FFFFFu, 0x0A800001u}) {
      compare(std::vector<uint32_t>(1 << 14, bits), isa, 1);
    }
    // The remainders of the rounding add up to nearly 2^53 units in all batches, and one value has the last of these
    // units.
    for (uint32_t bits : {0x3F800005u, 0x3F80000Bu}) {
      std::vector<uint32_t> values(1 << 14, bits);
      for (size_t i = 0; i < values.size(); i += 1024) values[i] = (127 - 19) << 23 | 1;
      compare(values, isa, 1);
    }
    compare(std::vector<uint32_t>(4096, 0), isa, 1);
    compare(std::vector<uint32_t>(4096, 0x80000000), isa, 1);
    std::printf("instruction set %d: the exact sum\n", isa);
  }
  spillway_square_sum sum;
  CHECK(spillway_sum_squares(nullptr, &sum, SPILLWAY_FLOAT32, 1, 0, 1) == SPILLWAY_BAD_ARGUMENT);
  CHECK(spillway_sum_squares(&sum, nullptr, SPILLWAY_FLOAT32, 1, 0, 1) == SPILLWAY_BAD_ARGUMENT);
  CHECK(spillway_sum_squares(&sum, &sum, SPILLWAY_NONE, 1, 0, 1) == SPILLWAY_BAD_ARGUMENT);
  CHECK(spillway_sum_squares(&sum, &sum, SPILLWAY_FLOAT32, 1, 99, 1) == SPILLWAY_ISA_UNAVAILABLE);
}
