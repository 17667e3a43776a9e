#include "thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <exception>

#include "process_local.h"

namespace spillway {

struct ThreadPool::Job {
  void (*call)(const void*, int64_t);
  const void* work;
  int64_t num_pieces;
  std::atomic<int64_t> next_piece{0};
  int workers_wanted;      // guarded by the pool's mutex, as are the two below
  int workers_active = 0;
  std::condition_variable worker_left;

  void run_remaining_pieces() {
    for (int64_t piece; (piece = next_piece.fetch_add(1, std::memory_order_relaxed)) < num_pieces;) call(work, piece);
  }
};

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  job_added_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run_pieces(int64_t num_pieces, int num_threads, void (*call)(const void*, int64_t), const void* work) {
  const int workers_wanted = static_cast<int>(std::min<int64_t>(std::max(num_threads, 1), num_pieces)) - 1;
  if (workers_wanted <= 0) {
    for (int64_t piece = 0; piece < num_pieces; ++piece) call(work, piece);
    return;
  }
  Job job{call, work, num_pieces, {}, workers_wanted, 0, {}};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    start_workers(workers_wanted);
    jobs_.push_back(&job);
  }
  for (int i = 0; i < workers_wanted; ++i) job_added_.notify_one();
  job.run_remaining_pieces();

  // Every piece is taken now: workers that have not joined are not needed, and those at work are waited for.
  std::unique_lock<std::mutex> lock(mutex_);
  jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), &job), jobs_.end());
  job.worker_left.wait(lock, [&job] { return job.workers_active == 0; });
}

// Called with the mutex held. Workers start with all signals blocked, so that signals go to the application's threads.
void ThreadPool::start_workers(int num_workers) {
  if (static_cast<int>(workers_.size()) >= num_workers) return;
  sigset_t all, callers;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &callers);
  try {
    while (static_cast<int>(workers_.size()) < num_workers) workers_.emplace_back([this] { serve(); });
  } catch (const std::exception&) {
    // At the limit of threads or memory: the job runs on the existing threads, at least on its caller.
  }
  pthread_sigmask(SIG_SETMASK, &callers, nullptr);
}

void ThreadPool::serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    job_added_.wait(lock, [this] { return closing_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    Job* job = jobs_.front();
    if (--job->workers_wanted == 0) jobs_.erase(jobs_.begin());
    ++job->workers_active;
    lock.unlock();
    job->run_remaining_pieces();
    lock.lock();
    // Notified under the mutex, because the job is on its caller's stack and is gone as soon as the caller sees zero.
    if (--job->workers_active == 0) job->worker_left.notify_one();
  }
}

ThreadPool& compute_pool() {
  static auto* pool = new ProcessLocal<ThreadPool>;  // never destroyed: workers may outlive static destructors
  return pool->get();
}

}  // namespace spillway
