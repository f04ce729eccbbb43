#include "host/workspace.h"

#include <stdexcept>

#include "task_build/launch.h"

namespace msa {
namespace {

constexpr size_t kAlignment = 256;

size_t align_up(size_t bytes) { return ceil_div(bytes, kAlignment) * kAlignment; }

}  // namespace

const Section& WorkspacePlan::operator[](const std::string& name) const {
  for (const Section& section : sections) {
    if (section.name == name) return section;
  }
  throw std::out_of_range("workspace section " + name);
}

WorkspacePlan plan_workspace(const Sizes& sizes, DqAccum dq_accum, size_t sort_temp_bytes,
                             size_t guard_bytes) {
  const size_t tasks = sizes.task_capacity();
  const size_t rows = sizes.num_tokens * sizes.num_heads;
  const size_t kv_bytes = sizes.workspace_rows * sizes.num_kv_heads * kHeadDim * sizeof(float);
  const size_t dq_element = dq_accum == DqAccum::kFp32 ? 4 : 2;
  WorkspacePlan plan{{}, 0};
  const auto add = [&](const char* name, size_t bytes) {
    plan.sections.push_back({name, plan.total_bytes, bytes});
    plan.total_bytes += align_up(bytes) + align_up(guard_bytes);
  };
  add("descriptor", sizeof(TaskDescriptor));
  add("row_stats", rows * sizeof(float2));
  add("sort_buffer_0", tasks * task_build::kBytesPerTask);
  add("sort_buffer_1", tasks * task_build::kBytesPerTask);
  add("sort_temp", sort_temp_bytes);
  add("task_headers", tasks * sizeof(TaskHeader));
  add("task_tokens", tasks * slots_per_task(sizes.group()) * sizeof(int32_t));
  add("dq_pool", rows * kHeadDim * dq_element);
  add("dk_pool", kv_bytes);
  add("dv_pool", kv_bytes);
  return plan;
}

}  // namespace msa
