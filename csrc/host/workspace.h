// The one allocation of a backward: its sections, from shapes only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "params.h"

namespace msa {

struct Sizes {
  int64_t num_tokens;      // T
  int num_heads;           // Hq
  int num_kv_heads;        // Hkv
  int64_t workspace_rows;  // W
  int num_entries;
  int num_rows;  // CSR rows of an index head
  int64_t edge_capacity;
  int64_t work_capacity;

  int group() const { return num_heads / num_kv_heads; }
  // Tasks of all items: a task an edge-slot-full of each item, and a partial one.
  int64_t task_capacity() const {
    return num_kv_heads * edge_capacity / slots_per_task(group()) + work_capacity;
  }
};

enum class Section {
  kDescriptor,
  kNegLse,
  kDelta,
  kSortBuffer0,
  kSortBuffer1,
  kSortHistogram,
  kTaskHeaders,
  kTaskTokens,
  kDqPool,
  kDkPool,
  kDvPool,
};
constexpr int kNumSections = 11;

const char* section_name(Section section);

struct WorkspacePlan {
  size_t offsets[kNumSections];  // ascending, 256-byte aligned
  size_t bytes[kNumSections];
  size_t total_bytes;

  size_t offset(Section section) const { return offsets[static_cast<int>(section)]; }
  size_t size(Section section) const { return bytes[static_cast<int>(section)]; }
};

// `guard_bytes` lie unused after every section.
WorkspacePlan plan_workspace(const Sizes& sizes, DqAccum dq_accum, size_t guard_bytes);

}  // namespace msa
