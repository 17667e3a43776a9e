// CRC-32C: reflected polynomial 0x82F63B78, initial value and final exclusive-or 0xFFFFFFFF.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spillway {

// All of these continue the conditioned value `crc` (0 to begin) over `nbytes`.
uint32_t crc32c_software(uint32_t crc, const void* bytes, size_t nbytes);
uint32_t crc32c_sse42(uint32_t crc, const void* bytes, size_t nbytes);   // only if the processor has SSE 4.2
uint32_t crc32c_avx512(uint32_t crc, const void* bytes, size_t nbytes);  // only if crc32c_avx512_available()
bool crc32c_avx512_available();

// Uses the fastest of these that this machine has.
uint32_t crc32c(uint32_t crc, const void* bytes, size_t nbytes);

// The factor is x^(8 * nbytes) modulo the polynomial. The product of two residues: a crc times the factor is the crc
// after nbytes more bytes of zeros.
uint32_t crc32c_zeros_factor(uint64_t nbytes);
uint32_t crc32c_multiply(uint32_t a, uint32_t b);

// Returns the value of A followed by B, from those of A and B.
inline uint32_t crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t nbytes_b) {
  return crc32c_multiply(crc32c_zeros_factor(nbytes_b), crc_a) ^ crc_b;
}

}  // namespace spillway
