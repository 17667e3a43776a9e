#include "torch_memory.h"

#include <pthread.h>
#include <stdlib.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "import_table.h"

namespace spillway {
namespace {

// Never destroyed, because tensors are freed until the process has ended.
std::atomic<TensorPool*> pool{nullptr};
uint64_t least = 0;
bool is_attached = false;

int allocate(void** memory, size_t alignment, size_t nbytes) {
  if (nbytes >= least && alignment <= TensorPool::kPage) {
    void* found = pool.load(std::memory_order_relaxed)->allocate(nbytes);
    if (found != nullptr) {
      *memory = found;
      return 0;
    }
  }
  return posix_memalign(memory, alignment, nbytes);
}

void release(void* memory) {
  TensorPool* ours = pool.load(std::memory_order_relaxed);
  if (ours->owns(memory)) {
    ours->deallocate(memory);
  } else {
    free(memory);
  }
}

void lock() { pool.load()->lock(); }
void unlock() { pool.load()->unlock(); }

}  // namespace

bool attach_tensor_pool(const char* library, uint64_t capacity_bytes, uint64_t least_bytes, uint64_t slack_bytes) {
  static std::mutex attaching;
  std::lock_guard<std::mutex> guard(attaching);
  if (is_attached) return true;
  if (pool.load() == nullptr) {
    auto made = std::make_unique<TensorPool>(capacity_bytes, slack_bytes);
    if (!made->ready()) return false;
    least = least_bytes;
    pool.store(made.release());
    pthread_atfork(lock, unlock, unlock);
  }
  // In this order, because blocks from the pool must return to it.
  is_attached = redirect_import(library, "free", reinterpret_cast<void*>(release)) > 0 &&
                redirect_import(library, "posix_memalign", reinterpret_cast<void*>(allocate)) > 0;
  return is_attached;
}

TensorPool* tensor_pool() { return pool.load(); }

}  // namespace spillway
