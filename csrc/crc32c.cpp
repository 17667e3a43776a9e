#include "crc32c.h"

#include <array>
#include <cstring>

namespace spillway {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;

// tables[k][b]: the register after byte b and k bytes of zeros (slicing by eight).
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

}  // namespace

uint32_t crc32c_software(uint32_t crc, const void* bytes, size_t nbytes) {
  const auto* at = static_cast<const unsigned char*>(bytes);
  crc = ~crc;
  for (; nbytes >= 8; at += 8, nbytes -= 8) {
    crc ^= at[0] | at[1] << 8 | at[2] << 16 | static_cast<uint32_t>(at[3]) << 24;
    crc = kTables[7][crc & 0xFF] ^ kTables[6][(crc >> 8) & 0xFF] ^ kTables[5][(crc >> 16) & 0xFF] ^ kTables[4][crc >> 24] ^
          kTables[3][at[4]] ^ kTables[2][at[5]] ^ kTables[1][at[6]] ^ kTables[0][at[7]];
  }
  for (; nbytes > 0; ++at, --nbytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *at) & 0xFF];
  return ~crc;
}

uint32_t crc32c(uint32_t crc, const void* bytes, size_t nbytes) {
#if defined(SPILLWAY_HAVE_SSE42)
  static const bool has_avx512 = crc32c_avx512_available();
  if (has_avx512) return crc32c_avx512(crc, bytes, nbytes);
  if (__builtin_cpu_supports("sse4.2")) return crc32c_sse42(crc, bytes, nbytes);
#endif
  return crc32c_software(crc, bytes, nbytes);
}

// Residues are reflected: bit 31 is x^0.
uint32_t crc32c_multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (; a != 0; a <<= 1) {
    if (a & 0x80000000) product ^= b;
    b = (b >> 1) ^ ((b & 1) ? kPolynomial : 0);
  }
  return product;
}

uint32_t crc32c_zeros_factor(uint64_t nbytes) {
  uint32_t factor = 0x80000000;        // x^0
  uint32_t square = 0x80000000 >> 8;   // x^8, squared for every bit of nbytes
  for (; nbytes != 0; nbytes >>= 1) {
    if (nbytes & 1) factor = crc32c_multiply(factor, square);
    square = crc32c_multiply(square, square);
  }
  return factor;
}

}  // namespace spillway
