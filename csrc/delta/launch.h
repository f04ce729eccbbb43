#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace msa::delta {

// Both row statistics of every token and query head.
void launch(const DeltaParams& params, cudaStream_t stream);

}  // namespace msa::delta
