#include "io_pieces.h"

#include <errno.h>

#include <algorithm>

#include "crc32c.h"

namespace spillway {
namespace {

// A transfer resumes at a whole sector: O_DIRECT rejects other offsets, and a device's short transfers end at one.
constexpr uint64_t kSectorBytes = 512;

// Consecutive calls that move nothing (EINTR, EAGAIN, less than a sector) after which a transfer fails.
constexpr int kMaxIdleCalls = 1000;

}  // namespace

bool Piece::ends_after(spillway_direction direction, int64_t result) {
  if (result == 0 && direction == SPILLWAY_READ) return fail(SPILLWAY_END_OF_FILE, 0);
  const bool again = result == -EINTR || result == -EAGAIN || result == 0;
  if (result < 0 && !again) return fail(SPILLWAY_IO_FAILED, static_cast<int32_t>(-result));
  const uint64_t before = moved;
  if (!again) {
    moved = std::min(moved + static_cast<uint64_t>(result), nbytes);
    if (moved == nbytes) return true;
    moved -= moved % kSectorBytes;
  }
  if (moved > before) {
    idle_calls = 0;
  } else if (++idle_calls >= kMaxIdleCalls) {
    return fail(SPILLWAY_IO_FAILED, result < 0 ? static_cast<int32_t>(-result) : EIO);
  }
  return false;
}

bool Piece::fail(int32_t with, int32_t with_os_error) {
  error = with, os_error = with_os_error;
  return true;
}

void Piece::compute_checksum() { crc32c = spillway::crc32c(0, static_cast<char*>(request->buffer) + begin, nbytes); }

std::vector<Piece> cut(spillway_io_request* requests, int64_t num_requests) {
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < num_requests; ++i) {
    for (uint64_t begin = 0; begin < requests[i].nbytes; begin += kPieceBytes) {
      pieces.push_back({&requests[i], begin, std::min(kPieceBytes, requests[i].nbytes - begin)});
    }
  }
  return pieces;
}

void finish(spillway_direction direction, spillway_io_request* requests, int64_t num_requests,
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
      request.error = piece.error, request.os_error = piece.os_error, request.error_offset = piece.file_offset();
    }
    (direction == SPILLWAY_WRITE ? request.crc32c : request.crc32c_found) = crc;
    if (direction == SPILLWAY_READ && request.error == SPILLWAY_OK && crc != request.crc32c) {
      request.error = SPILLWAY_CHECKSUM_MISMATCH, request.error_offset = request.offset;
    }
  }
}

}  // namespace spillway
