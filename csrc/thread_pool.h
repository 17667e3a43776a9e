// Persistent worker threads of this library, used by nothing else. OpenMP's and torch's pools are never touched.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace spillway {

class ThreadPool {
 public:
  ThreadPool() = default;
  ~ThreadPool();  // joins the workers; the pool must be idle
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Calls work(piece) once for every piece in [0, num_pieces), on the calling thread and on at most num_threads - 1
  // workers, and returns when all calls have returned. Any number of threads may call it at a time. A caller always
  // makes progress by itself, so a busy pool (or one that cannot start threads) delays but never blocks it.
  template <class Work>
  void run(int64_t num_pieces, int num_threads, const Work& work) {
    run_pieces(num_pieces, num_threads, [](const void* w, int64_t piece) { (*static_cast<const Work*>(w))(piece); }, &work);
  }

 private:
  struct Job;
  void run_pieces(int64_t num_pieces, int num_threads, void (*call)(const void*, int64_t), const void* work);
  void start_workers(int num_workers);
  void serve();

  std::mutex mutex_;
  std::condition_variable job_added_;
  std::vector<Job*> jobs_;  // those that still want workers; oldest first
  std::vector<std::thread> workers_;
  bool closing_ = false;
};

// The pool of all compute functions; lives until the process ends.
ThreadPool& compute_pool();

}  // namespace spillway
