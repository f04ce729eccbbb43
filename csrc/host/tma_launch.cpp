#include "host/tma_launch.h"

#include <set>

#include "host/error.h"
#include "host/tensor_map.h"

namespace msa {
namespace {

// Once for each kernel, device and thread of the host.
void allow_shared_memory(TmaKernel kernel, int bytes, const DeviceInfo& device) {
  thread_local std::set<std::pair<TmaKernel, int>> allowed;
  if (allowed.count({kernel, device.index}) != 0) return;
  check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "shared memory of the main kernel");
  allowed.insert({kernel, device.index});
}

}  // namespace

void launch_tma_kernel(TmaKernel kernel, int num_threads, int shared_bytes, const MainParams& main,
                       const Tuning& tuning, const DeviceInfo& device, cudaStream_t stream) {
  TmaKernelParams params{};
  params.main = main;
  make_tensor_map(slot_map(main.q, main.num_tokens, main.num_heads, main.group), params.q);
  make_tensor_map(slot_map(main.grad_out, main.num_tokens, main.num_heads, main.group),
                  params.grad_out);
  make_tensor_map(block_map(main.k, main.workspace_rows, main.num_kv_heads), params.k);
  make_tensor_map(block_map(main.v, main.workspace_rows, main.num_kv_heads), params.v);
  allow_shared_memory(kernel, shared_bytes, device);
  const dim3 grid(max_grid(main.task_capacity, device.num_sms, tuning.walk));
  void* arguments[] = {&params};
  check_cuda(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(num_threads),
                              arguments, shared_bytes, stream),
             "launch of the main kernel");
}

}  // namespace msa
