#include <algorithm>

#include "host/error.h"
#include "simple/backward/kernel.cuh"
#include "simple/backward/launch.h"

namespace msa::simple {
namespace {

Tuning tune(const TuningShape&) { return {WalkRule{}, 9}; }

template <class DqElement>
void launch_as(const MainParams& params, const DeviceInfo& device, cudaStream_t stream) {
  const auto kernel = simple_kernel<DqElement>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  sizeof(SharedStorage)),
             "shared memory of the simple backward");
  const auto grid = static_cast<unsigned>(std::min<int64_t>(params.task_capacity, device.num_sms));
  kernel<<<grid, kThreads, sizeof(SharedStorage), stream>>>(params);
  check_cuda(cudaGetLastError(), "launch of the simple backward");
}

void launch(const MainParams& params, const Tuning&, const DeviceInfo& device,
            cudaStream_t stream) {
  switch (params.dq_accum) {
    case DqAccum::kFp32:
      return launch_as<float>(params, device, stream);
    case DqAccum::kBf16:
      return launch_as<__nv_bfloat16>(params, device, stream);
    case DqAccum::kFp16:
      return launch_as<__half>(params, device, stream);
  }
}

}  // namespace

MainKernel main_kernel() {
  return {"simple",
          0,
          PoolLayout::kRowMajor,
          DqAccum::kFp32,
          {DqAccum::kFp32, DqAccum::kBf16, DqAccum::kFp16},
          tune,
          launch};
}

}  // namespace msa::simple
