#include "gradient_bins.h"

#include <algorithm>
#include <cstring>

#include "elementwise.h"

namespace spillway {
namespace {

// A value's bits. bfloat16 is the upper half of float32: its mantissas are 16 bits shorter, and kShift brings the sum of
// their squares to float32's scale.
struct Float32 {
  static constexpr int kMantissaBits = 23;
  static constexpr int kShift = 0;
  static uint32_t bits(const float* at) {
    uint32_t word;
    std::memcpy(&word, at, sizeof word);
    return word;
  }
};

struct BFloat16 {
  static constexpr int kMantissaBits = 7;
  static constexpr int kShift = 2 * (23 - 7);
  static uint32_t bits(const bfloat16* at) { return at->bits; }
};

template <class Gradient>
struct FormatOf;
template <>
struct FormatOf<float> {
  using type = Float32;
};
template <>
struct FormatOf<bfloat16> {
  using type = BFloat16;
};

// Neighbouring values often share an exponent; adding them to different tables keeps one addition from waiting for the
// last one's store.
constexpr int kTables = 4;

// Squares have at most 48 bits, so a 64-bit sum is exact for 2^16 of them.
constexpr int64_t kBlock = int64_t{kTables} << 16;

// Values whose exponents and squares are computed together, in a loop without a carried dependence (so that it is
// vectorized), before they are added to the tables one by one.
constexpr int64_t kBatch = 512;

constexpr int64_t kPrefetch = 4 * kBatch;

using Table = uint64_t[256];

template <class Gradient>
void add_batch(Table* tables, const Gradient* values, int64_t n) {
  using Format = typename FormatOf<Gradient>::type;
  constexpr uint32_t kImplicit = 1u << Format::kMantissaBits;
  constexpr uint32_t kMagnitude = (256u << Format::kMantissaBits) - 1;
  // Far enough ahead that the line is there; hardware prefetch stalls while the tables are being written.
  for (int64_t i = 0; i < kBatch; i += 64 / int64_t{sizeof(Gradient)}) __builtin_prefetch(values + kPrefetch + i);
  uint32_t exponents[kBatch];
  uint64_t squares[kBatch];
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = Format::bits(values + i) & kMagnitude;
    const uint32_t mantissa = (magnitude & (kImplicit - 1)) | (magnitude >= kImplicit ? kImplicit : 0);
    exponents[i] = magnitude >> Format::kMantissaBits;
    squares[i] = static_cast<uint64_t>(mantissa) * mantissa;
  }
  int64_t i = 0;
  for (; i + kTables <= n; i += kTables) {
    for (int t = 0; t < kTables; ++t) tables[t][exponents[i + t]] += squares[i + t];
  }
  // Spread as well: three more in one table would be more than kBlock allows it.
  for (; i < n; ++i) tables[i % kTables][exponents[i]] += squares[i];
}

}  // namespace

template <class Gradient>
void ExponentSums::add_block(const Gradient* values, int64_t n) {
  using Format = typename FormatOf<Gradient>::type;
  Table tables[kTables] = {};
  for (int64_t i = 0; i < n; i += kBatch) add_batch(tables, values + i, std::min(kBatch, n - i));
  bool has_non_finite = false;
  for (const Table& table : tables) {
    for (int e = 0; e < kNumExponents - 1; ++e) squares_[e] += static_cast<uint128>(table[e]) << Format::kShift;
    has_non_finite |= table[kNumExponents - 1] != 0;
  }
  if (has_non_finite) {  // their "squares" say that there are some, not how many
    for (int64_t i = 0; i < n; ++i) {
      num_non_finite_ += ((Format::bits(values + i) >> Format::kMantissaBits) & 0xFF) == 0xFF;
    }
  }
}

template <class Gradient>
void ExponentSums::add(const Gradient* values, int64_t n) {
  for (int64_t begin = 0; begin < n; begin += kBlock) add_block(values + begin, std::min(kBlock, n - begin));
}

template void ExponentSums::add(const float*, int64_t);
template void ExponentSums::add(const bfloat16*, int64_t);

void ExponentSums::merge(const ExponentSums& other) {
  for (int e = 0; e < kNumExponents; ++e) squares_[e] += other.squares_[e];
  num_non_finite_ += other.num_non_finite_;
}

// Denormals have the weight of biased exponent 1 and join its bin.
void ExponentSums::write(spillway_bins* bins) const {
  for (int i = 0; i < SPILLWAY_NUM_BINS; ++i) {
    const uint128 sum = squares_[i + 1] + (i == 0 ? squares_[0] : 0);
    bins->low[i] = static_cast<uint64_t>(sum);
    bins->high[i] = static_cast<uint64_t>(sum >> 64);
  }
  bins->num_non_finite = num_non_finite_;
}

}  // namespace spillway
