#include "spill_cipher.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>

#include <new>

namespace spillway {
namespace {

constexpr size_t kPage = 4096;

struct Page {
  uint8_t given[kXtsKey];
  alignas(XtsKeys) unsigned char expanded[sizeof(XtsKeys)];
};
static_assert(sizeof(Page) <= kPage);

bool fill_with_random(uint8_t* at, size_t nbytes) {
  while (nbytes > 0) {
    const ssize_t got = getrandom(at, nbytes, 0);
    if (got < 0 && errno != EINTR) return false;
    if (got > 0) at += got, nbytes -= static_cast<size_t>(got);
  }
  return true;
}

}  // namespace

void WipedKeys::operator()(XtsKeys* keys) const {
  auto* page = reinterpret_cast<unsigned char*>(keys) - offsetof(Page, expanded);
  explicit_bzero(page, kPage);
  munmap(page, kPage);
}

HeldKeys hold_keys(const uint8_t* key, bool& has_random) {
  has_random = true;
  void* memory = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  (void)mlock(memory, kPage);  // without RLIMIT_MEMLOCK this fails, and the page may be swapped out like any other
  madvise(memory, kPage, MADV_DONTDUMP);
  auto* page = static_cast<Page*>(memory);
  if (key != nullptr) memcpy(page->given, key, kXtsKey);
  if (key == nullptr && !fill_with_random(page->given, kXtsKey)) {
    munmap(memory, kPage);
    has_random = false;
    return nullptr;
  }
  HeldKeys keys(new (page->expanded) XtsKeys(page->given));
  explicit_bzero(page->given, kXtsKey);
  return keys;
}

}  // namespace spillway
