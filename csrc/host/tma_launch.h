// What the TMA-fed main kernels share: their parameter and their launch.
#pragma once

#include <cuda.h>

#include "host/main_kernel.h"

namespace msa {

struct TmaKernelParams {
  CUtensorMap q;         // {64 d, 8 heads, 2 halves of d, Hq/8, T}, box {64, 8, 2, G/8, 1}
  CUtensorMap grad_out;  // as q
  CUtensorMap k;         // {64 d, W keys, 2 halves of d, Hkv}, box {64, 128, 2, 1}
  CUtensorMap v;         // as k
  MainParams main;
};

using TmaKernel = void (*)(TmaKernelParams);

// Enqueues `kernel` with the grid that the tuning's walk may need at most.
void launch_tma_kernel(TmaKernel kernel, int num_threads, int shared_bytes, const MainParams& main,
                       const Tuning& tuning, const DeviceInfo& device, cudaStream_t stream);

}  // namespace msa
