// CRC-32C: reflected polynomial 0x82F63B78, initial value and final exclusive-or 0xFFFFFFFF.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spillway {

// All continue the conditioned value `crc` (0 to begin) over `nbytes`.
uint32_t crc32c_software(uint32_t crc, const void* bytes, size_t nbytes);
uint32_t crc32c_sse42(uint32_t crc, const void* bytes, size_t nbytes);   // only where SSE 4.2 is
uint32_t crc32c_avx512(uint32_t crc, const void* bytes, size_t nbytes);  // only where crc32c_avx512_available()
bool crc32c_avx512_available();

// The fastest of these that this machine has.
uint32_t crc32c(uint32_t crc, const void* bytes, size_t nbytes);

// x^(8 * nbytes) modulo the polynomial, and the product of two such residues: a crc times it is the crc followed by
// nbytes of zeros.
uint32_t crc32c_zeros_factor(uint64_t nbytes);
uint32_t crc32c_multiply(uint32_t a, uint32_t b);

// The value of A followed by B, from those of A and B.
inline uint32_t crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t nbytes_b) {
  return crc32c_multiply(crc32c_zeros_factor(nbytes_b), crc_a) ^ crc_b;
}

}  // namespace spillway
