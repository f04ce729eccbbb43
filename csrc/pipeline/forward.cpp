#include "pipeline/forward.h"

#include <cstdint>

#include "host/device.h"
#include "host/error.h"
#include "simple/forward/launch.h"

namespace msa {
namespace {

const ForwardKernel& find_forward_kernel(const std::string& name) {
  std::string built;
  for (const ForwardKernel& kernel : forward_kernels()) {
    if (kernel.name == name) return kernel;
    built += (built.empty() ? "" : ", ") + kernel.name;
  }
  throw std::invalid_argument(concat("kernel: expected one of ", built, ", got ", name));
}

void check_params(const ForwardParams& params) {
  require(params.num_kv_heads >= 1 && params.num_heads % params.num_kv_heads == 0,
          "q: expected query heads that are a multiple of Hkv = ", params.num_kv_heads, ", got ",
          params.num_heads);
  const int group = params.num_heads / params.num_kv_heads;
  require(group == 16 || group == 8, "q: expected Hq / Hkv of 16 or 8, got ", group);
  require(params.top_k >= 1 && params.top_k <= 64, "topk: expected K in [1, 64], got ",
          params.top_k);
  const int64_t pairs = int64_t{params.layout.num_tokens} * params.num_kv_heads;
  require(pairs <= 0x7FFFFFFF, "q: expected fewer than 2^31 tokens times KV heads, got ", pairs);
}

}  // namespace

const std::vector<ForwardKernel>& forward_kernels() {
  static const std::vector<ForwardKernel> kernels = {simple::forward_kernel()};
  return kernels;
}

void forward(const ForwardArguments& arguments) {
  const ForwardKernel& kernel = find_forward_kernel(arguments.kernel);
  const DeviceInfo& device = device_info(arguments.device);
  require(kernel.major == 0 || kernel.major == device.major, "kernel: ", kernel.name,
          " expected a device of compute capability ", kernel.major, ".x, got ", device.name, " (",
          device.major, ".", device.minor, ")");
  check_params(arguments.params);
  ForwardParams params = arguments.params;
  params.group = params.num_heads / params.num_kv_heads;
  params.scale_log2 = arguments.softmax_scale * kLog2E;
  if (params.layout.num_tokens > 0) kernel.launch(params, arguments.stream);
}

}  // namespace msa
