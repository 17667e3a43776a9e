// Eight values at a time. Compiled with -mavx2 -mf16c.
#include <immintrin.h>

#include "elementwise.h"

namespace spillway::avx2 {

struct Vector {
  static constexpr int kLanes = 8;
  __m256 value;

  static Vector broadcast(float x) { return {_mm256_set1_ps(x)}; }
  static Vector load(const float* at) { return {_mm256_loadu_ps(at)}; }
  static Vector load(const bfloat16* at) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
  }
  static Vector load(const float16* at) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)))};
  }
  static void load_pairs(const bfloat16* at, Vector& a, Vector& b) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    a = {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16))};
    b = {_mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-0x10000)))};
  }
  void store(float* at) const { _mm256_storeu_ps(at, value); }
  void store(bfloat16* at) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(at), rounded(at)); }
  void store(float16* at) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(at), rounded(at)); }
  void stream(float* at) const { _mm256_stream_ps(at, value); }
  template <class Small>
  static void stream(const Vector (&values)[4], Small* line) {
    for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(line) + i, values[i].rounded(line));
  }
  static void end_streaming() { _mm_sfence(); }
  static void prefetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }
  static void prefetch_to_write(const void* at) { __builtin_prefetch(at, 1); }

 private:
  // The argument only selects the type.
  __m128i rounded(const float16*) const { return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT); }
  __m128i rounded(const bfloat16*) const {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i high = _mm256_srli_epi32(sum, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  }
};

static inline Vector operator+(Vector a, Vector b) { return {_mm256_add_ps(a.value, b.value)}; }
static inline Vector operator-(Vector a, Vector b) { return {_mm256_sub_ps(a.value, b.value)}; }
static inline Vector operator*(Vector a, Vector b) { return {_mm256_mul_ps(a.value, b.value)}; }
static inline Vector operator/(Vector a, Vector b) { return {_mm256_div_ps(a.value, b.value)}; }
static inline Vector sqrt(Vector x) { return {_mm256_sqrt_ps(x.value)}; }
static inline Vector sign(Vector x) {
  const __m256 one = _mm256_or_ps(_mm256_and_ps(x.value, _mm256_set1_ps(-0.0f)), _mm256_set1_ps(1.0f));
  return {_mm256_blendv_ps(x.value, one, _mm256_cmp_ps(x.value, _mm256_setzero_ps(), _CMP_NEQ_OQ))};
}
static inline Vector quiet(Vector x) {
  const __m256 unordered = _mm256_cmp_ps(x.value, x.value, _CMP_UNORD_Q);
  return {_mm256_blendv_ps(x.value, _mm256_set1_ps(__builtin_nanf("")), unordered)};
}

struct Doubles {
  static constexpr int kLanes = 4;
  __m256d value;

  static Doubles broadcast(double x) { return {_mm256_set1_pd(x)}; }
  static Doubles load(const float* at) { return {_mm256_cvtps_pd(_mm_loadu_ps(at))}; }
  void store(double* at) const { _mm256_storeu_pd(at, value); }
};

static inline Doubles operator+(Doubles a, Doubles b) { return {_mm256_add_pd(a.value, b.value)}; }
static inline Doubles operator-(Doubles a, Doubles b) { return {_mm256_sub_pd(a.value, b.value)}; }
static inline Doubles operator*(Doubles a, Doubles b) { return {_mm256_mul_pd(a.value, b.value)}; }

#include "elementwise-inl.h"

}  // namespace spillway::avx2
