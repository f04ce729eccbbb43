// The architectures whose machine code this module carries, read from its own fat binary.
#pragma once

#include <string>
#include <vector>

namespace msa {

// Sorted, e.g. {"90a", "100a"}; empty if no fat binary is found.
std::vector<std::string> built_archs();

}  // namespace msa
