#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace msa::delta {

// row_stats = {-lse * log2(e), rowsum(out * grad_out)} for every token and query head.
void launch(const DeltaParams& params, cudaStream_t stream);

}  // namespace msa::delta
