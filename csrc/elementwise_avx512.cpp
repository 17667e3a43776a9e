// Sixteen values at a time. Compiled with -mavx512f -mavx512bw (every server processor since 2017).
#include <immintrin.h>

#include "elementwise.h"

namespace spillway::avx512 {

struct Vector {
  static constexpr int kLanes = 16;
  __m512 value;

  static Vector broadcast(float x) { return {_mm512_set1_ps(x)}; }
  static Vector load(const float* at) { return {_mm512_loadu_ps(at)}; }
  static Vector load(const bfloat16* at) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
  }
  static Vector load(const float16* at) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)))};
  }
  static void load_pairs(const bfloat16* at, Vector& a, Vector& b) {
    const __m512i pairs = _mm512_loadu_si512(at);
    a = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
    b = {_mm512_castsi512_ps(_mm512_and_epi32(pairs, _mm512_set1_epi32(-0x10000)))};
  }
  void store(float* at) const { _mm512_storeu_ps(at, value); }
  void store(bfloat16* at) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), rounded(at)); }
  void store(float16* at) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), rounded(at)); }
  void stream(float* at) const { _mm512_stream_ps(at, value); }
  template <class Small>
  static void stream(const Vector (&values)[2], Small* line) {
    const __m512i low = _mm512_castsi256_si512(values[0].rounded(line));
    _mm512_stream_si512(reinterpret_cast<__m512i*>(line), _mm512_inserti64x4(low, values[1].rounded(line), 1));
  }
  static void end_streaming() { _mm_sfence(); }
  static void prefetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }
  static void prefetch_to_write(const void* at) { __builtin_prefetch(at, 1); }

 private:
  // The argument only selects the type.
  __m256i rounded(const float16*) const { return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT); }
  // By integer operations, because VCVTNEPS2BF16 would flush denormals to zero.
  __m256i rounded(const bfloat16*) const {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16));
  }
};

static inline Vector operator+(Vector a, Vector b) { return {_mm512_add_ps(a.value, b.value)}; }
static inline Vector operator-(Vector a, Vector b) { return {_mm512_sub_ps(a.value, b.value)}; }
static inline Vector operator*(Vector a, Vector b) { return {_mm512_mul_ps(a.value, b.value)}; }
static inline Vector operator/(Vector a, Vector b) { return {_mm512_div_ps(a.value, b.value)}; }
static inline Vector sqrt(Vector x) { return {_mm512_sqrt_ps(x.value)}; }
static inline Vector sign(Vector x) {
  const __m512i sign_bit = _mm512_and_epi32(_mm512_castps_si512(x.value), _mm512_set1_epi32(INT32_MIN));
  const __m512 one = _mm512_castsi512_ps(_mm512_or_epi32(sign_bit, _mm512_castps_si512(_mm512_set1_ps(1.0f))));
  return {_mm512_mask_mov_ps(x.value, _mm512_cmp_ps_mask(x.value, _mm512_setzero_ps(), _CMP_NEQ_OQ), one)};
}
static inline Vector quiet(Vector x) {
  const __mmask16 unordered = _mm512_cmp_ps_mask(x.value, x.value, _CMP_UNORD_Q);
  return {_mm512_mask_mov_ps(x.value, unordered, _mm512_set1_ps(__builtin_nanf("")))};
}

struct Doubles {
  static constexpr int kLanes = 8;
  __m512d value;

  static Doubles broadcast(double x) { return {_mm512_set1_pd(x)}; }
  static Doubles load(const float* at) { return {_mm512_cvtps_pd(_mm256_loadu_ps(at))}; }
  void store(double* at) const { _mm512_storeu_pd(at, value); }
};

static inline Doubles operator+(Doubles a, Doubles b) { return {_mm512_add_pd(a.value, b.value)}; }
static inline Doubles operator-(Doubles a, Doubles b) { return {_mm512_sub_pd(a.value, b.value)}; }
static inline Doubles operator*(Doubles a, Doubles b) { return {_mm512_mul_pd(a.value, b.value)}; }

#include "elementwise-inl.h"

}  // namespace spillway::avx512
