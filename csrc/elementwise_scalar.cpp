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
  static void load_pairs(const bfloat16* at, Vector& a, Vector& b) { a = load(at), b = load(at + 1); }
  void store(float* at) const { *at = value; }
  void store(bfloat16* at) const {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    at->bits = static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
  static void stream(const Vector (&values)[32], bfloat16* line) {
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
