// Reading the task table, and fetching the tiles of a task: the same for every kernel that walks it.
#pragma once

#include "device/ptx.cuh"

namespace msa {

__device__ __forceinline__ TaskHeader load_header(const TaskHeader* header) {
  const int4 x = __ldg(reinterpret_cast<const int4*>(header));
  return {x.x, x.y, x.z, x.w};
}

__device__ __forceinline__ bool same_segment(const TaskHeader& a, const TaskHeader& b) {
  return a.workspace_block == b.workspace_block && a.index_head == b.index_head;
}

// The last key of the block that a token sees is token + key_offset: past the block, or negative.
__device__ __forceinline__ int key_offset(const TaskHeader& header) {
  return header.position_offset - header.workspace_block * kBlockKeys;
}

// Whether some key of the block is in some query's future. Tokens ascend within a task: the first
// one sees the fewest keys.
__device__ __forceinline__ bool is_diagonal(int first_token, int key_offset) {
  return first_token + key_offset < kBlockKeys - 1;
}

// K or V of the task's block.
__device__ __forceinline__ void load_block(void* target, const CUtensorMap* map, uint64_t* bar,
                                           const TaskHeader& header) {
  tma_load_4d(target, map, bar, 0, header.workspace_block * kBlockKeys, 0, header.index_head);
}

// Q or dO of a slot. Token -1 is outside the tensor: its box arrives as zeros.
template <int kGroup>
__device__ __forceinline__ void load_slot(void* target, const CUtensorMap* map, uint64_t* bar,
                                          int index_head, int token) {
  tma_load_5d(target, map, bar, 0, 0, 0, index_head * (kGroup / 8), token);
}

}  // namespace msa
