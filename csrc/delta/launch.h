#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace msa::delta {

// Both row statistics of every token and query head, and zeros in the ranges to clear. With
// `overlaps_previous` it may run beside the kernel launched before it, if that one allows it
// (grid_launch_dependents); it ends after it in any case.
void launch(const DeltaParams& params, bool overlaps_previous, cudaStream_t stream);

}  // namespace msa::delta
