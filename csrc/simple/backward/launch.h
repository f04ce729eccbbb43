#pragma once

#include "host/main_kernel.h"

namespace msa::simple {

// The straightforward main kernel: any GPU, no tensor cores, FP32 throughout.
MainKernel main_kernel();

}  // namespace msa::simple
