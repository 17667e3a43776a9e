// The functions of libcudart that torch calls. torch's own kernels do nothing; kernels of tests (fake_cuda_launch) run
// on the stream's thread. Functions that are missing here are the real library's, which find no driver and fail.
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "device.h"

#define API extern "C" __attribute__((visibility("default")))

using fake::count;
using fake::Device;
using fake::Settings;
using fake::stream_of;

namespace {

constexpr size_t kTouchedBytes = 4096;  // largest copy that is made even if memory is virtual

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t failed(cudaError_t error) { return last_error = error; }

struct Event {
  std::shared_ptr<fake::Mark> mark;
};

Event& event_of(cudaEvent_t event) { return *reinterpret_cast<Event*>(event); }

bool is_virtual(size_t nbytes) { return Settings::get().is_virtual && nbytes > kTouchedBytes; }

void launch(cudaStream_t stream) {
  Device::current().use("a kernel");
  count("kernels that did nothing");
  if (stream_of(stream).device != Device::current_index()) count("launches on a stream of another device");
}

cudaError_t copy(void* to, const void* from, size_t nbytes, cudaStream_t given, bool waits) {
  Device::current().use("a copy");
  fake::Stream& stream = stream_of(given);
  const bool to_device = fake::places().device_of(to) >= 0, from_device = fake::places().device_of(from) >= 0;
  const char* kind = to_device && from_device ? "d2d" : to_device ? "h2d" : from_device ? "d2h" : "h2h";
  const bool is_pageable = to_device != from_device && !fake::places().is_registered(to_device ? from : to, nbytes);
  const std::string name = std::string(kind) + (is_pageable ? " pageable" : "");
  count(name + " copies");
  count(name + " bytes", static_cast<long>(nbytes));
  if (is_pageable && nbytes > 4096) count("pageable copies above 4 KiB");
  const std::string label = name + " copy of " + std::to_string(nbytes);
  if (is_virtual(nbytes)) {
    stream.put([] {}, {{from, nbytes}}, {{to, nbytes}}, label);
  } else if (is_pageable && to_device) {  // CUDA stages it: the caller may reuse its memory once this returns
    std::vector<char> staged(static_cast<const char*>(from), static_cast<const char*>(from) + nbytes);
    stream.put([to, staged = std::move(staged)] { memcpy(to, staged.data(), staged.size()); }, {}, {{to, nbytes}}, label);
  } else {
    stream.put([=] { memmove(to, from, nbytes); }, {{from, nbytes}}, {{to, nbytes}}, label);
  }
  if (waits || (is_pageable && !to_device)) {
    if (waits) count("synchronisations");
    stream.synchronize();
  }
  return cudaSuccess;
}

void* mapped(size_t nbytes) {
  void* found = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return found == MAP_FAILED ? nullptr : found;
}

}  // namespace

// --- devices ---------------------------------------------------------------------------------------------------------

API cudaError_t cudaGetDeviceCount(int* found) {
  *found = Settings::get().num_devices;
  return cudaSuccess;
}

API cudaError_t cudaGetDevice(int* device) {
  *device = Device::current_index();
  return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= Settings::get().num_devices) return failed(cudaErrorInvalidDevice);
  Device::set_current(device);
  Device::current().use("cudaSetDevice");
  return cudaSuccess;
}

API cudaError_t cudaDeviceSynchronize() {
  count("synchronisations");
  Device::current().synchronize();
  return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  memset(found, 0, sizeof *found);
  strcpy(found->name, "Fake CUDA device");
  found->totalGlobalMem = Settings::get().memory_bytes;
  found->major = 9;
  found->multiProcessorCount = 132;
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxBlocksPerMultiProcessor = 32;
  found->sharedMemPerBlock = 48 << 10;
  found->sharedMemPerBlockOptin = 227 << 10;
  found->sharedMemPerMultiprocessor = 228 << 10;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->l2CacheSize = 50 << 20;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->pciBusID = 0x3b + device;
  found->unifiedAddressing = 1;
  found->textureAlignment = 512;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 1;
  }
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, static_cast<size_t>(size), "0000:%02x:00.0", 0x3b + device);
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}

