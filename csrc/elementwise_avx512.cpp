// Sixteen values at a time. Compiled with -mavx512f.
#include <immintrin.h>

#include "elementwise.h"

namespace spillway::avx512 {

struct Vector {
  static constexpr int kLanes = 16;
  static constexpr uint64_t kStreamBytes = kLanes * sizeof(bfloat16);
  __m512 value;

  static Vector broadcast(float x) { return {_mm512_set1_ps(x)}; }
  static Vector load(const float* at) { return {_mm512_loadu_ps(at)}; }
  static Vector load(const bfloat16* at) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
  }
  void store(float* at) const { _mm512_storeu_ps(at, value); }
  void store(bfloat16* at) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), rounded()); }
  void stream(bfloat16* at) const { _mm256_stream_si256(reinterpret_cast<__m256i*>(at), rounded()); }
  static void end_streaming() { _mm_sfence(); }

 private:
  // By integers: VCVTNEPS2BF16 would flush denormals to zero.
  __m256i rounded() const {
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
static inline Vector quiet(Vector x) {
  const __mmask16 unordered = _mm512_cmp_ps_mask(x.value, x.value, _CMP_UNORD_Q);
  return {_mm512_mask_mov_ps(x.value, unordered, _mm512_set1_ps(__builtin_nanf("")))};
}

#include "elementwise-inl.h"

}  // namespace spillway::avx512
