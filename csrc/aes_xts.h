// AES-256 in XTS mode (IEEE 1619-2007, NIST SP 800-38E) over whole blocks; no ciphertext stealing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spillway {

constexpr size_t kAesBlock = 16, kAesRounds = 14, kXtsKey = 64;

// Round keys in the form that the processor's instructions take: FIPS 197, for decryption as in its section 5.3.5.
struct AesKey {
  alignas(16) uint8_t round[(kAesRounds + 1) * kAesBlock];
};

struct XtsKeys {
  AesKey encrypt, decrypt, tweak;

  // The first half of `key` is the data's, the second the tweak's.
  explicit XtsKeys(const uint8_t key[kXtsKey]);
};

// dst[i] = cipher(src[i] ^ t) ^ t, where t is `tweak` for the first block and is multiplied by x from block to block.
// On return `tweak` is that of the block after the last. src and dst are the same array, or do not overlap. With a
// tweak of zeros, one block is plain AES.
using XtsBlocks = void(const AesKey& key, bool encrypts, const uint8_t* src, uint8_t* dst, size_t num_blocks,
                       uint8_t tweak[kAesBlock]);

XtsBlocks xts_portable;
XtsBlocks xts_aesni;   // only if aesni_available()
XtsBlocks xts_vaes;    // only if vaes_available()
bool aesni_available();
bool vaes_available();

// Returns the fastest of these that this machine has.
XtsBlocks* xts_blocks();

// Units of `unit_bytes`, which is whole blocks. A unit's number is `sequence` * 2^64 + first_unit + its index.
struct XtsUnits {
  uint64_t unit_bytes, first_unit, sequence;
};

// Encrypts or decrypts `num_units` units. src and dst are the same array, or do not overlap.
void xts_apply(XtsBlocks* blocks, const XtsKeys& keys, bool encrypts, const uint8_t* src, uint8_t* dst,
               const XtsUnits& units, uint64_t num_units);

}  // namespace spillway
