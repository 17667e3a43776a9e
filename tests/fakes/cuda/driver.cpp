// The functions of libcuda, libnvidia-ml and cuBLAS that torch and Triton call.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "device.h"

#define API extern "C" __attribute__((visibility("default")))

using fake::count;
using fake::Device;
using fake::Settings;

namespace {

constexpr size_t kPageBytes = size_t{2} << 20;

struct Allocation {
  size_t nbytes;
  int device;
};

CUresult unsupported() { return CUDA_ERROR_NOT_SUPPORTED; }

}  // namespace

// --- contexts --------------------------------------------------------------------------------------------------------

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

API CUresult cuDeviceGet(CUdevice* device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetCount(int* found) {
  *found = Settings::get().num_devices;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  const bool is_shared_memory = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
  *value = is_shared_memory ? 227 << 10 : 0;  // no handles to share memory
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* is_active) {
  if (flags) *flags = 0;
  *is_active = Device::of(device).has_context();
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(static_cast<long>(device) + 1);
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext* context) {
  return cuDevicePrimaryCtxRetain(context, Device::current_index());
}

API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice* device) { return *device = Device::current_index(), CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* version) { return *version = CUDART_VERSION, CUDA_SUCCESS; }

API CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the fake";
  return CUDA_SUCCESS;
}

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  void* symbol = dlsym(RTLD_DEFAULT, name);
  if (!symbol) count(std::string("names of the driver that are missing: ") + name);
  *found = symbol ? symbol : reinterpret_cast<void*>(unsupported);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// --- Triton's kernels: loaded and launched, each computes nothing -------------------------------------------------------

API CUresult cuModuleLoadData(CUmodule* module, const void* code) {
  if (memcmp(code, "\x7f" "ELF", 4) != 0) return CUDA_ERROR_INVALID_IMAGE;  // not made by ptxas
  return cuDevicePrimaryCtxRetain(reinterpret_cast<CUcontext*>(module), Device::current_index());
}

API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

API CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = reinterpret_cast<CUfunction>(new std::string(name));
  return CUDA_SUCCESS;
}

API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction function, void**, void**) {
  Device::current().use("a kernel");
  count("launches of " + *reinterpret_cast<std::string*>(function));
  return CUDA_SUCCESS;
}

API CUresult cuPointerGetAttribute(void* found, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return unsupported();
  if (fake::places().device_of(reinterpret_cast<void*>(pointer)) < 0) return CUDA_ERROR_INVALID_VALUE;
  *static_cast<CUdeviceptr*>(found) = pointer;
  return CUDA_SUCCESS;
}

// Triton's library refers to these, but no kernel of ours calls them.
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return unsupported(); }
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return unsupported(); }
API CUresult cuCtxGetLimit(size_t*, CUlimit) { return unsupported(); }
API CUresult cuCtxSetLimit(CUlimit, size_t) { return unsupported(); }
API CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus*) { return unsupported(); }
API CUresult cuPointerGetAttributes(unsigned, CUpointer_attribute*, void**, CUdeviceptr) { return unsupported(); }

// --- memory by pages: torch's expandable segments --------------------------------------------------------------------

API CUresult cuMemGetAllocationGranularity(size_t* found, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *found = kPageBytes;
  return CUDA_SUCCESS;
}

API CUresult cuMemAddressReserve(CUdeviceptr* found, size_t nbytes, size_t, CUdeviceptr, unsigned long long) {
  void* memory = mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *found = reinterpret_cast<CUdeviceptr>(memory);
  return CUDA_SUCCESS;
}

