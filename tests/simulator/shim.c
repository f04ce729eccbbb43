// libcudart.so.13 of the simulator: records kernels and hands every launch to Python.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

typedef void (*FatbinCallback)(const void* wrapper, long handle);
typedef void (*FunctionCallback)(long handle, const void* stub, const char* name);
typedef void (*VariableCallback)(long handle, const void* host, const char* name, size_t bytes);
typedef int (*LaunchCallback)(const void* stub, const unsigned* grid_block, void** args,
                              size_t shared_bytes, void* stream, int cooperative, int overlap);
typedef int (*MemsetCallback)(void* target, int value, size_t bytes, void* stream);
// `what` is one of the enumerators; a synchronisation is one of all streams.
enum { kStreamRecord, kStreamWait, kStreamSynchronize };
typedef int (*StreamCallback)(int what, void* stream, void* event);
typedef int (*EncodeCallback)(void* map, int type, unsigned rank, void* address, const void* sizes,
                              const void* strides, const void* box, const void* element_strides,
                              int interleave, int swizzle, int l2, int fill);

enum { kMax = 4096 };
static const void* fatbins[kMax];
static int num_fatbins;
static struct {
  long handle;
  const void* stub;
  const char* name;
} functions[kMax];
static int num_functions;
static struct {
  long handle;
  const void* host;
  const char* name;
  size_t bytes;
} variables[kMax];
static int num_variables;

static LaunchCallback launch_callback;
static MemsetCallback memset_callback;
static EncodeCallback encode_callback;
static StreamCallback stream_callback;
static struct cudaDeviceProp properties;
static int num_devices = 0;
static int current_device;
static char last_message[4096] = "no error";
static cudaError_t last_error = cudaSuccess;

// ---- for Python --------------------------------------------------------------------------------

void msa_sim_connect(LaunchCallback launch, MemsetCallback set, EncodeCallback encode,
                     StreamCallback stream) {
  launch_callback = launch;
  memset_callback = set;
  encode_callback = encode;
  stream_callback = stream;
}

void msa_sim_device(const char* name, int major, int minor, int sms, int count) {
  memset(&properties, 0, sizeof properties);
  snprintf(properties.name, sizeof properties.name, "%s", name);
  properties.major = major;
  properties.minor = minor;
  properties.multiProcessorCount = sms;
  properties.sharedMemPerBlock = 49152;
  properties.sharedMemPerBlockOptin = 232448;
  properties.sharedMemPerMultiprocessor = 233472;
  properties.regsPerBlock = properties.regsPerMultiprocessor = 65536;
  properties.warpSize = 32;
  properties.maxThreadsPerBlock = 1024;
  properties.maxThreadsPerMultiProcessor = 2048;
  properties.cooperativeLaunch = 1;
  num_devices = count;
  current_device = 0;
}

void msa_sim_message(const char* text) { snprintf(last_message, sizeof last_message, "%s", text); }

void msa_sim_each(FatbinCallback fatbin, FunctionCallback function, VariableCallback variable) {
  for (int i = 0; i < num_fatbins; ++i) fatbin(fatbins[i], i + 1);
  for (int i = 0; i < num_functions; ++i) {
    function(functions[i].handle, functions[i].stub, functions[i].name);
  }
  for (int i = 0; i < num_variables; ++i) {
    variable(variables[i].handle, variables[i].host, variables[i].name, variables[i].bytes);
  }
}

// ---- registration ------------------------------------------------------------------------------

void** __cudaRegisterFatBinary(void* wrapper) {
  if (num_fatbins == kMax) return NULL;
  fatbins[num_fatbins++] = wrapper;
  return (void**)(long)num_fatbins;
}
void __cudaRegisterFatBinaryEnd(void** handle) { (void)handle; }
void __cudaUnregisterFatBinary(void** handle) { (void)handle; }

void __cudaRegisterFunction(void** handle, const char* stub, char* device, const char* name,
                            int limit, void* a, void* b, void* c, void* d, int* e) {
  (void)device, (void)limit, (void)a, (void)b, (void)c, (void)d, (void)e;
  if (num_functions == kMax) return;
  functions[num_functions].handle = (long)handle;
  functions[num_functions].stub = stub;
  functions[num_functions++].name = name;
}
void __cudaRegisterVar(void** handle, char* host, char* device, const char* name, int ext,
                       size_t bytes, int constant, int global) {
  (void)device, (void)ext, (void)constant, (void)global;
  if (num_variables == kMax) return;
  variables[num_variables].handle = (long)handle;
  variables[num_variables].host = host;
  variables[num_variables].name = name;
  variables[num_variables++].bytes = bytes;
}
char __cudaInitModule(void** handle) {
  (void)handle;
  return 1;
}

// ---- launches ----------------------------------------------------------------------------------

static __thread struct {
  dim3 grid, block;
  size_t shared;
  void* stream;
} pushed[16];
static __thread int depth;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  if (depth == 16) return 1;
  pushed[depth].grid = grid;
  pushed[depth].block = block;
  pushed[depth].shared = shared;
  pushed[depth++].stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (depth == 0) return cudaErrorUnknown;
  --depth;
  *grid = pushed[depth].grid;
  *block = pushed[depth].block;
  *shared = pushed[depth].shared;
  *(void**)stream = pushed[depth].stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(void** kernel, const void* stub) {
  *kernel = (void*)stub;
  return cudaSuccess;
}

