#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "params.h"

namespace msa::task_build {

// A sort value packs (item, task of the item): an item has at most 4096/8 tasks.
constexpr int kTaskInItemBits = 9;
constexpr int64_t kMaxItems = int64_t{1} << (32 - kTaskInItemBits);

constexpr int kThreads = 1024;
constexpr int kRadixBits = 8;
constexpr int kRadix = 1 << kRadixBits;

// A sort buffer: the keys of all tasks, then their values.
constexpr size_t kBytesPerTask = sizeof(uint64_t) + sizeof(uint32_t);
// CTAs that take part, all resident at once.
constexpr int kMaxCtas = 256;
constexpr size_t kHistogramBytes = size_t{kMaxCtas} * kRadix * sizeof(uint32_t);

// Bits of the sort key's fields; the key is (head, window, block, token in the window).
struct KeyBits {
  int head;
  int token;
  int block;

  MSA_HOST_DEVICE int total() const { return head + token + block; }
};

KeyBits key_bits(int64_t num_heads, int64_t num_tokens, int64_t num_blocks);

// Builds the ordered task table and the descriptor in one launch; never synchronises.
void launch(const TaskBuildParams& params, const KeyBits& bits, cudaStream_t stream);

}  // namespace msa::task_build
