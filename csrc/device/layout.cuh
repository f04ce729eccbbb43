// Where a token of a packed batch stands: its document's keys and its position among them.
#pragma once

#include "params.h"

namespace msa {

struct QueryPlace {
  int32_t first_key;  // row of the document's first key
  int32_t num_keys;   // of the document that the query sees: those up to its own position
};

// No keys for a token outside every entry, or whose entry's fields are out of range; reads nothing
// out of bounds, whatever the contents.
__device__ inline QueryPlace locate_query(const LayoutParams& layout, int32_t token) {
  int32_t entry = 0;  // the last one that begins at or before the token
  for (int32_t end = layout.num_entries; end - entry > 1;) {
    const int32_t middle = entry + (end - entry) / 2;
    if (layout.cu_seqlens[middle] <= token) {
      entry = middle;
    } else {
      end = middle;
    }
  }
  if (entry >= layout.num_entries) return {0, 0};
  const int64_t begin = max(layout.cu_seqlens[entry], 0);
  const int64_t end = min(layout.cu_seqlens[entry + 1], layout.num_tokens);
  const int32_t document =
      layout.entry_documents == nullptr ? entry : layout.entry_documents[entry];
  if (token < begin || token >= end || document < 0 || document >= layout.num_documents) {
    return {0, 0};
  }
  const int64_t first_key = max(layout.cu_seqlens_k[document], 0);
  const int64_t num_keys = min(layout.cu_seqlens_k[document + 1], layout.num_keys) - first_key;
  const int64_t offset =
      layout.query_offsets == nullptr ? num_keys - (end - begin) : layout.query_offsets[entry];
  const int64_t seen = min(num_keys, offset + token - begin + 1);
  return {static_cast<int32_t>(first_key), static_cast<int32_t>(max(seen, int64_t{0}))};
}

}  // namespace msa
