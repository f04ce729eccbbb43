// The CUDA runtime that this process gives the module.
#pragma once

namespace msa {

// Throws std::runtime_error unless every runtime function comes from one library, of the major
// version we were compiled for, and the driver, if there is one, is as new. Starts no CUDA context.
void check_runtime();

}  // namespace msa
