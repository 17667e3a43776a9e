// Eight values at a time. Compiled with -mavx2.
#include <immintrin.h>

#include "elementwise.h"

namespace spillway::avx2 {

struct Vector {
  static constexpr int kLanes = 8;
  static constexpr uint64_t kStreamBytes = kLanes * sizeof(bfloat16);
  __m256 value;

  static Vector broadcast(float x) { return {_mm256_set1_ps(x)}; }
  static Vector load(const float* at) { return {_mm256_loadu_ps(at)}; }
  static Vector load(const bfloat16* at) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
  }
  void store(float* at) const { _mm256_storeu_ps(at, value); }
  void store(bfloat16* at) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(at), rounded()); }
  void stream(bfloat16* at) const { _mm_stream_si128(reinterpret_cast<__m128i*>(at), rounded()); }
  static void end_streaming() { _mm_sfence(); }

 private:
  __m128i rounded() const {
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
static inline Vector quiet(Vector x) {
  const __m256 unordered = _mm256_cmp_ps(x.value, x.value, _CMP_UNORD_Q);
  return {_mm256_blendv_ps(x.value, _mm256_set1_ps(__builtin_nanf("")), unordered)};
}

#include "elementwise-inl.h"

}  // namespace spillway::avx2
