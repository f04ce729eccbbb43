#include "host/runtime.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <string>
#include <utility>

#include "host/error.h"

// What nvcc's initialisers and launch stubs call; only their addresses are used here.
extern "C" {
void __cudaRegisterFatBinary();
void __cudaRegisterFatBinaryEnd();
void __cudaUnregisterFatBinary();
void __cudaRegisterFunction();
void __cudaRegisterVar();
void __cudaGetKernel();
void __cudaLaunchKernel();
void __cudaPushCallConfiguration();
void __cudaPopCallConfiguration();
}

namespace msa {
namespace {

std::string file_of(const void* function) {
  Dl_info info;
  return dladdr(function, &info) != 0 ? info.dli_fname : "?";
}

std::string version_name(int version) { return concat(version / 1000, ".", version % 1000 / 10); }

}  // namespace

void check_runtime() {
  // A library loaded globally that defines these names without versions is found before ours.
  const std::pair<const char*, const void*> functions[] = {
#define MSA_FUNCTION(name) {#name, reinterpret_cast<const void*>(&name)}
      MSA_FUNCTION(__cudaRegisterFatBinary),
      MSA_FUNCTION(__cudaRegisterFatBinaryEnd),
      MSA_FUNCTION(__cudaUnregisterFatBinary),
      MSA_FUNCTION(__cudaRegisterFunction),
      MSA_FUNCTION(__cudaRegisterVar),
      MSA_FUNCTION(__cudaGetKernel),
      MSA_FUNCTION(__cudaLaunchKernel),
      MSA_FUNCTION(__cudaPushCallConfiguration),
      MSA_FUNCTION(__cudaPopCallConfiguration),
      MSA_FUNCTION(cudaDriverGetVersion),
      MSA_FUNCTION(cudaFuncSetAttribute),
      MSA_FUNCTION(cudaGetDeviceCount),
      MSA_FUNCTION(cudaGetDeviceProperties),
      MSA_FUNCTION(cudaGetDriverEntryPointByVersion),
      MSA_FUNCTION(cudaGetErrorName),
      MSA_FUNCTION(cudaGetErrorString),
      MSA_FUNCTION(cudaGetLastError),
      MSA_FUNCTION(cudaLaunchCooperativeKernel),
      MSA_FUNCTION(cudaLaunchKernel),
      MSA_FUNCTION(cudaLaunchKernelExC),
      MSA_FUNCTION(cudaMemsetAsync),
      MSA_FUNCTION(cudaRuntimeGetVersion),
#undef MSA_FUNCTION
  };
  const std::string runtime = file_of(functions[0].second);
  for (const auto& [name, function] : functions) {
    const std::string file = file_of(function);
    if (file == runtime) continue;
    throw std::runtime_error(concat("CUDA runtime: expected one library, got ", functions[0].first,
                                    " from ", runtime, " and ", name, " from ", file));
  }

  constexpr int kMajor = CUDART_VERSION / 1000;
  int version = 0;
  check_cuda(cudaRuntimeGetVersion(&version), "version of the CUDA runtime");
  if (version / 1000 != kMajor) {
    throw std::runtime_error(concat("CUDA runtime: expected ", kMajor, ".x, got ",
                                    version_name(version), " from ", runtime));
  }
  check_cuda(cudaDriverGetVersion(&version), "version of the CUDA driver");
  if (version != 0 && version / 1000 < kMajor) {  // 0: no driver
    throw std::runtime_error(concat("CUDA driver: expected one for CUDA ", kMajor,
                                    " or newer, got one for CUDA ", version_name(version)));
  }
}

}  // namespace msa
