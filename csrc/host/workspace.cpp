#include "host/workspace.h"

#include "topology.h"

namespace msa {
namespace {

constexpr size_t kAlignment = 256;

size_t align_up(size_t bytes) { return ceil_div(bytes, kAlignment) * kAlignment; }

}  // namespace

WorkspacePlan lay_out(const std::vector<SectionSize>& sizes, size_t guard_bytes) {
  WorkspacePlan plan{};
  plan.sections.reserve(sizes.size());
  for (const SectionSize& size : sizes) {
    plan.sections.push_back({size.name, plan.total_bytes, size.bytes});
    plan.total_bytes += align_up(size.bytes) + align_up(guard_bytes);
  }
  return plan;
}

}  // namespace msa
