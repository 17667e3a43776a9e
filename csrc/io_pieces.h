// The work that every engine does with requests: cut them into pieces, resume short transfers, combine outcomes and
// checksums.
#pragma once

#include <cstdint>
#include <vector>

#include "spillway.h"

namespace spillway {

// Requests are cut so that a few large ones still occupy every thread or the whole queue. Measured in docs/native-io.md.
constexpr uint64_t kPieceBytes = uint64_t{4} << 20;

// A range of one request that moves as one, and its outcome.
struct Piece {
  spillway_io_request* request;
  uint64_t begin;
  uint64_t nbytes;
  uint32_t crc32c = 0;
  int32_t error = SPILLWAY_OK;
  int32_t os_error = 0;
  uint64_t moved = 0;
  int idle_calls = 0;  // consecutive calls that moved nothing

  char* next_byte() const { return static_cast<char*>(request->buffer) + begin + moved; }
  uint64_t bytes_left() const { return nbytes - moved; }
  uint64_t file_offset() const { return request->offset + begin + moved; }

  // Takes the result of a call: bytes moved, or -errno. Returns true if the piece has ended, successfully or not; false
  // if it must be resumed.
  bool ends_after(spillway_direction direction, int64_t result);
  bool fail(int32_t with, int32_t with_os_error);

  // Computes the checksum of the whole piece into crc32c.
  void compute_checksum();
};

// Cuts requests into pieces, in the order of the requests, and within one in the order of the file.
std::vector<Piece> cut(spillway_io_request* requests, int64_t num_requests);

// Sets the outcome of each request from its pieces, which have all ended: the first failure, or the checksum of the
// whole.
void finish(spillway_direction direction, spillway_io_request* requests, int64_t num_requests,
            const std::vector<Piece>& pieces);

}  // namespace spillway
