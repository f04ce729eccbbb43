// Tensor maps for TMA, made through the driver entry point: nothing links libcuda.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

#include "params.h"

namespace msa {

// A BF16 map with 128-byte swizzle and zero fill. Dimension 0 is innermost and contiguous.
struct TensorMapSpec {
  const void* data;                      // 16-byte aligned
  uint32_t rank;                         // 1..5; entries beyond it are not looked at
  std::array<uint64_t, 5> sizes;         // elements of each dimension
  std::array<uint64_t, 4> stride_bytes;  // of dimensions 1.., multiples of 16
  std::array<uint32_t, 5> box;           // elements of the box in each dimension, at most 256
};

// Throws std::invalid_argument naming the field that TMA cannot take.
void check_tensor_map(const TensorMapSpec& spec);
// Written in place: not every compiler aligns a returned map to its 128 bytes. Throws as above, and
// std::runtime_error where the driver refuses.
void make_tensor_map(const TensorMapSpec& spec, CUtensorMap& map);

// Q or dO of query slots: {64 d, 8 heads, 2 halves of d, Hq/8, T}; a box is one token's group of
// heads and lands as [group/8][half][8 heads][64 d], 8-row swizzle atoms in K-major and MN-major
// order alike.
TensorMapSpec slot_map(const StridedOperand& operand, int64_t num_tokens, int num_heads, int group);
// K or V of a block: {64 d, W keys, 2 halves of d, Hkv}; a box lands as [half][128 keys][64 d].
TensorMapSpec block_map(const StridedOperand& operand, int64_t workspace_rows, int num_kv_heads);

}  // namespace msa
