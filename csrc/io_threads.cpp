#include <errno.h>
#include <sched.h>
#include <unistd.h>

#include "io_engine.h"
#include "io_pieces.h"
#include "process_local.h"
#include "thread_pool.h"

namespace spillway {
namespace {

static_assert(sizeof(off_t) == 8, "files beyond 2 GiB");

int64_t system_call(void*, int32_t direction, int32_t file, void* buffer, uint64_t nbytes, uint64_t offset) {
  const auto at = static_cast<off_t>(offset);
  const ssize_t moved = direction == SPILLWAY_WRITE ? pwrite(file, buffer, nbytes, at) : pread(file, buffer, nbytes, at);
  return moved < 0 ? -errno : moved;
}

class ThreadEngine final : public IoEngine {
 public:
  ThreadEngine(int32_t file, int32_t num_threads, spillway_io_call call, void* context)
      : file_(file), num_threads_(num_threads), call_(call != nullptr ? call : system_call), context_(context) {}

  void transfer(spillway_direction direction, spillway_io_request* requests, int64_t num_requests) override {
    std::vector<Piece> pieces = cut(requests, num_requests);
    pool_.get().run(static_cast<int64_t>(pieces.size()), num_threads_, [&](int64_t i) {
      Piece& piece = pieces[static_cast<size_t>(i)];
      // Each thread computes the checksum of its own piece while the device serves the others.
      if (direction == SPILLWAY_WRITE) piece.compute_checksum();
      move(direction, piece);
      if (direction == SPILLWAY_READ && piece.error == SPILLWAY_OK) piece.compute_checksum();
    });
    finish(direction, requests, num_requests, pieces);
  }

 private:
  void move(spillway_direction direction, Piece& piece) const {
    for (;;) {
      const int64_t result = call_(context_, direction, file_, piece.next_byte(), piece.bytes_left(), piece.file_offset());
      if (piece.ends_after(direction, result)) return;
      if (result == -EAGAIN) sched_yield();
    }
  }

  const int32_t file_;
  const int32_t num_threads_;
  const spillway_io_call call_;
  void* const context_;
  ProcessLocal<ThreadPool> pool_;
};

}  // namespace

std::unique_ptr<IoEngine> open_thread_engine(int32_t file, int32_t queue_depth, spillway_io_call call, void* context) {
  return std::make_unique<ThreadEngine>(file, queue_depth, call, context);
}

}  // namespace spillway
