#include "host/error.h"
#include "host/tensor_map.h"
#include "sm100/backward/kernel.cuh"
#include "sm100/backward/launch.h"

namespace msa::sm100 {
namespace {

// No measurement yet: the walk published for this card, the task order of the Hopper backward.
Tuning tune(const TuningShape&) { return {WalkRule{4, 64, 2400}, 11}; }

template <int kGroup, DqAccum kDqAccum>
void launch_as(const MainParams& main, const Tuning& tuning, const DeviceInfo& device,
               cudaStream_t stream) {
  KernelParams params;
  params.q = make_tensor_map(slot_map(main.q, main.num_tokens, main.num_heads, kGroup));
  params.grad_out =
      make_tensor_map(slot_map(main.grad_out, main.num_tokens, main.num_heads, kGroup));
  params.k = make_tensor_map(block_map(main.k, main.workspace_rows, main.num_kv_heads));
  params.v = make_tensor_map(block_map(main.v, main.workspace_rows, main.num_kv_heads));
  params.main = main;

  const auto kernel = backward_kernel<kGroup, kDqAccum>;
  constexpr int kSharedBytes = sizeof(SharedStorage);
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
      "shared memory of the sm100 backward");
  const int grid = max_grid(main.task_capacity, device.num_sms, tuning.walk);
  kernel<<<grid, kNumThreads, kSharedBytes, stream>>>(params);
  check_cuda(cudaGetLastError(), "launch of the sm100 backward");
}

template <int kGroup>
void launch_as(const MainParams& main, const Tuning& tuning, const DeviceInfo& device,
               cudaStream_t stream) {
  switch (main.dq_accum) {
    case DqAccum::kBf16:
      return launch_as<kGroup, DqAccum::kBf16>(main, tuning, device, stream);
    case DqAccum::kFp16:
      return launch_as<kGroup, DqAccum::kFp16>(main, tuning, device, stream);
    case DqAccum::kFp32:
      return launch_as<kGroup, DqAccum::kFp32>(main, tuning, device, stream);
  }
}

void launch(const MainParams& main, const Tuning& tuning, const DeviceInfo& device,
            cudaStream_t stream) {
  if (main.group == 16) {
    launch_as<16>(main, tuning, device, stream);
  } else {
    launch_as<8>(main, tuning, device, stream);
  }
}

}  // namespace

MainKernel main_kernel() {
  return {"sm100",
          10,
          PoolLayout::kTmem,
          DqAccum::kBf16,
          {DqAccum::kBf16, DqAccum::kFp16, DqAccum::kFp32},
          tune,
          launch};
}

}  // namespace msa::sm100
