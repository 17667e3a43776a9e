// Every piece runs exactly once, with any number of callers at a time, and again after a fork.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "process_local.h"
#include "thread_pool.h"

using namespace spillway;

namespace {

void run_and_check(ThreadPool& pool, int64_t num_pieces, int num_threads) {
  const std::unique_ptr<std::atomic<int>[]> runs(new std::atomic<int>[static_cast<size_t>(num_pieces) + 1]());
  pool.run(num_pieces, num_threads, [&](int64_t piece) { runs[static_cast<size_t>(piece)].fetch_add(1); });
  for (int64_t piece = 0; piece < num_pieces; ++piece) CHECK(runs[static_cast<size_t>(piece)] == 1);
}

}  // namespace

int main() {
  ProcessLocal<ThreadPool> slot;
  for (int64_t num_pieces : {0, 1, 2, 1000}) {
    for (int num_threads : {INT_MIN, 0, 1, 2, 8}) run_and_check(slot.get(), num_pieces, num_threads);
  }
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&slot, caller] {
      for (int i = 0; i < 300; ++i) run_and_check(slot.get(), 1 + (i * 7 + caller) % 50, 1 + i % 4);
    });
  }
  for (std::thread& caller : callers) caller.join();

#if !defined(__SANITIZE_THREAD__)  // it does not follow threads started after a multi-threaded fork
  const pid_t child = fork();
  if (child == 0) {
    run_and_check(slot.get(), 1000, 4);
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
#endif
  for (int i = 0; i < 50; ++i) {
    ThreadPool short_lived;
    run_and_check(short_lived, 5, 3);
  }
  std::printf("every piece ran once\n");
}
