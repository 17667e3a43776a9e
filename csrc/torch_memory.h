// The pool of this process, and the library that allocates from it.
#pragma once

#include <cstdint>

#include "tensor_pool.h"

namespace spillway {

// See spillway_pool_attach. False if the pool could not be attached.
bool attach_tensor_pool(const char* library, uint64_t capacity_bytes, uint64_t least_bytes, uint64_t slack_bytes);

// Null before it is attached.
TensorPool* tensor_pool();

}  // namespace spillway
