// What the forward's pipeline needs to know of a kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "params.h"

namespace msa {

struct ForwardKernel {
  std::string name;
  int major;  // compute capability it runs on; 0 = any
  void (*launch)(const ForwardParams& params, cudaStream_t stream);
};

}  // namespace msa
