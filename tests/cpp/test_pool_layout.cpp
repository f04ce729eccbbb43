// The pools as the postprocess reads them, held to the shapes that device/pool_layout.h states.
#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "device/pool_layout.h"

namespace msa {
namespace {

constexpr int kUnit = 16;

// Offset of (head, d) in a token's kWgmma dQ of one KV head.
int wgmma_dq_offset(int group, int head, int d) {
  const int half = d / 64;
  const int pair = d % 8 / 2;
  const int first = half * group * 64;
  if (group == 16) {
    return first + ((d % 64 / 8 * 8 + head % 8) * 4 + pair) * 4 + head / 8 * 2 + d % 2;
  }
  return first + ((d % 64 / 16 * 8 + head) * 4 + pair) * 4 + d / 8 % 2 * 2 + d % 2;
}

int wgmma_kv_offset(int key, int d) {
  const int fragment = key / 16 * 16 + d / 8;
  return ((fragment * 8 + key % 8) * 4 + d % 8 / 2) * 4 + key / 8 % 2 * 2 + d % 2;
}

int tmem_kv_offset(int key, int d) { return (d / 4 * kBlockKeys + key) * 4 + d % 4; }

template <PoolLayout kLayout>
void check_kv(int (*offset)(int key, int d)) {
  std::set<int> seen;
  for (int unit = 0; unit < kBlockKeys * kHeadDim / kUnit; ++unit) {
    Piece pieces[2];
    kv_unit_pieces<kLayout>(unit, pieces);
    for (int i = 0; i < kUnit; ++i) {
      const Piece& piece = pieces[unit_piece<kLayout>(i)];
      const int at = kv_unit_offset<kLayout>(unit, i / 4) + i % 4;
      ASSERT_EQ(at, offset(piece.row, piece.d + unit_d<kLayout>(i)))
          << "unit " << unit << ", " << i;
      seen.insert(at);
    }
  }
  EXPECT_EQ(seen.size(), size_t{kBlockKeys} * kHeadDim);
}

template <PoolLayout kLayout>
void check_dq(int group, const std::function<int(int head, int d)>& offset) {
  std::set<int> seen;
  for (int unit = 0; unit < group * kHeadDim / kUnit; ++unit) {
    Piece pieces[2];
    dq_unit_pieces<kLayout>(group, unit, pieces);
    for (int i = 0; i < kUnit; ++i) {
      const Piece& piece = pieces[unit_piece<kLayout>(i)];
      const int at = unit * kUnit + i;
      ASSERT_EQ(at, offset(piece.row, piece.d + unit_d<kLayout>(i)))
          << "unit " << unit << ", " << i;
      seen.insert(piece.row * kHeadDim + piece.d + unit_d<kLayout>(i));
    }
  }
  EXPECT_EQ(seen.size(), static_cast<size_t>(group) * kHeadDim);
}

TEST(PoolLayout, WgmmaKeysAndValues) { check_kv<PoolLayout::kWgmma>(wgmma_kv_offset); }

TEST(PoolLayout, TmemKeysAndValues) { check_kv<PoolLayout::kTmem>(tmem_kv_offset); }

TEST(PoolLayout, WgmmaQueries) {
  for (const int group : {16, 8}) {
    check_dq<PoolLayout::kWgmma>(group,
                                 [=](int head, int d) { return wgmma_dq_offset(group, head, d); });
  }
}

TEST(PoolLayout, RowMajorQueries) {
  for (const int group : {16, 8}) {
    check_dq<PoolLayout::kRowMajor>(group, [](int head, int d) { return head * kHeadDim + d; });
  }
}

}  // namespace
}  // namespace msa
