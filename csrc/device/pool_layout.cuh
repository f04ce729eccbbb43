// Where an element lies in the accumulation pools, for each PoolLayout. Elements d and d + 1, d
// even, are adjacent.
#pragma once

#include "params.h"

namespace msa {

struct PoolShape {
  int num_heads;
  int num_kv_heads;
  int group;
};

// dQ of (token, query head, d).
template <PoolLayout kLayout>
__device__ __forceinline__ int64_t dq_pool_offset(const PoolShape& shape, int64_t token, int head,
                                                  int d) {
  if constexpr (kLayout == PoolLayout::kRowMajor) {
    return (token * shape.num_heads + head) * kHeadDim + d;
  } else {
    static_assert(kLayout == PoolLayout::kWgmma);
    // [T, Hkv, 2 halves of d, 8 chunks of 8 d, 32 lanes, G/8, 2]: accumulator fragments of 8 heads
    // x 8 d, lane = head % 8 * 4 + d % 8 / 2.
    const int row = head % shape.group;
    const int half = d / 64;
    const int lane = row % 8 * 4 + d % 8 / 2;
    const int64_t token_head = token * shape.num_kv_heads + head / shape.group;
    return (token_head * 2 + half) * (shape.group * 64) +
           ((d % 64 / 8 * 32 + lane) * (shape.group / 8) + row / 8) * 2 + d % 2;
  }
}

// dK or dV of (workspace row, KV head, d).
template <PoolLayout kLayout>
__device__ __forceinline__ int64_t kv_pool_offset(const PoolShape& shape, int64_t key, int head,
                                                  int d) {
  if constexpr (kLayout == PoolLayout::kRowMajor) {
    return (key * shape.num_kv_heads + head) * kHeadDim + d;
  } else {
    static_assert(kLayout == PoolLayout::kWgmma);
    // [block, Hkv, 2 warpgroups, 16 chunks of 8 d, 4 warps, 32 lanes, 2, 2]: a warpgroup holds 64
    // keys, a warp 16, a lane keys lane/4 and lane/4 + 8.
    const int in_block = static_cast<int>(key % kBlockKeys);
    const int lane = in_block % 8 * 4 + d % 8 / 2;
    const int warp = in_block % 64 / 16;
    const int64_t block_head = key / kBlockKeys * shape.num_kv_heads + head;
    return block_head * (kBlockKeys * kHeadDim) + in_block / 64 * (64 * kHeadDim) +
           ((d / 8 * 4 + warp) * 32 + lane) * 4 + in_block % 16 / 8 * 2 + d % 2;
  }
}

}  // namespace msa
