#include "host/tma_launch.h"
#include "sm90/backward/kernel.cuh"
#include "sm90/backward/launch.h"

namespace msa::sm90 {
namespace {

Tuning tune(const TuningShape&) { return {WalkRule{32, 32, 0}, 11}; }

template <int kGroup>
TmaKernel kernel_of(DqAccum dq_accum) {
  return dq_accum == DqAccum::kFp32 ? backward_kernel<kGroup, DqAccum::kFp32>
                                    : backward_kernel<kGroup, DqAccum::kBf16>;
}

void launch(const MainParams& main, const Tuning& tuning, const DeviceInfo& device,
            cudaStream_t stream) {
  const TmaKernel kernel =
      main.group == 16 ? kernel_of<16>(main.dq_accum) : kernel_of<8>(main.dq_accum);
  const int shared_bytes = main.dq_accum == DqAccum::kFp32 ? sizeof(SharedStorage<DqAccum::kFp32>)
                                                           : sizeof(SharedStorage<DqAccum::kBf16>);
  launch_tma_kernel(kernel, kNumThreads, shared_bytes, main, tuning, device, stream);
}

}  // namespace

MainKernel main_kernel() {
  return {"sm90", 9,     PoolLayout::kWgmma, DqAccum::kBf16, {DqAccum::kFp32, DqAccum::kBf16},
          tune,   launch};
}

}  // namespace msa::sm90
