#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "params.h"

namespace msa::task_build {

// A sort value packs (item, task of the item): an item has at most 4096/8 tasks.
constexpr int kTaskInItemBits = 9;
constexpr int64_t kMaxItems = int64_t{1} << (32 - kTaskInItemBits);

// A sort buffer: the keys of all tasks, then their values.
constexpr size_t kBytesPerTask = sizeof(uint64_t) + sizeof(uint32_t);

// Bits of the sort key's fields; the key is (head, window, block, token in the window), unused
// tasks last.
struct KeyBits {
  int head;
  int token;
  int block;

  int total() const { return head + token + block; }
};

KeyBits key_bits(int64_t num_heads, int64_t num_tokens, int64_t num_blocks);

// Scratch of the sort; asks the runtime for the current device's tuning.
size_t sort_temp_bytes(int64_t task_capacity, const KeyBits& bits);

// Builds the ordered task table and the descriptor; never synchronises.
void launch(const TaskBuildParams& params, const KeyBits& bits, cudaStream_t stream);

}  // namespace msa::task_build
