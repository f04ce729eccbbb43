#include "host/tma_launch.h"
#include "sm100/backward/kernel.cuh"
#include "sm100/backward/launch.h"

namespace msa::sm100 {
namespace {

// No measurement yet: the walk published for this card, the task order of the Hopper backward.
Tuning tune(const TuningShape&) { return {WalkRule{4, 64, 2400}, 11}; }

template <int kGroup>
TmaKernel kernel_of(DqAccum dq_accum) {
  switch (dq_accum) {
    case DqAccum::kBf16:
      return backward_kernel<kGroup, DqAccum::kBf16>;
    case DqAccum::kFp16:
      return backward_kernel<kGroup, DqAccum::kFp16>;
    case DqAccum::kFp32:
      return backward_kernel<kGroup, DqAccum::kFp32>;
  }
  return nullptr;
}

void launch(const MainParams& main, const Tuning& tuning, const DeviceInfo& device,
            cudaStream_t stream) {
  const TmaKernel kernel =
      main.group == 16 ? kernel_of<16>(main.dq_accum) : kernel_of<8>(main.dq_accum);
  launch_tma_kernel(kernel, kNumThreads, sizeof(SharedStorage), main, tuning, device, stream);
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