API CUresult cuMemAddressFree(CUdeviceptr memory, size_t nbytes) {
  munmap(reinterpret_cast<void*>(memory), nbytes);
  return CUDA_SUCCESS;
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t nbytes, const CUmemAllocationProp* properties,
                         unsigned long long) {
  const int device = properties->location.id;
  Device::of(device).use("cuMemCreate");
  count("cuMemCreate");
  if (!Device::of(device).take(nbytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new Allocation{nbytes, device});
  return CUDA_SUCCESS;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  auto* allocation = reinterpret_cast<Allocation*>(handle);
  Device::of(allocation->device).give_back(allocation->nbytes);
  delete allocation;
  return CUDA_SUCCESS;
}

API CUresult cuMemMap(CUdeviceptr memory, size_t nbytes, size_t, CUmemGenericAllocationHandle handle,
                      unsigned long long) {
  void* const address = reinterpret_cast<void*>(memory);
  mprotect(address, nbytes, PROT_READ | PROT_WRITE);
  if (!Settings::get().is_virtual) memset(address, fake::kPoison, nbytes);
  fake::places().add(address, nbytes, reinterpret_cast<Allocation*>(handle)->device);
  return CUDA_SUCCESS;
}

API CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

API CUresult cuMemUnmap(CUdeviceptr memory, size_t nbytes) {
  void* const address = reinterpret_cast<void*>(memory);
  for (size_t done = 0; done < nbytes;) {  // every page was mapped separately
    const size_t removed = fake::places().remove(static_cast<char*>(address) + done);
    if (!removed) return CUDA_ERROR_INVALID_VALUE;
    done += removed;
  }
  mmap(address, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return CUDA_SUCCESS;
}

// --- NVML ------------------------------------------------------------------------------------------------------------

API int nvmlInit_v2() { return 0; }
API int nvmlInitWithFlags(unsigned) { return 0; }
API int nvmlShutdown() { return 0; }

API int nvmlDeviceGetCount_v2(unsigned* found) {
  *found = static_cast<unsigned>(Settings::get().num_devices);
  return 0;
}

API int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  strncpy(text, "580.00.00", size);
  return 0;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  if (index >= static_cast<unsigned>(Settings::get().num_devices)) return 2;
  *handle = &Device::of(static_cast<int>(index));
  return 0;
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char* address, void** handle) {
  unsigned bus = 0;
  if (sscanf(address, "%*x:%x:", &bus) != 1 || bus < 0x3b) return 2;
  return nvmlDeviceGetHandleByIndex_v2(bus - 0x3b, handle);
}

API int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* found, void*) { return *found = 0; }
API int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) { return 3; }  // not supported
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return 3; }
API int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 3; }
API int nvmlSystemGetCudaDriverVersion(int* version) { return *version = CUDART_VERSION, 0; }
API int nvmlSystemGetCudaDriverVersion_v2(int* version) { return nvmlSystemGetCudaDriverVersion(version); }
API int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* found, void*) { return *found = 0; }
API int nvmlDeviceGetNvLinkState(void*, unsigned, unsigned*) { return 3; }
API int nvmlDeviceGetMaxPcieLinkGeneration(void*, unsigned* found) { return *found = 5, 0; }
API int nvmlDeviceGetMaxPcieLinkWidth(void*, unsigned* found) { return *found = 16, 0; }
API int nvmlDeviceGetCurrPcieLinkWidth(void*, unsigned* found) { return *found = 16, 0; }

API int nvmlDeviceGetName(void*, char* text, unsigned size) {
  strncpy(text, "Fake CUDA device", size);
  return 0;
}

API int nvmlDeviceGetMemoryInfo(void* handle, unsigned long long* found) {
  found[0] = Settings::get().memory_bytes;
  found[1] = static_cast<Device*>(handle)->free_bytes();
  found[2] = found[0] - found[1];
  return 0;
}

// --- cuBLAS: every call succeeds and computes nothing ----------------------------------------------------------------

namespace {
char handle;

int multiplied() {
  count("kernels that did nothing");
  return 0;
}
}  // namespace

#define DOES_NOTHING(name) \
  API int name(...) { return 0; }
#define MULTIPLIES(name) \
  API int name(...) { return multiplied(); }

API int cublasCreate_v2(void** made) {
  Device::current().use("cublasCreate");
  *made = &handle;
  return 0;
}

API int cublasGetMathMode(void*, int* mode) { return *mode = 0; }
API int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0; }
API int cublasLtMatmulDescCreate(void** made, int, int) { return *made = &handle, 0; }
API int cublasLtMatmulPreferenceCreate(void** made) { return *made = &handle, 0; }
API int cublasLtMatrixLayoutCreate(void** made, int, unsigned long, unsigned long, long) { return *made = &handle, 0; }

API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* result, int* found) {
  memset(result, 0, 64);
  *found = 1;
  return 0;
}

DOES_NOTHING(cublasDestroy_v2)
DOES_NOTHING(cublasSetStream_v2)
DOES_NOTHING(cublasSetWorkspace_v2)
DOES_NOTHING(cublasSetMathMode)
DOES_NOTHING(cublasSetPointerMode_v2)
DOES_NOTHING(cublasSetSmCountTarget)
DOES_NOTHING(cublasLtMatmulDescSetAttribute)
DOES_NOTHING(cublasLtMatmulDescDestroy)
DOES_NOTHING(cublasLtMatmulPreferenceDestroy)
DOES_NOTHING(cublasLtMatmulPreferenceSetAttribute)
DOES_NOTHING(cublasLtMatrixLayoutDestroy)
DOES_NOTHING(cublasLtMatrixLayoutSetAttribute)
MULTIPLIES(cublasGemmEx)
MULTIPLIES(cublasGemmStridedBatchedEx)
MULTIPLIES(cublasSgemmEx)
MULTIPLIES(cublasSgemm_v2)
MULTIPLIES(cublasSgemmStridedBatched)
MULTIPLIES(cublasSgemv_v2)
MULTIPLIES(cublasLtMatmul)
