#include "host/error.h"
#include "simple/forward/kernel.cuh"
#include "simple/forward/launch.h"

namespace msa::simple {
namespace {

void launch(const ForwardParams& params, cudaStream_t stream) {
  const auto kernel = params.group == 16 ? forward_kernel<16> : forward_kernel<8>;
  const auto grid = static_cast<unsigned>(int64_t{params.layout.num_tokens} * params.num_kv_heads);
  kernel<<<grid, kForwardThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "launch of the simple forward");
}

}  // namespace

ForwardKernel forward_kernel() { return {"simple", 0, launch}; }

}  // namespace msa::simple
