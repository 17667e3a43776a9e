// One value at a time: the plain form of the algorithm, for every machine.
#include <math.h>
#include <string.h>

#include "elementwise.h"

namespace spillway::scalar {

struct Vector {
  static constexpr int kLanes = 1;
  static constexpr uint64_t kStreamBytes = sizeof(bfloat16);
  float value;

  static Vector broadcast(float x) { return {x}; }
  static Vector load(const float* at) { return {*at}; }
  static Vector load(const bfloat16* at) {
    const uint32_t bits = static_cast<uint32_t>(at->bits) << 16;
    Vector x;
    memcpy(&x.value, &bits, sizeof bits);
    return x;
  }
  void store(float* at) const { *at = value; }
  void store(bfloat16* at) const {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    at->bits = static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
  void stream(bfloat16* at) const { store(at); }
  static void end_streaming() {}
};

static inline Vector operator+(Vector a, Vector b) { return {a.value + b.value}; }
static inline Vector operator-(Vector a, Vector b) { return {a.value - b.value}; }
static inline Vector operator*(Vector a, Vector b) { return {a.value * b.value}; }
static inline Vector operator/(Vector a, Vector b) { return {a.value / b.value}; }
static inline Vector sqrt(Vector x) { return {::sqrtf(x.value)}; }
static inline Vector quiet(Vector x) { return {x.value == x.value ? x.value : __builtin_nanf("")}; }

#include "elementwise-inl.h"

}  // namespace spillway::scalar