API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Device::current().use("cudaMemGetInfo");
  *free = Device::current().free_bytes();
  *total = Settings::get().memory_bytes;
  return cudaSuccess;
}

API cudaError_t cudaGetLastError() {
  const cudaError_t found = last_error;
  last_error = cudaSuccess;
  return found;
}

API cudaError_t cudaPeekAtLastError() { return last_error; }

API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorECCUncorrectable: return "uncorrectable ECC error encountered";
    default: return "an error of the fake";
  }
}

API const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

// --- memory ----------------------------------------------------------------------------------------------------------

API cudaError_t cudaMalloc(void** found, size_t nbytes) {
  Device::current().use("cudaMalloc");
  count("cudaMalloc");
  if (!Device::current().take(nbytes)) return failed(cudaErrorMemoryAllocation);
  *found = mapped(nbytes);
  if (!*found) {
    Device::current().give_back(nbytes);
    return failed(cudaErrorMemoryAllocation);
  }
  if (!Settings::get().is_virtual) memset(*found, fake::kPoison, nbytes);
  fake::places().add(*found, nbytes, Device::current_index());
  return cudaSuccess;
}

API cudaError_t cudaFree(void* memory) {
  if (!memory) return cudaSuccess;
  const int device = fake::places().device_of(memory);
  if (device < 0) return failed(cudaErrorInvalidValue);
  count("cudaFree");
  Device::of(device).synchronize();
  const size_t nbytes = fake::places().remove(memory);
  munmap(memory, nbytes);
  Device::of(device).give_back(nbytes);
  return cudaSuccess;
}

API cudaError_t cudaHostRegister(void* memory, size_t nbytes, unsigned) {
  Device::current().use("cudaHostRegister");
  if (fake::places().is_registered(memory, 1)) return failed(cudaErrorHostMemoryAlreadyRegistered);
  count("registered bytes", static_cast<long>(nbytes));
  fake::places().add(memory, nbytes, -1);
  return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void* memory) {
  return fake::places().remove(memory) ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}

API cudaError_t cudaHostAlloc(void** found, size_t nbytes, unsigned) {
  *found = mapped(nbytes);
  if (!*found) return failed(cudaErrorMemoryAllocation);
  fake::places().add(*found, nbytes, -1);
  return cudaSuccess;
}

API cudaError_t cudaMallocHost(void** found, size_t nbytes) { return cudaHostAlloc(found, nbytes, 0); }

API cudaError_t cudaFreeHost(void* memory) {
  munmap(memory, fake::places().remove(memory));
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* memory) {
  memset(found, 0, sizeof *found);
  const int device = fake::places().device_of(memory);
  found->type = device >= 0                                  ? cudaMemoryTypeDevice
                : fake::places().is_registered(memory, 1) ? cudaMemoryTypeHost
                                                             : cudaMemoryTypeUnregistered;
  found->device = device >= 0 ? device : Device::current_index();
  if (device >= 0) found->devicePointer = const_cast<void*>(memory);
  if (found->type != cudaMemoryTypeDevice) found->hostPointer = const_cast<void*>(memory);
  return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, nbytes, stream, false);
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t nbytes, cudaMemcpyKind) {
  return copy(to, from, nbytes, nullptr, true);
}

API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t nbytes, cudaStream_t stream) {
  return copy(to, from, nbytes, stream, false);
}

API cudaError_t cudaMemsetAsync(void* memory, int value, size_t nbytes, cudaStream_t stream) {
  auto work = [=] {
    if (!is_virtual(nbytes)) memset(memory, value, nbytes);
  };
  stream_of(stream).put(work, {}, {{memory, nbytes}}, "memset of " + std::to_string(nbytes));
  return cudaSuccess;
}

API cudaError_t cudaMemset(void* memory, int value, size_t nbytes) {
  cudaMemsetAsync(memory, value, nbytes, nullptr);
  stream_of(nullptr).synchronize();
  return cudaSuccess;
}

// --- streams and events ----------------------------------------------------------------------------------------------

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  Device::current().use("a stream");
  *stream = reinterpret_cast<cudaStream_t>(&Device::current().make_stream());
  return cudaSuccess;
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  count("synchronisations");
  stream_of(stream).synchronize();
  return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return stream_of(stream).is_idle() ? cudaSuccess : cudaErrorNotReady;
}

