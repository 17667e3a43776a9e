// Four values at a time, for 64-bit Arm, where every processor has NEON.
#include <arm_neon.h>

#include "elementwise.h"

namespace spillway::neon {

struct Vector {
  static constexpr int kLanes = 4;
  float32x4_t value;

  static Vector broadcast(float x) { return {vdupq_n_f32(x)}; }
  static Vector load(const float* at) { return {vld1q_f32(at)}; }
  static Vector load(const bfloat16* at) {
    const uint16x4_t bits = vld1_u16(reinterpret_cast<const uint16_t*>(at));
    return {vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(bits), 16))};
  }
  static Vector load(const float16* at) {
    return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(at))))};
  }
  static void load_pairs(const bfloat16* at, Vector& a, Vector& b) { a = load(at), b = load(at + 4); }
  void store(float* at) const { vst1q_f32(at, value); }
  void store(bfloat16* at) const {
    const uint32x4_t bits = vreinterpretq_u32_f32(value);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t sum = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
    vst1_u16(reinterpret_cast<uint16_t*>(at), vshrn_n_u32(sum, 16));
  }
  void store(float16* at) const {
    vst1_u16(reinterpret_cast<uint16_t*>(at), vreinterpret_u16_f16(vcvt_f16_f32(value)));
  }
  // Plain stores: a core that detects that whole lines are written does not fetch them first.
  void stream(float* at) const { store(at); }
  template <class Small>
  static void stream(const Vector (&values)[8], Small* line) {
    for (int i = 0; i < 8; ++i) values[i].store(line + 4 * i);
  }
  static void end_streaming() {}
  static void prefetch(const void* at) { __builtin_prefetch(at, 0); }
  static void prefetch_to_write(const void* at) { __builtin_prefetch(at, 1); }
};

static inline Vector operator+(Vector a, Vector b) { return {vaddq_f32(a.value, b.value)}; }
static inline Vector operator-(Vector a, Vector b) { return {vsubq_f32(a.value, b.value)}; }
static inline Vector operator*(Vector a, Vector b) { return {vmulq_f32(a.value, b.value)}; }
static inline Vector operator/(Vector a, Vector b) { return {vdivq_f32(a.value, b.value)}; }
static inline Vector sqrt(Vector x) { return {vsqrtq_f32(x.value)}; }
static inline Vector sign(Vector x) {
  const float32x4_t one = vbslq_f32(vdupq_n_u32(0x80000000), x.value, vdupq_n_f32(1.0f));
  return {vbslq_f32(vcagtq_f32(x.value, vdupq_n_f32(0.0f)), one, x.value)};
}
static inline Vector quiet(Vector x) {
  return {vbslq_f32(vceqq_f32(x.value, x.value), x.value, vdupq_n_f32(__builtin_nanf("")))};
}

struct Doubles {
  static constexpr int kLanes = 2;
  float64x2_t value;

  static Doubles broadcast(double x) { return {vdupq_n_f64(x)}; }
  static Doubles load(const float* at) { return {vcvt_f64_f32(vld1_f32(at))}; }
  void store(double* at) const { vst1q_f64(at, value); }
};

static inline Doubles operator+(Doubles a, Doubles b) { return {vaddq_f64(a.value, b.value)}; }
static inline Doubles operator-(Doubles a, Doubles b) { return {vsubq_f64(a.value, b.value)}; }
static inline Doubles operator*(Doubles a, Doubles b) { return {vmulq_f64(a.value, b.value)}; }

#include "elementwise-inl.h"

}  // namespace spillway::neon
