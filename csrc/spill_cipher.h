// A key that only this process holds, in a page of its own. The page is not swapped out if the system allows that, is
// in no core dump, and is wiped when it is freed.
#pragma once

#include <cstdint>
#include <memory>

#include "aes_xts.h"

namespace spillway {

struct WipedKeys {
  void operator()(XtsKeys* keys) const;
};

using HeldKeys = std::unique_ptr<XtsKeys, WipedKeys>;

// Keys from the 64 bytes of `key`; if it is null, from random ones. Returns null if the system gives no memory or
// (`has_random` false) no random bytes.
HeldKeys hold_keys(const uint8_t* key, bool& has_random);

}  // namespace spillway
