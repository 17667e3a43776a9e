// One value at a time: the plain form of the algorithm, for every machine.
#include <math.h>
#include <string.h>

#include "elementwise.h"

namespace spillway::scalar {

struct Vector {
  static constexpr int kLanes = 1;
  float value;

  static Vector broadcast(float x) { return {x}; }
  static Vector load(const float* at) { return {*at}; }
  static Vector load(const bfloat16* at) {
    const uint32_t bits = static_cast<uint32_t>(at->bits) << 16;
    Vector x;
    memcpy(&x.value, &bits, sizeof bits);
    return x;
  }
  static Vector load(const float16* at) {
    const uint32_t magnitude = at->bits & 0x7FFFu, sign = static_cast<uint32_t>(at->bits & 0x8000u) << 16;
    if (magnitude < 0x400) return {(sign ? -0x1p-24f : 0x1p-24f) * static_cast<float>(magnitude)};
    // An infinity or NaN has the greatest exponent in both types; the exponent of any other value moves from bias 15 to
    // 127.
    const uint32_t bits = sign | ((magnitude << 13) + ((magnitude < 0x7C00 ? 112u : 224u) << 23));
    Vector x;
    memcpy(&x.value, &bits, sizeof bits);
    return x;
  }
  static void load_pairs(const bfloat16* at, Vector& a, Vector& b) { a = load(at), b = load(at + 1); }
  void store(float* at) const { *at = value; }
  void store(bfloat16* at) const {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    at->bits = static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
  void store(float16* at) const {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t magnitude = bits & 0x7FFFFFFF;
    uint32_t rounded;
    if (magnitude > 0x7F800000) {
      rounded = 0x7E00;  // the quiet NaN
    } else if (magnitude >= 0x477FF000) {
      rounded = 0x7C00;  // from 65520 on, which rounds to infinity
    } else if (magnitude >= 0x38800000) {
      rounded = (magnitude - (112u << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
    } else {  // below 2^-14, multiples of 2^-24, like float32 values from 1/2 to 1: so one addition rounds
      const float sum = ::fabsf(value) + 0.5f;
      memcpy(&rounded, &sum, sizeof sum);
      rounded -= 0x3F000000;
    }
    at->bits = static_cast<uint16_t>(rounded | ((bits >> 16) & 0x8000));
  }
  void stream(float* at) const { store(at); }
  template <class Small>
  static void stream(const Vector (&values)[32], Small* line) {
    for (int i = 0; i < 32; ++i) values[i].store(line + i);
  }
  static void end_streaming() {}
  static void prefetch(const void*) {}
  static void prefetch_to_write(const void*) {}
};

static inline Vector operator+(Vector a, Vector b) { return {a.value + b.value}; }
static inline Vector operator-(Vector a, Vector b) { return {a.value - b.value}; }
static inline Vector operator*(Vector a, Vector b) { return {a.value * b.value}; }
static inline Vector operator/(Vector a, Vector b) { return {a.value / b.value}; }
static inline Vector sqrt(Vector x) { return {::sqrtf(x.value)}; }
static inline Vector sign(Vector x) { return {x.value > 0 ? 1.0f : x.value < 0 ? -1.0f : x.value}; }
static inline Vector quiet(Vector x) { return {x.value == x.value ? x.value : __builtin_nanf("")}; }

struct Doubles {
  static constexpr int kLanes = 1;
  double value;

  static Doubles broadcast(double x) { return {x}; }
  static Doubles load(const float* at) { return {static_cast<double>(*at)}; }
  void store(double* at) const { *at = value; }
};

static inline Doubles operator+(Doubles a, Doubles b) { return {a.value + b.value}; }
static inline Doubles operator-(Doubles a, Doubles b) { return {a.value - b.value}; }
static inline Doubles operator*(Doubles a, Doubles b) { return {a.value * b.value}; }

#include "elementwise-inl.h"

}  // namespace spillway::scalar
