#pragma once

#include "host/main_kernel.h"

namespace msa::sm90 {

// The WGMMA main kernel, compute capability 9.0.
MainKernel main_kernel();

}  // namespace msa::sm90
