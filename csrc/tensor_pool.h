// Memory for large tensors: freed blocks are reused, and never more of it is resident than the peak needed.
//
// One reservation of addresses in huge pages. A block is whole pages; its place is chosen by best fit, and resident
// memory is preferred to untouched memory. Residency is counted in huge pages, as the kernel provides them. If a block
// would make more than `peak held bytes + slack` resident, free huge pages return to the system first. So a process
// occupies what it holds at its peak, and a step that allocates like the one before it causes no page fault.
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

  // Reserves addresses; `ready` tells whether the system provided them. `slack_bytes` may be resident beyond the held
  // bytes.
  TensorPool(uint64_t capacity_bytes, uint64_t slack_bytes);
  ~TensorPool();
  TensorPool(const TensorPool&) = delete;
  TensorPool& operator=(const TensorPool&) = delete;

  bool ready() const { return base_ != nullptr; }
  bool owns(const void* memory) const {
    return reinterpret_cast<uintptr_t>(memory) - reinterpret_cast<uintptr_t>(base_) < capacity_;
  }

  // Returns a page-aligned block; nullptr if there is no room.
  void* allocate(uint64_t nbytes);
  void deallocate(void* memory);

  // Called when a step begins: memory that is resident beyond the peak since the last call, plus the slack, returns to
  // the system.
  void mark();

  uint64_t held_bytes();
  uint64_t resident_bytes();

  // Called around fork(), so that the child finds the pool unlocked and consistent.
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
