// Lays out the one allocation of a call.
#pragma once

#include <cstddef>
#include <vector>

namespace msa {

struct SectionSize {
  const char* name;
  size_t bytes;
};

struct Section {
  const char* name;
  size_t offset;  // 256-byte aligned
  size_t bytes;
};

struct WorkspacePlan {
  std::vector<Section> sections;  // offsets ascend
  size_t total_bytes;
};

// The sections one after the other; `guard_bytes` lie unused after each.
WorkspacePlan lay_out(const std::vector<SectionSize>& sizes, size_t guard_bytes);

}  // namespace msa
