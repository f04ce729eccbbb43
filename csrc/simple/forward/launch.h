#pragma once

#include "host/forward_kernel.h"

namespace msa::simple {

// The straightforward forward: any GPU, no tensor cores, FP32 throughout, bitwise reproducible.
ForwardKernel forward_kernel();

}  // namespace msa::simple