API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  Device::current().use("an event");
  count("events made");
  if (!(flags & cudaEventBlockingSync)) count("events that spin");
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &event_of(event);
  return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  count("events recorded");
  event_of(event).mark = stream_of(stream).mark();
  return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

// Reports an event as done only once the thread has waited for it or for something after it; otherwise, what the thread
// knows would depend on timing. The watchdog of a process group polls the group's events to retire work; it learns of an
// event once a stream waits for it, because nothing waits for work that is retired. Another thread that asks once gets
// no; if it asks again, it waits by polling.
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  auto mark = event_of(event).mark;
  if (!mark || fake::thread_knows(mark->clock)) return cudaSuccess;
  if (!mark->is_of_group || !mark->is_done()) return cudaErrorNotReady;
  if (!fake::thread_gives_work()) {
    if (!mark->is_waited_for) return cudaErrorNotReady;
    fake::group_learns(mark->clock);
  } else if (mark->was_asked_for.exchange(true)) {
    fake::thread_learns(mark->clock);
  } else {
    return cudaErrorNotReady;
  }
  return cudaSuccess;
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  count("event waits of the host");
  if (auto mark = event_of(event).mark) {
    mark->wait();
    fake::thread_learns(mark->clock);
  }
  return cudaSuccess;
}

API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t second) {
  auto from = event_of(first).mark, to = event_of(second).mark;
  if (!from || !to) return failed(cudaErrorInvalidResourceHandle);
  if (!from->is_done() || !to->is_done()) return cudaErrorNotReady;
  *milliseconds = static_cast<float>((to->seconds() - from->seconds()) * 1e3);
  return cudaSuccess;
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (auto mark = event_of(event).mark) stream_of(stream).wait(mark);
  return cudaSuccess;
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
  stream_of(stream).put([=] { call(data); }, {}, {}, "a host function");
  return cudaSuccess;
}

API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
  stream_of(stream).put([=] { call(stream, cudaSuccess, data); }, {}, {}, "a callback");
  return cudaSuccess;
}

// Launches a kernel of a test: `call(data)` on the stream's thread. `ranges`: (address, bytes) of `num_reads` reads,
// then of `num_writes` writes.
API void fake_cuda_launch(void* stream, void (*call)(void*), void* data, const uintptr_t* ranges, int num_reads,
                          int num_writes, const char* label) {
  Device::current().use("a kernel");
  count("kernels");
  std::vector<fake::Range> all;
  for (int i = 0; i < num_reads + num_writes; ++i)
    all.push_back({reinterpret_cast<const void*>(ranges[2 * i]), ranges[2 * i + 1]});
  stream_of(static_cast<cudaStream_t>(stream))
      .put([=] { call(data); }, {all.begin(), all.begin() + num_reads}, {all.begin() + num_reads, all.end()}, label);
}

// Tells the judge that torch's allocator has handed out memory, in order with `stream`.
API void fake_cuda_born(void* stream, const void* memory, size_t nbytes, const char* label) {
  stream_of(static_cast<cudaStream_t>(stream)).born({memory, nbytes}, label);
}

// --- torch's own kernels ---------------------------------------------------------------------------------------------

namespace {
struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
};
thread_local std::vector<Configuration> configurations;
}  // namespace

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  const Configuration found = configurations.back();
  configurations.pop_back();
  *grid = found.grid;
  *block = found.block;
  *shared_bytes = found.shared_bytes;
  *static_cast<void**>(stream) = found.stream;
  return cudaSuccess;
}

API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t stream) {
  launch(stream);
  return cudaSuccess;
}

API cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
  launch(stream);
  return cudaSuccess;
}

API cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
  launch(stream);
  return cudaSuccess;
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void*, void**) {
  launch(configuration->stream);
  return cudaSuccess;
}

API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->binaryVersion = found->ptxVersion = 90;
  return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* found, const void*, int, size_t) {
  *found = 2;
  return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* found, const void*, int, size_t, unsigned) {
  *found = 2;
  return cudaSuccess;
}

API cudaError_t cudaGetSymbolAddress(void** found, const void*) {
  static char memory[65536];
  *found = memory;
  return cudaSuccess;
}

API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
