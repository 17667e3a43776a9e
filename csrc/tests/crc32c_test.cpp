// The published vectors; every instruction set gives the software's value; combining equals concatenation.
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "crc32c.h"
#include "spillway.h"

using namespace spillway;

int main() {
  unsigned char bytes[32];
  CHECK(crc32c(0, "123456789", 9) == 0xE3069283);  // RFC 3720, B.4, from here on
  std::memset(bytes, 0, sizeof bytes);
  CHECK(crc32c(0, bytes, 32) == 0x8A9136AA);
  std::memset(bytes, 0xFF, sizeof bytes);
  CHECK(crc32c(0, bytes, 32) == 0x62A8AB43);
  for (unsigned char i = 0; i < 32; ++i) bytes[i] = i;
  CHECK(crc32c(0, bytes, 32) == 0x46DD794E);

  std::mt19937 random(1);
  std::vector<unsigned char> text(200000);
  for (unsigned char& byte : text) byte = static_cast<unsigned char>(random());
  for (int trial = 0; trial < 1200; ++trial) {
    const size_t begin = random() % 64, n = trial < 700 ? static_cast<size_t>(trial) : random() % (text.size() - 64);
    const unsigned char* at = text.data() + begin;
    const uint32_t whole = crc32c_software(0, at, n);
    CHECK(crc32c(0, at, n) == whole);
#if defined(SPILLWAY_HAVE_SSE42)
    if (__builtin_cpu_supports("sse4.2")) CHECK(crc32c_sse42(0, at, n) == whole);
    if (crc32c_avx512_available()) CHECK(crc32c_avx512(0, at, n) == whole);
#endif
    const size_t cut = n == 0 ? 0 : random() % n;
    CHECK(crc32c(crc32c(0, at, cut), at + cut, n - cut) == whole);
    CHECK(spillway_crc32c_combine(crc32c(0, at, cut), crc32c(0, at + cut, n - cut), n - cut) == whole);
  }
  std::printf("crc-32c agrees with the published values\n");
}
