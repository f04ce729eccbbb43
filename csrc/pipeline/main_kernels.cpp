#include "pipeline/main_kernels.h"

#include "host/error.h"
#include "simple/backward/launch.h"
#if defined(MSA_HAS_SM90)
#include "sm90/backward/launch.h"
#endif
#if defined(MSA_HAS_SM100)
#include "sm100/backward/launch.h"
#endif

namespace msa {

const std::vector<MainKernel>& main_kernels() {
  static const std::vector<MainKernel> kernels = {
      simple::main_kernel(),
#if defined(MSA_HAS_SM90)
      sm90::main_kernel(),
#endif
#if defined(MSA_HAS_SM100)
      sm100::main_kernel(),
#endif
  };
  return kernels;
}

const MainKernel& find_main_kernel(const std::string& name) {
  std::string built;
  for (const MainKernel& kernel : main_kernels()) {
    if (kernel.name == name) return kernel;
    built += (built.empty() ? "" : ", ") + kernel.name;
  }
  throw std::invalid_argument(concat("backend: expected one of ", built, ", got ", name));
}

}  // namespace msa
