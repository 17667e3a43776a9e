// Blocks never overlap and keep their bytes; freed memory is reused; residency stays within its bound, also as counted
// by the kernel; several threads and a child process may use the pool.
#include "tensor_pool.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "check.h"

using namespace spillway;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20, kSlack = 8 * kMiB;

bool is_filled(const unsigned char* bytes, uint64_t nbytes, unsigned char value) {
  return bytes[0] == value && std::memcmp(bytes, bytes + 1, nbytes - 1) == 0;
}

// Bytes of the pages that the kernel has given for [memory, memory + nbytes).
uint64_t kernel_bytes(void* memory, uint64_t nbytes) {
  std::vector<unsigned char> pages(nbytes / TensorPool::kPage);
  CHECK(mincore(memory, nbytes, pages.data()) == 0);
  return TensorPool::kPage * static_cast<uint64_t>(std::count_if(pages.begin(), pages.end(), [](auto p) { return p & 1; }));
}

void random_blocks_keep_their_bytes(TensorPool& pool, unsigned seed, int num_turns) {
  std::mt19937 random(seed);
  std::map<unsigned char*, std::pair<uint64_t, unsigned char>> blocks;
  for (int turn = 0; turn < num_turns; ++turn) {
    const uint64_t nbytes = 1 + random() % (3 * kMiB);
    auto* made = static_cast<unsigned char*>(blocks.size() < 12 ? pool.allocate(nbytes) : nullptr);
    if (made != nullptr) {
      CHECK(reinterpret_cast<uintptr_t>(made) % TensorPool::kPage == 0 && pool.owns(made));
      const auto next = blocks.upper_bound(made);
      CHECK(next == blocks.end() || made + nbytes <= next->first);
      CHECK(next == blocks.begin() || std::prev(next)->first + std::prev(next)->second.first <= made);
      std::memset(made, turn & 0xFF, nbytes);
      blocks[made] = {nbytes, static_cast<unsigned char>(turn)};
    } else if (!blocks.empty()) {
      const auto chosen = std::next(blocks.begin(), random() % blocks.size());
      CHECK(is_filled(chosen->first, chosen->second.first, chosen->second.second));
      pool.deallocate(chosen->first);
      blocks.erase(chosen);
    }
    if (turn % 50 == 0) pool.mark();
  }
  for (const auto& [made, block] : blocks) {
    CHECK(is_filled(made, block.first, block.second));
    pool.deallocate(made);
  }
}

}  // namespace

int main() {
  int elsewhere = 0;
  {
    TensorPool pool(256 * kMiB, kSlack);
    CHECK(pool.ready() && !pool.owns(&elsewhere) && !pool.owns(nullptr));
    random_blocks_keep_their_bytes(pool, 1, 3000);
    CHECK(pool.held_bytes() == 0);
    // All of it is one free run again, and no more fits.
    void* whole = pool.allocate(256 * kMiB);
    CHECK(whole != nullptr && pool.allocate(1) == nullptr);
    pool.deallocate(whole);
  }
  {
    TensorPool pool(256 * kMiB, kSlack);
    std::vector<void*> first, second;
    for (int i = 0; i < 8; ++i) first.push_back(pool.allocate(4 * kMiB));
    for (int i = 0; i < 8; i += 2) pool.deallocate(first[i]);
    for (int i = 0; i < 4; ++i) second.push_back(pool.allocate(4 * kMiB));
    std::sort(second.begin(), second.end());
    for (int i = 0; i < 4; ++i) CHECK(second[i] == first[2 * i]);  // gaps of the same size, filled completely
    CHECK(pool.resident_bytes() == 32 * kMiB);
  }
  {
    TensorPool pool(256 * kMiB, kSlack);
    auto* low = static_cast<unsigned char*>(pool.allocate(64 * kMiB));
    std::memset(low, 1, 64 * kMiB);
    pool.deallocate(low);
    CHECK(pool.resident_bytes() == 64 * kMiB);  // what the peak needed stays
    pool.mark();
    CHECK(pool.resident_bytes() == 64 * kMiB);
    pool.mark();
    CHECK(pool.resident_bytes() == kSlack);  // nothing was held since: it is freed
    CHECK(kernel_bytes(low, 64 * kMiB) <= kSlack);
    auto* again = static_cast<unsigned char*>(pool.allocate(64 * kMiB));
    CHECK(again == low && again[64 * kMiB - 1] == 0);
    pool.deallocate(again);
  }
  {
    // Gaps into which no block fits: their pages are freed before others are touched, and residency stays within held
    // bytes plus slack.
    TensorPool pool(1024 * kMiB, kSlack);
    std::vector<void*> small, large;
    for (int i = 0; i < 32; ++i) small.push_back(pool.allocate(4 * kMiB));
    for (int i = 0; i < 32; i += 2) pool.deallocate(small[i]);
    for (int i = 0; i < 8; ++i) {
      large.push_back(pool.allocate(16 * kMiB));
      CHECK(pool.resident_bytes() <= std::max<uint64_t>(128 * kMiB, pool.held_bytes()) + kSlack);
    }
    CHECK(pool.held_bytes() == 192 * kMiB);
  }
  {
    TensorPool pool(512 * kMiB, kSlack);
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 4; ++seed) threads.emplace_back([&, seed] { random_blocks_keep_their_bytes(pool, seed, 300); });
    for (std::thread& thread : threads) thread.join();
    CHECK(pool.held_bytes() == 0);
    auto* shared = static_cast<unsigned char*>(pool.allocate(4 * kMiB));
    std::memset(shared, 7, 4 * kMiB);
    const pid_t child = fork();
    if (child == 0) {
      random_blocks_keep_their_bytes(pool, 9, 100);
      _exit(is_filled(shared, 4 * kMiB, 7) ? 0 : 1);
    }
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    pool.deallocate(shared);
  }
  std::printf("blocks are disjoint, reused, and resident within bounds\n");
}
