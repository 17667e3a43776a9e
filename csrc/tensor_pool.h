// Memory for large tensors: freed blocks are used again, and never more of it is resident than the fullest moment needed.
//
// One reservation of addresses in huge pages. A block is whole pages; which to take is best fit, where resident memory
// comes before untouched. Residency is counted in huge pages, as the kernel gives them. When a block would make more
// resident than `most live bytes + slack`, free huge pages go back to the system first: so a process occupies what it
// holds at its fullest, and a step that allocates as the one before it did faults no page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace spillway {

class TensorPool {
 public:
  static constexpr uint64_t kPage = 4096, kHugePage = uint64_t{2} << 20;

  // Reserves addresses; `ready` tells whether the system gave them. `slack_bytes` may be resident beyond what is held.
  TensorPool(uint64_t capacity_bytes, uint64_t slack_bytes);
  ~TensorPool();
  TensorPool(const TensorPool&) = delete;
  TensorPool& operator=(const TensorPool&) = delete;

  bool ready() const { return base_ != nullptr; }
  bool owns(const void* memory) const {
    return reinterpret_cast<uintptr_t>(memory) - reinterpret_cast<uintptr_t>(base_) < capacity_;
  }

  // A page-aligned block; nullptr where there is no room.
  void* allocate(uint64_t nbytes);
  void deallocate(void* memory);

  // A step begins: what is resident beyond the fullest moment since the last call goes back to the system.
  void mark();

  uint64_t held_bytes();
  uint64_t resident_bytes();

  // Around fork(): the child finds the pool unlocked and whole.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  struct Place {
    uint64_t offset, new_pages;
  };

  bool find(uint64_t nbytes, Place& best);
  uint64_t untouched(uint64_t offset, uint64_t nbytes) const;
  void take(uint64_t offset, uint64_t nbytes);
  void give(uint64_t offset, uint64_t nbytes);
  void shrink(uint64_t wanted_pages, uint64_t limit_bytes, uint64_t begin, uint64_t end);
  void drop(uint64_t first_page, uint64_t last_page);

  std::mutex mutex_;
  unsigned char* base_ = nullptr;
  void* reservation_ = nullptr;
  uint64_t capacity_ = 0, slack_ = 0;
  uint64_t held_ = 0, fullest_ = 0, fullest_since_mark_ = 0, resident_pages_ = 0;
  std::map<uint64_t, uint64_t> free_;            // offset -> bytes, no two of them adjacent
  std::unordered_map<uint64_t, uint64_t> held_blocks_;  // offset -> bytes
  std::vector<bool> resident_;                   // by huge page
};

}  // namespace spillway
