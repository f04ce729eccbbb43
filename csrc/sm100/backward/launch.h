#pragma once

#include "host/main_kernel.h"

namespace msa::sm100 {

// The tcgen05 main kernel, compute capability 10.x.
MainKernel main_kernel();

}  // namespace msa::sm100
