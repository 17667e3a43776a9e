// An object with threads, locks or kernel handles that a child process cannot use: made on first use, and made again
// after a fork. Threads do not survive a fork, and one of them may have held the parent's mutexes, so the child
// abandons the old object without touching it.
#pragma once

#include <unistd.h>

#include <atomic>

namespace spillway {

template <class Object>
class ProcessLocal {
 public:
  ~ProcessLocal() {
    Held* held = held_.load();
    if (held != nullptr && held->process == getpid()) delete held;
  }

  Object& get() {
    Held* held = held_.load(std::memory_order_acquire);
    while (held == nullptr || held->process != getpid()) {
      Held* made = new Held{getpid(), {}};
      if (held_.compare_exchange_strong(held, made, std::memory_order_acq_rel)) return made->object;
      delete made;  // another thread was first and made `held`
    }
    return held->object;
  }

 private:
  struct Held {
    pid_t process;
    Object object;
  };
  std::atomic<Held*> held_{nullptr};
};

}  // namespace spillway
