// The launch that the TMA-fed main kernels share.
#pragma once

#include "host/main_kernel.h"

namespace msa {

using TmaKernel = void (*)(TmaKernelParams);

// Enqueues `kernel` with the grid that the tuning's walk may need at most.
void launch_tma_kernel(TmaKernel kernel, int num_threads, int shared_bytes, const MainParams& main,
                       const Tuning& tuning, const DeviceInfo& device, cudaStream_t stream);

}  // namespace msa
