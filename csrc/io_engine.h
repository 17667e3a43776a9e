// What stands behind an I/O handle: one open file and a way to move batches between it and memory.
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

  // Has the kernel keep `memory` pinned, so that transfers inside it need not look its pages up. False: nothing changed.
  virtual bool register_memory(void*, uint64_t) { return false; }
};

// pread and pwrite on threads of its own; `call` replaces both when it is not null. May throw std::bad_alloc.
std::unique_ptr<IoEngine> open_thread_engine(int32_t file, int32_t queue_depth, spillway_io_call call, void* context);

// io_uring, driven by the calling threads; with `call`, the ring carries empty operations whose results come from `call`.
// Null where uring_available() is false or the system has no ring left. May throw std::bad_alloc.
std::unique_ptr<IoEngine> open_uring_engine(int32_t file, int32_t queue_depth, spillway_io_call call, void* context);

// Whether a ring of this process can really read and write: kernels, seccomp profiles and sysctls refuse it.
bool uring_available();

}  // namespace spillway
