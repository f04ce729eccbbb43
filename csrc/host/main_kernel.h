// What the backward's pipeline needs to know of a main kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "host/device.h"
#include "params.h"

namespace msa {

// Shapes that tuning may look at.
struct TuningShape {
  int64_t num_tokens;
  int64_t num_blocks;  // of the workspace
  int64_t task_capacity;
};

struct Tuning {
  WalkRule walk;
  int window_log2;  // log2 of the tokens that the task order keeps together
};

struct MainKernel {
  std::string name;
  int major;  // compute capability it runs on; 0 = any
  PoolLayout layout;
  DqAccum default_dq_accum;
  std::vector<DqAccum> dq_accums;
  Tuning (*tune)(const TuningShape& shape);
  void (*launch)(const MainParams& params, const Tuning& tuning, const DeviceInfo& device,
                 cudaStream_t stream);
};

}  // namespace msa
