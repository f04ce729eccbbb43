// How the accumulation pools are laid out, in units of 16 consecutive elements.
//
// kRowMajor  dq [T, Hq, 128], dk/dv [W, Hkv, 128]: a unit is 16 d of one row.
// kWgmma     accumulator fragments of 8 d: [8 rows, 4 pairs of d, 2 pieces, 2]. A unit is one of
// the 8 rows with a
//            second piece from
//              dq, G = 16  [T, Hkv, 2 halves of d, 8 chunks of d, 8, ...]    the head 8 further
//              dq, G = 8   [T, Hkv, 2 halves of d, 4 pairs of chunks, 8, ...] the chunk after
//              dk, dv      [W/128, Hkv, 8 x 16 keys, 16 chunks of d, 8, ...]   the key 8 further
#pragma once

#include "params.h"

namespace msa {

// Eight consecutive d of one row (query head or key) of a KV head.
struct Piece {
  int row;
  int d;
};

// The two pieces of unit `unit` of a token's dQ of one KV head; rows count inside the group.
template <PoolLayout kLayout>
__device__ __forceinline__ void dq_unit_pieces(int group, int unit, Piece (&pieces)[2]) {
  if constexpr (kLayout == PoolLayout::kRowMajor) {
    const int row = unit / 8;
    pieces[0] = {row, unit % 8 * 16};
    pieces[1] = {row, unit % 8 * 16 + 8};
  } else {
    const int row = unit % 8;
    const int chunk = unit / 8;
    if (group == 16) {
      pieces[0] = {row, chunk * 8};
      pieces[1] = {row + 8, chunk * 8};
    } else {
      pieces[0] = {row, chunk * 16};
      pieces[1] = {row, chunk * 16 + 8};
    }
  }
}

// The same for dK or dV of a block and KV head (kWgmma); rows are keys of the block.
__device__ __forceinline__ void kv_unit_pieces(int unit, Piece (&pieces)[2]) {
  const int key = unit / 128 * 16 + unit % 8;
  const int d = unit % 128 / 8 * 8;
  pieces[0] = {key, d};
  pieces[1] = {key + 8, d};
}

// Where element i of a unit belongs: piece and d inside it.
template <PoolLayout kLayout>
__device__ constexpr int unit_piece(int i) {
  return kLayout == PoolLayout::kRowMajor ? i / 8 : i % 4 / 2;
}
template <PoolLayout kLayout>
__device__ constexpr int unit_d(int i) {
  return kLayout == PoolLayout::kRowMajor ? i % 8 : i / 4 * 2 + i % 2;
}

}  // namespace msa
