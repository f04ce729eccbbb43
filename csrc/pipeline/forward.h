// The forward: one launch of the kernel that is asked for.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "host/forward_kernel.h"
#include "params.h"

namespace msa {

struct ForwardArguments {
  std::string kernel;
  int device;
  cudaStream_t stream;
  ForwardParams params;  // scale_log2 and group are filled in
  float softmax_scale;
};

// The forward kernels that are built.
const std::vector<ForwardKernel>& forward_kernels();

// Enqueues the forward on the stream; never synchronises. Throws std::invalid_argument or
// std::runtime_error.
void forward(const ForwardArguments& arguments);

}  // namespace msa
