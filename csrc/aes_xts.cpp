#include "aes_xts.h"

#include <array>
#include <cstring>

namespace spillway {
namespace {

// Product in GF(2^8), modulo x^8 + x^4 + x^3 + x + 1.
constexpr uint8_t times(uint8_t a, uint8_t b) {
  unsigned product = 0, shifted = a;
  for (unsigned left = b; left != 0; left >>= 1, shifted = (shifted << 1) ^ ((shifted & 0x80) ? 0x11B : 0)) {
    if (left & 1) product ^= shifted;
  }
  return static_cast<uint8_t>(product);
}

struct Boxes {
  std::array<uint8_t, 256> forward{}, inverse{};
};

// Powers of 3, which generates the field, pair each value with its inverse (FIPS 197, 5.1.1).
constexpr Boxes make_boxes() {
  Boxes boxes{};
  uint8_t power = 1, inverse = 1;
  for (int i = 0; i < 255; ++i) {
    uint8_t value = 0x63;
    for (unsigned turn = 0; turn < 5; ++turn) value ^= static_cast<uint8_t>((inverse << turn) | (inverse >> (8 - turn)));
    boxes.forward[power] = value;
    power = times(power, 3), inverse = times(inverse, 0xF6);  // 3 * 0xF6 = 1
  }
  boxes.forward[0] = 0x63;
  for (unsigned i = 0; i < 256; ++i) boxes.inverse[boxes.forward[i]] = static_cast<uint8_t>(i);
  return boxes;
}

constexpr Boxes kBoxes = make_boxes();

// Row r of the mixed column is the sum of factors[(c - r) mod 4] * column[c].
using Factors = std::array<std::array<uint8_t, 256>, 4>;  // for each factor, the table of products by it

constexpr Factors make_factors(uint8_t a, uint8_t b, uint8_t c, uint8_t d) {
  Factors factors{};
  for (unsigned i = 0; i < 256; ++i) {
    const auto byte = static_cast<uint8_t>(i);
    factors[0][i] = times(byte, a), factors[1][i] = times(byte, b);
    factors[2][i] = times(byte, c), factors[3][i] = times(byte, d);
  }
  return factors;
}

constexpr Factors kMix = make_factors(2, 3, 1, 1), kUnmix = make_factors(14, 11, 13, 9);

void mix(const Factors& factors, uint8_t block[kAesBlock]) {
  for (uint8_t* column = block; column < block + kAesBlock; column += 4) {
    uint8_t mixed[4];
    for (unsigned r = 0; r < 4; ++r) {
      mixed[r] = factors[0][column[r]] ^ factors[1][column[(r + 1) % 4]] ^ factors[2][column[(r + 2) % 4]] ^
                 factors[3][column[(r + 3) % 4]];
    }
    std::memcpy(column, mixed, sizeof mixed);
  }
}

void add(uint8_t block[kAesBlock], const uint8_t* other) {
  for (size_t i = 0; i < kAesBlock; ++i) block[i] ^= other[i];
}

// Bytes are stored by columns: byte i is in row i mod 4. Encryption rotates rows to the left, decryption to the right.
void cipher(const AesKey& key, bool encrypts, uint8_t block[kAesBlock]) {
  const std::array<uint8_t, 256>& box = encrypts ? kBoxes.forward : kBoxes.inverse;
  add(block, key.round);
  for (size_t round = 1; round <= kAesRounds; ++round) {
    uint8_t turned[kAesBlock];
    for (size_t i = 0; i < kAesBlock; ++i) {
      const size_t row = i % 4, columns = encrypts ? row : 4 - row;
      turned[i] = box[block[(i + 4 * columns) % kAesBlock]];
    }
    if (round < kAesRounds) mix(encrypts ? kMix : kUnmix, turned);
    add(turned, key.round + round * kAesBlock);
    std::memcpy(block, turned, kAesBlock);
  }
}

AesKey expanded(const uint8_t key[32]) {
  AesKey made{};
  std::memcpy(made.round, key, 32);
  uint8_t constant = 1;
  for (size_t at = 32; at < sizeof made.round; at += 4) {
    uint8_t word[4];
    std::memcpy(word, made.round + at - 4, 4);
    if (at % 32 == 0) {
      const uint8_t first = word[0];
      word[0] = kBoxes.forward[word[1]] ^ constant, word[1] = kBoxes.forward[word[2]];
      word[2] = kBoxes.forward[word[3]], word[3] = kBoxes.forward[first];
      constant = times(constant, 2);
    } else if (at % 32 == 16) {
      for (uint8_t& byte : word) byte = kBoxes.forward[byte];
    }
    for (size_t i = 0; i < 4; ++i) made.round[at + i] = made.round[at - 32 + i] ^ word[i];
  }
  return made;
}

AesKey inverted(const AesKey& key) {
  AesKey made{};
  for (size_t round = 0; round <= kAesRounds; ++round) {
    uint8_t* to = made.round + round * kAesBlock;
    std::memcpy(to, key.round + (kAesRounds - round) * kAesBlock, kAesBlock);
    if (round != 0 && round != kAesRounds) mix(kUnmix, to);
  }
  return made;
}

// Multiplies by x in GF(2^128), modulo x^128 + x^7 + x^2 + x + 1; the lowest byte comes first.
void double_tweak(uint8_t tweak[kAesBlock]) {
  unsigned carry = 0;
  for (size_t i = 0; i < kAesBlock; ++i) {
    const unsigned shifted = (static_cast<unsigned>(tweak[i]) << 1) | carry;
    tweak[i] = static_cast<uint8_t>(shifted), carry = shifted >> 8;
  }
  if (carry) tweak[0] ^= 0x87;
}

void put_little_endian(uint8_t* at, uint64_t value) {
  for (int i = 0; i < 8; ++i) at[i] = static_cast<uint8_t>(value >> (8 * i));
}

}  // namespace

XtsKeys::XtsKeys(const uint8_t key[kXtsKey])
    : encrypt(expanded(key)), decrypt(inverted(encrypt)), tweak(expanded(key + kXtsKey / 2)) {}

void xts_portable(const AesKey& key, bool encrypts, const uint8_t* src, uint8_t* dst, size_t num_blocks,
                  uint8_t tweak[kAesBlock]) {
  for (; num_blocks > 0; --num_blocks, src += kAesBlock, dst += kAesBlock) {
    uint8_t block[kAesBlock];
    std::memcpy(block, src, kAesBlock);
    add(block, tweak);
    cipher(key, encrypts, block);
    add(block, tweak);
    std::memcpy(dst, block, kAesBlock);
    double_tweak(tweak);
  }
}

XtsBlocks* xts_blocks() {
#if defined(SPILLWAY_HAVE_AESNI)
  if (vaes_available()) return xts_vaes;
  if (aesni_available()) return xts_aesni;
#endif
  return xts_portable;
}

void xts_apply(XtsBlocks* blocks, const XtsKeys& keys, bool encrypts, const uint8_t* src, uint8_t* dst,
               const XtsUnits& units, uint64_t num_units) {
  for (uint64_t unit = 0; unit < num_units; ++unit, src += units.unit_bytes, dst += units.unit_bytes) {
    uint8_t number[kAesBlock], tweak[kAesBlock], zeros[kAesBlock] = {};
    put_little_endian(number, units.first_unit + unit);
    put_little_endian(number + 8, units.sequence);
    blocks(keys.tweak, true, number, tweak, 1, zeros);
    blocks(encrypts ? keys.encrypt : keys.decrypt, encrypts, src, dst, units.unit_bytes / kAesBlock, tweak);
  }
}

}  // namespace spillway
