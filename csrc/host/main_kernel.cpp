#include "host/main_kernel.h"

#include <algorithm>

#include "host/error.h"
#include "simple/launch.h"
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

int32_t max_grid(int64_t capacity, int num_sms, const WalkRule& rule) {
  const auto chunks = [&](int64_t tasks, int32_t length) {
    return ceil_div<int64_t>(tasks, length);
  };
  const int64_t short_tasks = std::min<int64_t>(capacity, rule.short_walk_max_tasks);
  // A spread-out tail gives each SM at least three tasks, so it has at most num_sms CTAs.
  return static_cast<int32_t>(
      std::max(chunks(short_tasks, rule.short_walk), chunks(capacity, rule.long_walk)) + num_sms);
}

}  // namespace msa
