// The main kernels that are built.
#pragma once

#include <string>
#include <vector>

#include "host/main_kernel.h"

namespace msa {

const std::vector<MainKernel>& main_kernels();
// Throws std::invalid_argument naming what is built.
const MainKernel& find_main_kernel(const std::string& name);

}  // namespace msa
