// AES-XTS by the vector instructions, sixteen blocks at a time in four registers. Compiled with -mvaes -mavx512f
// -mavx512bw.
#include <cpuid.h>
#include <immintrin.h>

#include "aes_xts.h"

namespace spillway {
namespace {

constexpr size_t kVectors = 4, kPerVector = 4, kWide = kVectors * kPerVector, kVectorBytes = kPerVector * kAesBlock;

// Multiplies each of four tweaks by x^4: the upper four bits of the low half enter the high half, and those of the high
// half enter the low half times 0x87.
__m512i times_x4(__m512i tweaks) {
  const __m512i carried = _mm512_srli_epi64(tweaks, 60);
  const __m512i to_low = _mm512_bsrli_epi128(carried, 8), to_high = _mm512_bslli_epi128(carried, 8);
  const __m512i reduced = _mm512_xor_si512(_mm512_xor_si512(to_low, _mm512_slli_epi64(to_low, 1)),
                                           _mm512_xor_si512(_mm512_slli_epi64(to_low, 2), _mm512_slli_epi64(to_low, 7)));
  return _mm512_xor_si512(_mm512_xor_si512(_mm512_slli_epi64(tweaks, 4), to_high), reduced);
}

__m128i doubled(__m128i tweak) {
  const __m128i signs = _mm_srai_epi32(_mm_shuffle_epi32(tweak, 0x13), 31);
  return _mm_xor_si128(_mm_add_epi64(tweak, tweak), _mm_and_si128(signs, _mm_set_epi64x(1, 0x87)));
}

__m512i first_tweaks(const uint8_t* tweak) {
  const __m128i one = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tweak));
  const __m128i two = doubled(one), three = doubled(two);
  __m512i all = _mm512_castsi128_si512(one);
  all = _mm512_inserti32x4(all, two, 1);
  all = _mm512_inserti32x4(all, three, 2);
  return _mm512_inserti32x4(all, doubled(three), 3);
}

__m512i round_key(const AesKey& key, size_t round) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(key.round + round * kAesBlock)));
}

template <bool encrypts>
size_t crypt_groups(const AesKey& key, const uint8_t* src, uint8_t* dst, size_t num_groups, uint8_t* tweak) {
  __m512i keys[kAesRounds + 1], next = first_tweaks(tweak);
  for (size_t round = 0; round <= kAesRounds; ++round) keys[round] = round_key(key, round);
  for (size_t group = 0; group < num_groups; ++group) {
    __m512i block[kVectors], whitening[kVectors];
    for (size_t i = 0; i < kVectors; ++i, next = times_x4(next)) {
      whitening[i] = next;
      const __m512i bytes = _mm512_loadu_si512(src + (group * kVectors + i) * kVectorBytes);
      block[i] = _mm512_xor_si512(_mm512_xor_si512(bytes, next), keys[0]);
    }
    for (size_t round = 1; round < kAesRounds; ++round) {
      for (__m512i& each : block) {
        each = encrypts ? _mm512_aesenc_epi128(each, keys[round]) : _mm512_aesdec_epi128(each, keys[round]);
      }
    }
    for (size_t i = 0; i < kVectors; ++i) {
      block[i] = encrypts ? _mm512_aesenclast_epi128(block[i], keys[kAesRounds])
                          : _mm512_aesdeclast_epi128(block[i], keys[kAesRounds]);
      _mm512_storeu_si512(dst + (group * kVectors + i) * kVectorBytes, _mm512_xor_si512(block[i], whitening[i]));
    }
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(tweak), _mm512_castsi512_si128(next));
  return num_groups * kWide;
}

}  // namespace

bool vaes_available() {
  unsigned int eax, ebx, ecx, edx;
  const bool has_vaes = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ecx & (1U << 9)) != 0;
  return has_vaes && aesni_available() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
}

void xts_vaes(const AesKey& key, bool encrypts, const uint8_t* src, uint8_t* dst, size_t num_blocks,
              uint8_t tweak[kAesBlock]) {
  size_t done = 0;
  if (const size_t num_groups = num_blocks / kWide) {
    done = encrypts ? crypt_groups<true>(key, src, dst, num_groups, tweak)
                    : crypt_groups<false>(key, src, dst, num_groups, tweak);
  }
  xts_aesni(key, encrypts, src + done * kAesBlock, dst + done * kAesBlock, num_blocks - done, tweak);
}

}  // namespace spillway
