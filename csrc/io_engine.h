// The object behind an I/O handle: one open file and a way to move batches between it and memory.
#pragma once

#include <cstdint>
#include <memory>

#include "spillway.h"

namespace spillway {

class IoEngine {
 public:
  virtual ~IoEngine() = default;

  // Performs every request and sets its output fields; returns when all have ended. Thread-safe.
  virtual void transfer(spillway_direction direction, spillway_io_request* requests, int64_t num_requests) = 0;
};

// An engine that calls pread and pwrite on threads of its own; `call` replaces both if it is not null. May throw
// std::bad_alloc.
std::unique_ptr<IoEngine> open_thread_engine(int32_t file, int32_t queue_depth, spillway_io_call call, void* context);

}  // namespace spillway
