#include "host/workspace.h"

#include "task_build/launch.h"

namespace msa {
namespace {

constexpr size_t kAlignment = 256;

size_t align_up(size_t bytes) { return ceil_div(bytes, kAlignment) * kAlignment; }

}  // namespace

const char* section_name(Section section) {
  constexpr const char* kNames[kNumSections] = {
      "descriptor",   "neg_lse",     "delta",   "sort_buffer_0", "sort_buffer_1", "sort_histogram",
      "task_headers", "task_tokens", "dq_pool", "dk_pool",       "dv_pool"};
  return kNames[static_cast<int>(section)];
}

WorkspacePlan plan_workspace(const Sizes& sizes, DqAccum dq_accum, size_t guard_bytes) {
  const size_t tasks = sizes.task_capacity();
  const size_t rows = sizes.num_tokens * sizes.num_heads;
  const size_t kv_bytes = sizes.workspace_rows * sizes.num_kv_heads * kHeadDim * sizeof(float);
  const size_t dq_element = dq_accum == DqAccum::kFp32 ? 4 : 2;
  const size_t bytes[kNumSections] = {
      sizeof(TaskDescriptor),
      rows * sizeof(float),
      rows * sizeof(float),
      tasks * task_build::kBytesPerTask,
      tasks * task_build::kBytesPerTask,
      task_build::kHistogramBytes,
      tasks * sizeof(TaskHeader),
      tasks * slots_per_task(sizes.group()) * sizeof(int32_t),
      rows * kHeadDim * dq_element,
      kv_bytes,
      kv_bytes,
  };
  WorkspacePlan plan{};
  for (int i = 0; i < kNumSections; ++i) {
    plan.offsets[i] = plan.total_bytes;
    plan.bytes[i] = bytes[i];
    plan.total_bytes += align_up(bytes[i]) + align_up(guard_bytes);
  }
  return plan;
}

}  // namespace msa