static cudaError_t fail(cudaError_t error) { return last_error = error; }

static cudaError_t launch(const void* stub, dim3 grid, dim3 block, void** args, size_t shared,
                          void* stream, int cooperative, int overlap) {
  const unsigned sizes[6] = {grid.x, grid.y, grid.z, block.x, block.y, block.z};
  for (int i = 0; i < 6; ++i) {
    if (sizes[i] == 0) return fail(cudaErrorInvalidConfiguration);
  }
  if (launch_callback == NULL) return fail(cudaErrorNoDevice);
  return launch_callback(stub, sizes, args, shared, stream, cooperative, overlap)
             ? fail(cudaErrorLaunchFailure)
             : cudaSuccess;
}
cudaError_t __cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** args,
                               size_t shared, void* stream) {
  return launch(kernel, grid, block, args, shared, stream, 0, 0);
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** args, size_t shared,
                             cudaStream_t stream) {
  return launch(kernel, grid, block, args, shared, stream, 0, 0);
}
cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 grid, dim3 block, void** args,
                                        size_t shared, cudaStream_t stream) {
  return launch(kernel, grid, block, args, shared, stream, 1, 0);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** args) {
  int cooperative = 0, overlap = 0;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute* attribute = &config->attrs[i];
    if (attribute->id == cudaLaunchAttributeCooperative) cooperative = attribute->val.cooperative;
    if (attribute->id == cudaLaunchAttributeClusterDimension &&
        attribute->val.clusterDim.x * attribute->val.clusterDim.y * attribute->val.clusterDim.z >
            1) {
      return fail(cudaErrorNotSupported);
    }
    if (attribute->id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      overlap = attribute->val.programmaticStreamSerializationAllowed;
    }
  }
  return launch(kernel, config->gridDim, config->blockDim, args, config->dynamicSmemBytes,
                config->stream, cooperative, overlap);
}

// ---- the rest of the runtime that the host code calls ------------------------------------------

cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream) {
  if (memset_callback == NULL) return fail(cudaErrorNoDevice);
  return memset_callback(target, value, bytes, stream) ? fail(cudaErrorInvalidValue) : cudaSuccess;
}
cudaError_t cudaMemset(void* target, int value, size_t bytes) {
  return cudaMemsetAsync(target, value, bytes, NULL);
}
cudaError_t cudaFuncSetAttribute(const void* f, enum cudaFuncAttribute attribute, int value) {
  (void)f;
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize &&
      (value < 0 || (size_t)value > properties.sharedMemPerBlockOptin)) {
    return fail(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }
cudaError_t cudaGetDeviceCount(int* count) {
  *count = num_devices;
  return num_devices ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* result, int device) {
  if (device < 0 || device >= num_devices) return fail(cudaErrorInvalidDevice);
  *result = properties;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
  (void)device;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = properties.multiProcessorCount;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = properties.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = properties.minor;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 232448;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrCooperativeLaunch:
      *value = 1;
      break;
    default:
      return fail(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}
// Streams and events are addresses of these; what is enqueued is kept by Python.
static char streams[64], events[1024];
static int num_streams, num_events;

static cudaError_t stream_call(int what, cudaStream_t stream, cudaEvent_t event) {
  if (stream_callback == NULL) return fail(cudaErrorNoDevice);
  return stream_callback(what, stream, event) ? fail(cudaErrorLaunchFailure) : cudaSuccess;
}
// A stream that synchronises with the default stream is taken to be the default stream.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  (void)priority;
  *stream = NULL;
  if (!(flags & cudaStreamNonBlocking)) return cudaSuccess;
  if (num_streams == sizeof streams) return fail(cudaErrorMemoryAllocation);
  *stream = (cudaStream_t)&streams[num_streams++];
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  (void)stream;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  (void)flags;
  return stream_call(kStreamWait, stream, event);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  (void)flags;
  if (num_events == sizeof events) return fail(cudaErrorMemoryAllocation);
  *event = (cudaEvent_t)&events[num_events++];
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return stream_call(kStreamRecord, stream, event);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  (void)event;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return stream_call(kStreamSynchronize, stream, NULL);
}
cudaError_t cudaDeviceSynchronize(void) { return stream_call(kStreamSynchronize, NULL, NULL); }
cudaError_t cudaGetLastError(void) {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess              ? "cudaSuccess"
         : error == cudaErrorLaunchFailure ? "cudaErrorLaunchFailure"
         : error == cudaErrorInvalidValue  ? "cudaErrorInvalidValue"
         : error == cudaErrorNoDevice      ? "cudaErrorNoDevice"
                                           : "cudaError";
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : last_message;
}

static CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                       const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                       const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2,
                       CUtensorMapFloatOOBfill fill) {
  if (encode_callback == NULL) return CUDA_ERROR_NOT_INITIALIZED;
  return encode_callback(map, type, rank, address, sizes, strides, box, element_strides, interleave,
                         swizzle, l2, fill)
             ? CUDA_ERROR_INVALID_VALUE
             : CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult* result) {
  (void)version, (void)flags;
  const int known = strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = known ? (void*)encode : NULL;
  if (result) {
    *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}
