// The published vector; every instruction set gives the portable result; decryption restores the input; every handle
// has its own key.
#include <cstring>
#include <random>
#include <vector>

#include "aes_xts.h"
#include "check.h"
#include "spillway.h"

using namespace spillway;

namespace {

void check_against_portable(XtsBlocks* blocks, const char* name) {
  std::mt19937 random(1);
  uint8_t key[kXtsKey];
  for (uint8_t& byte : key) byte = static_cast<uint8_t>(random());
  const XtsKeys keys(key);
  std::vector<uint8_t> text(20000), wanted(text.size()), found(text.size());
  for (uint8_t& byte : text) byte = static_cast<uint8_t>(random());
  for (size_t num_blocks = 0; num_blocks < 70; ++num_blocks) {
    for (int trial = 0; trial < 4; ++trial) {
      const size_t begin = random() % 64, num_units = 1 + random() % 3, nbytes = num_units * num_blocks * kAesBlock;
      const XtsUnits units{num_blocks * kAesBlock, random() * uint64_t{0x100000001}, random()};
      xts_apply(xts_portable, keys, true, text.data() + begin, wanted.data(), units, num_units);
      xts_apply(blocks, keys, true, text.data() + begin, found.data() + begin, units, num_units);
      CHECK(std::memcmp(found.data() + begin, wanted.data(), nbytes) == 0);
      xts_apply(blocks, keys, false, found.data() + begin, found.data() + begin, units, num_units);  // in place
      CHECK(std::memcmp(found.data() + begin, text.data() + begin, nbytes) == 0);
      xts_apply(xts_portable, keys, false, wanted.data(), found.data(), units, num_units);
      CHECK(std::memcmp(found.data(), text.data() + begin, nbytes) == 0);
    }
  }
  std::printf("AES-XTS %s: the portable bytes\n", name);
}

}  // namespace

int main() {
  // FIPS 197, C.3, by one block with a tweak of zeros.
  uint8_t key[kXtsKey] = {}, block[kAesBlock], found[kAesBlock], zeros[kAesBlock] = {};
  for (uint8_t i = 0; i < 32; ++i) key[i] = i;
  for (uint8_t i = 0; i < 16; ++i) block[i] = static_cast<uint8_t>(0x11 * i);
  const uint8_t wanted[] = {0x8E, 0xA2, 0xB7, 0xCA, 0x51, 0x67, 0x45, 0xBF, 0xEA, 0xFC, 0x49, 0x90, 0x4B, 0x49, 0x60, 0x89};
  xts_portable(XtsKeys(key).encrypt, true, block, found, 1, zeros);
  CHECK(std::memcmp(found, wanted, kAesBlock) == 0);

  check_against_portable(xts_blocks(), "by default");
#if defined(SPILLWAY_HAVE_AESNI)
  if (aesni_available()) check_against_portable(xts_aesni, "by AES-NI");
  if (vaes_available()) check_against_portable(xts_vaes, "by VAES");
#endif

  spillway_cipher *first = nullptr, *second = nullptr;
  CHECK(spillway_cipher_open(nullptr, &first) == SPILLWAY_OK && spillway_cipher_open(nullptr, &second) == SPILLWAY_OK);
  std::vector<uint8_t> text(1 << 20, 7), one(text.size()), many(text.size()), other(text.size());
  const auto apply = [&](spillway_cipher* cipher, std::vector<uint8_t>& dst, int32_t num_threads) {
    CHECK(spillway_cipher_apply(cipher, SPILLWAY_WRITE, dst.data(), text.data(), text.size(), 4096, 5, 6, SPILLWAY_ISA_AUTO,
                                num_threads) == SPILLWAY_OK);
  };
  apply(first, one, 1), apply(first, many, 4), apply(second, other, 1);
  CHECK(one == many);
  CHECK(one != other);  // keys are random
  CHECK(spillway_cipher_apply(first, SPILLWAY_WRITE, one.data(), text.data(), 4095, 4096, 0, 0, 0, 1) == SPILLWAY_BAD_ARGUMENT);
  spillway_cipher_close(first), spillway_cipher_close(second), spillway_cipher_close(nullptr);
}
