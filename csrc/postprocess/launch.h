#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace msa::postprocess {

// Pools -> dq, dk, dv: undoes the pools' layout, applies the softmax scale, rounds. One launch.
void launch(const PostprocessParams& params, cudaStream_t stream);

}  // namespace msa::postprocess
