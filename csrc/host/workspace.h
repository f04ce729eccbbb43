// The one allocation of a backward: its sections, from shapes only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

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

struct Section {
  std::string name;
  size_t offset;
  size_t bytes;
};

struct WorkspacePlan {
  std::vector<Section> sections;  // ascending, 256-byte aligned
  size_t total_bytes;

  const Section& operator[](const std::string& name) const;
};

// `sort_temp_bytes`: what the task build's sort asks for. `guard_bytes` lie unused after every
// section. The pools dq, dk and dv come last, one behind the other: they are cleared together.
WorkspacePlan plan_workspace(const Sizes& sizes, DqAccum dq_accum, size_t sort_temp_bytes,
                             size_t guard_bytes);

}  // namespace msa
