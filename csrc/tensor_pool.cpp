#include "tensor_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>

namespace spillway {
namespace {

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

TensorPool::TensorPool(uint64_t capacity_bytes, uint64_t slack_bytes) : slack_(slack_bytes) {
  const uint64_t capacity = round_up(capacity_bytes, kHugePage);
  void* found = mmap(nullptr, capacity + kHugePage, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return;
  reservation_ = found;
  capacity_ = capacity;
  base_ = reinterpret_cast<unsigned char*>(round_up(reinterpret_cast<uintptr_t>(found), kHugePage));
  madvise(base_, capacity_, MADV_HUGEPAGE);  // if the kernel has no huge pages, it rejects: small pages
  resident_.resize(capacity_ / kHugePage);
  free_.emplace(0, capacity_);
}

TensorPool::~TensorPool() {
  if (reservation_ != nullptr) munmap(reservation_, capacity_ + kHugePage);
}

void* TensorPool::allocate(uint64_t nbytes) {
  nbytes = round_up(std::max<uint64_t>(nbytes, 1), kPage);
  std::lock_guard<std::mutex> guard(mutex_);
  Place place;
  if (nbytes > capacity_ - held_ || !find(nbytes, place)) return nullptr;
  held_ += nbytes;
  fullest_since_mark_ = std::max(fullest_since_mark_, held_);
  fullest_ = std::max(fullest_, held_);
  shrink(place.new_pages, fullest_ + slack_, place.offset, place.offset + nbytes);
  take(place.offset, nbytes);
  return base_ + place.offset;
}

void TensorPool::deallocate(void* memory) {
  const uint64_t offset = static_cast<uint64_t>(static_cast<unsigned char*>(memory) - base_);
  std::lock_guard<std::mutex> guard(mutex_);
  const auto block = held_blocks_.find(offset);
  if (block == held_blocks_.end()) return;  // a second free does nothing
  const uint64_t nbytes = block->second;
  held_blocks_.erase(block);
  held_ -= nbytes;
  give(offset, nbytes);
}

void TensorPool::mark() {
  std::lock_guard<std::mutex> guard(mutex_);
  fullest_ = std::max(fullest_since_mark_, held_);
  fullest_since_mark_ = held_;
  shrink(0, fullest_ + slack_, 0, 0);
}

uint64_t TensorPool::held_bytes() {
  std::lock_guard<std::mutex> guard(mutex_);
  return held_;
}

uint64_t TensorPool::resident_bytes() {
  std::lock_guard<std::mutex> guard(mutex_);
  return resident_pages_ * kHugePage;
}

// Tries both ends of every free run and prefers the fewest new pages, then the smallest run, then the lowest address.
bool TensorPool::find(uint64_t nbytes, Place& best) {
  bool found = false;
  uint64_t best_run = 0;
  for (const auto& [start, run] : free_) {
    if (run < nbytes) continue;
    for (const uint64_t offset : {start, start + run - nbytes}) {
      const uint64_t pages = untouched(offset, nbytes);
      if (!found || pages < best.new_pages || (pages == best.new_pages && run < best_run)) {
        best = {offset, pages};
        best_run = run;
        found = true;
      }
    }
  }
  return found;
}

uint64_t TensorPool::untouched(uint64_t offset, uint64_t nbytes) const {
  uint64_t count = 0;
  for (uint64_t page = offset / kHugePage; page <= (offset + nbytes - 1) / kHugePage; ++page) count += !resident_[page];
  return count;
}

void TensorPool::take(uint64_t offset, uint64_t nbytes) {
  const auto run = std::prev(free_.upper_bound(offset));
  const uint64_t start = run->first, end = start + run->second;
  free_.erase(run);
  if (offset > start) free_.emplace(start, offset - start);
  if (offset + nbytes < end) free_.emplace(offset + nbytes, end - offset - nbytes);
  held_blocks_.emplace(offset, nbytes);
  for (uint64_t page = offset / kHugePage; page <= (offset + nbytes - 1) / kHugePage; ++page) {
    resident_pages_ += !resident_[page];
    resident_[page] = true;
  }
}

void TensorPool::give(uint64_t offset, uint64_t nbytes) {
  const auto after = free_.lower_bound(offset);
  if (after != free_.end() && after->first == offset + nbytes) {
    nbytes += after->second;
    free_.erase(after);
  }
  const auto next = free_.lower_bound(offset);
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += nbytes;
      return;
    }
  }
  free_.emplace(offset, nbytes);
}

// Makes room for `wanted_pages` more under `limit_bytes`: drops free pages from the end, except those that [begin, end)
// will use.
void TensorPool::shrink(uint64_t wanted_pages, uint64_t limit_bytes, uint64_t begin, uint64_t end) {
  const uint64_t limit = limit_bytes / kHugePage;
  if (resident_pages_ + wanted_pages <= limit) return;
  uint64_t excess = resident_pages_ + wanted_pages - limit;
  for (auto run = free_.rbegin(); run != free_.rend() && excess > 0; ++run) {
    const uint64_t first = round_up(run->first, kHugePage) / kHugePage;
    uint64_t page = (run->first + run->second) / kHugePage;
    while (page > first && excess > 0) {
      --page;
      const bool spared = begin < end && page >= begin / kHugePage && page <= (end - 1) / kHugePage;
      if (!resident_[page] || spared) continue;
      drop(page, page + 1);
      --excess;
    }
  }
}

void TensorPool::drop(uint64_t first_page, uint64_t last_page) {
  madvise(base_ + first_page * kHugePage, (last_page - first_page) * kHugePage, MADV_DONTNEED);
  for (uint64_t page = first_page; page < last_page; ++page) {
    resident_pages_ -= resident_[page];
    resident_[page] = false;
  }
}

}  // namespace spillway
