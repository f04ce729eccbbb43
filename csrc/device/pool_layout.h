// How the accumulation pools are laid out. Host-safe: the C++ checks hold it to its description.
//
// A unit is what a thread of the postprocess turns into pieces of 8 consecutive d of one row (query
// head or key). For dK and dV, and for dQ but in kTmem, it is four runs of 4 elements and makes two
// pieces.
//
// kRowMajor  dq [T, Hq, 128], dk/dv [W, Hkv, 128]: a unit is 16 d of one row.
// kWgmma     accumulator fragments of 8 d: [8 rows, 4 pairs of d, 2 pieces, 2]. A unit is one of
//            the 8 rows with a second piece from
//              dq, G = 16  [T, Hkv, 2 halves of d, 8 chunks of d, 8, ...]     the head 8 further
//              dq, G = 8   [T, Hkv, 2 halves of d, 4 pairs of chunks, 8, ...] the chunk after
//              dk, dv      [W/128, Hkv, 8 x 16 keys, 16 chunks of d, 8, ...]  the key 8 further
// kTmem      a thread owns a lane of tensor memory, a d of dQ or a key of dK and dV, and adds 16
//            bytes at a time:
//              dq      [T, Hq/H, 128 d, H heads], H = 16 bytes of dq_accum; a unit is 8 d, H heads
//              dk, dv  [W/128, Hkv, 32 quads of d, 128 keys, 4 d]; a unit is 16 d of one key
#pragma once

#include "params.h"

namespace msa {

// Eight consecutive d of one row of a KV head.
struct Piece {
  int row;
  int d;
};

// The two pieces of unit `unit` of a token's dQ of one KV head; rows count inside the group.
template <PoolLayout kLayout>
MSA_HOST_DEVICE inline void dq_unit_pieces(int group, int unit, Piece (&pieces)[2]) {
  static_assert(kLayout != PoolLayout::kTmem);
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

// The same for dK or dV of a block and KV head; rows are keys of the block.
template <PoolLayout kLayout>
MSA_HOST_DEVICE inline void kv_unit_pieces(int unit, Piece (&pieces)[2]) {
  static_assert(kLayout != PoolLayout::kRowMajor, "its pool has the gradient's own order");
  if constexpr (kLayout == PoolLayout::kTmem) {
    const int key = unit % kBlockKeys;
    const int d = unit / kBlockKeys * 16;
    pieces[0] = {key, d};
    pieces[1] = {key, d + 8};
  } else {
    const int key = unit / 128 * 16 + unit % 8;
    const int d = unit % 128 / 8 * 8;
    pieces[0] = {key, d};
    pieces[1] = {key + 8, d};
  }
}

// Where run `run` of a dK or dV unit starts, in elements from the block's and KV head's first.
template <PoolLayout kLayout>
MSA_HOST_DEVICE constexpr int kv_unit_offset(int unit, int run) {
  if (kLayout != PoolLayout::kTmem) return unit * 16 + run * 4;
  return ((unit / kBlockKeys * 4 + run) * kBlockKeys + unit % kBlockKeys) * 4;
}

// Where element i of a unit belongs: piece and d inside it.
template <PoolLayout kLayout>
MSA_HOST_DEVICE constexpr int unit_piece(int i) {
  return kLayout == PoolLayout::kWgmma ? i % 4 / 2 : i / 8;
}
template <PoolLayout kLayout>
MSA_HOST_DEVICE constexpr int unit_d(int i) {
  return kLayout == PoolLayout::kWgmma ? i / 4 * 2 + i % 2 : i % 8;
}

}  // namespace msa
