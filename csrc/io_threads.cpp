#include <errno.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "crc32c.h"
#include "io_engine.h"
#include "thread_pool.h"

namespace spillway {
namespace {

static_assert(sizeof(off_t) == 8, "files beyond 2 GiB");

// Requests are cut so that a few large ones still occupy every thread.
constexpr uint64_t kPieceBytes = uint64_t{4} << 20;

// A transfer resumes at a whole sector: O_DIRECT refuses other offsets, and a device's short transfers end on one.
constexpr uint64_t kSectorBytes = 512;

// Calls in a row that move nothing (EINTR, EAGAIN, less than a sector) before the transfer is given up.
constexpr int kMaxIdleCalls = 1000;

int64_t system_call(void*, int32_t direction, int32_t file, void* buffer, uint64_t nbytes, uint64_t offset) {
  const auto at = static_cast<off_t>(offset);
  const ssize_t moved = direction == SPILLWAY_WRITE ? pwrite(file, buffer, nbytes, at) : pread(file, buffer, nbytes, at);
  return moved < 0 ? -errno : moved;
}

// A range of one request that one thread moves, and how that ended.
struct Piece {
  spillway_io_request* request;
  uint64_t begin;
  uint64_t nbytes;
  uint32_t crc32c = 0;
  int32_t error = SPILLWAY_OK;
  int32_t os_error = 0;
  uint64_t moved = 0;

  char* buffer() const { return static_cast<char*>(request->buffer) + begin; }
  void fail(int32_t with, int32_t with_os_error) { error = with, os_error = with_os_error; }
};

class ThreadEngine final : public IoEngine {
 public:
  ThreadEngine(int32_t file, int32_t num_threads, spillway_io_call call, void* context)
      : file_(file), num_threads_(num_threads), call_(call != nullptr ? call : system_call), context_(context) {}

  void transfer(spillway_direction direction, spillway_io_request* requests, int64_t num_requests) override {
    std::vector<Piece> pieces = cut(requests, num_requests);
    pool_.get().run(static_cast<int64_t>(pieces.size()), num_threads_, [&](int64_t i) {
      Piece& piece = pieces[static_cast<size_t>(i)];
      if (direction == SPILLWAY_WRITE) piece.crc32c = crc32c(0, piece.buffer(), piece.nbytes);
      move(direction, piece);
      if (direction == SPILLWAY_READ && piece.error == SPILLWAY_OK) piece.crc32c = crc32c(0, piece.buffer(), piece.nbytes);
    });
    finish(direction, requests, num_requests, pieces);
  }

 private:
  static std::vector<Piece> cut(spillway_io_request* requests, int64_t num_requests) {
    std::vector<Piece> pieces;
    for (int64_t i = 0; i < num_requests; ++i) {
      for (uint64_t begin = 0; begin < requests[i].nbytes; begin += kPieceBytes) {
        pieces.push_back({&requests[i], begin, std::min(kPieceBytes, requests[i].nbytes - begin)});
      }
    }
    return pieces;
  }

  void move(spillway_direction direction, Piece& piece) const {
    int idle_calls = 0;
    while (piece.moved < piece.nbytes) {
      const int64_t result = call_(context_, direction, file_, piece.buffer() + piece.moved, piece.nbytes - piece.moved,
                                   piece.request->offset + piece.begin + piece.moved);
      if (result == 0 && direction == SPILLWAY_READ) return piece.fail(SPILLWAY_END_OF_FILE, 0);
      const bool again = result == -EINTR || result == -EAGAIN || result == 0;
      if (result < 0 && !again) return piece.fail(SPILLWAY_IO_FAILED, static_cast<int32_t>(-result));
      const uint64_t before = piece.moved;
      if (!again) piece.moved = resume_point(piece, static_cast<uint64_t>(result));
      if (piece.moved > before) {
        idle_calls = 0;
      } else if (++idle_calls >= kMaxIdleCalls) {
        return piece.fail(SPILLWAY_IO_FAILED, result < 0 ? static_cast<int32_t>(-result) : EIO);
      } else if (result == -EAGAIN) {
        sched_yield();
      }
    }
  }

  static uint64_t resume_point(const Piece& piece, uint64_t moved_now) {
    const uint64_t moved = std::min(piece.moved + moved_now, piece.nbytes);
    return moved == piece.nbytes ? moved : moved - moved % kSectorBytes;
  }

  // Outcome of each request from its pieces, which are in order: the first failure, or the checksum of the whole.
  static void finish(spillway_direction direction, spillway_io_request* requests, int64_t num_requests,
                     const std::vector<Piece>& pieces) {
    size_t next = 0;
    for (int64_t i = 0; i < num_requests; ++i) {
      spillway_io_request& request = requests[i];
      request.error = SPILLWAY_OK, request.os_error = 0, request.error_offset = 0;
      uint32_t crc = 0;
      for (; next < pieces.size() && pieces[next].request == &request; ++next) {
        const Piece& piece = pieces[next];
        crc = piece.begin == 0 ? piece.crc32c : crc32c_combine(crc, piece.crc32c, piece.nbytes);
        if (piece.error == SPILLWAY_OK || request.error != SPILLWAY_OK) continue;
        request.error = piece.error, request.os_error = piece.os_error;
        request.error_offset = request.offset + piece.begin + piece.moved;
      }
      (direction == SPILLWAY_WRITE ? request.crc32c : request.crc32c_found) = crc;
      if (direction == SPILLWAY_READ && request.error == SPILLWAY_OK && crc != request.crc32c) {
        request.error = SPILLWAY_CHECKSUM_MISMATCH, request.error_offset = request.offset;
      }
    }
  }

  const int32_t file_;
  const int32_t num_threads_;
  const spillway_io_call call_;
  void* const context_;
  ThreadPoolSlot pool_;
};

}  // namespace

std::unique_ptr<IoEngine> open_thread_engine(int32_t file, int32_t num_threads, spillway_io_call call, void* context) {
  return std::make_unique<ThreadEngine>(file, num_threads, call, context);
}

}  // namespace spillway
