// Compile-time plan of the Blackwell backward: tile, warp roles, tensor memory, shared memory.
#pragma once

#include <cstdint>

#include "params.h"

namespace msa::sm100 {

// | role    | warps | registers | work                                                  |
// | load    | 0     | 80        | one thread: TMA of K, V a segment, of Q, dO a task    |
// | mma     | 1     | 80        | one thread: every tcgen05.mma                         |
// | scalar  | 2     | 80        | row statistics and last visible keys of a task        |
// | idle    | 3     | 80        |                                                       |
// | reduce  | 4-7   | 160       | dQ a task, dK and dV a segment: tensor memory -> pool |
// | compute | 8-15  | 136       | S -> P, dP -> dS; two warpgroups share the rows       |
enum class WarpRole { kLoad, kMma, kScalar, kIdle, kReduce, kCompute };

MSA_HOST_DEVICE constexpr WarpRole warp_role(int warp) {
  if (warp < 4) return static_cast<WarpRole>(warp);
  return warp < 8 ? WarpRole::kReduce : WarpRole::kCompute;
}

constexpr int kNumThreads = 512;
constexpr int kFirstComputeWarp = 8;
constexpr int kNumComputeGroups = 2;  // warpgroups
constexpr int kNumComputeWarps = 4 * kNumComputeGroups;
constexpr int kNumReduceWarps = 4;
constexpr int kIssueRegisters = 80;  // load, mma, scalar, idle
constexpr int kReduceRegisters = 160;
constexpr int kComputeRegisters = 136;
static_assert(kIssueRegisters + kReduceRegisters + kNumComputeGroups * kComputeRegisters <= 512,
              "the register file holds 512 registers for each thread index of a warpgroup");

constexpr int kNumStages = 2;  // of Q, dO and row statistics

// Rows are handed from compute to mma in two halves; of a half each compute warpgroup makes one
// chunk, so that a half takes half the time.
constexpr int kNumHalves = 2;
constexpr int kHalfRows = kTileRows / kNumHalves;
constexpr int kChunkRows = kHalfRows / kNumComputeGroups;  // 32
constexpr int kMmaK = 16;                                  // of a tcgen05.mma of BF16
constexpr int kMmasPerGemm = kTileRows / kMmaK;            // rows, keys and d are all 128
constexpr int kMmasPerHalf = kHalfRows / kMmaK;

// Tensor memory, 512 columns of 128 lanes. S^T and dP^T: a lane a key, a column a row. P^T and dS^T
// replace them in place: the 32 rows of a chunk, packed in pairs, take the chunk's first 16
// columns. dQ^T (a lane a d, a column a row) comes after dS^T has been read; dV, dK: a lane a key,
// a column a d.
constexpr uint32_t kTmemColumns = 512;
constexpr uint32_t kTmemS = 0;
constexpr uint32_t kTmemDp = 128;
constexpr uint32_t kTmemDq = kTmemDp;
constexpr uint32_t kTmemDv = 256;
constexpr uint32_t kTmemDk = 384;
static_assert(kTmemDk + kHeadDim == kTmemColumns, "all of tensor memory is in use");

// First column of the packed operand that MMA `k` of a GEMM over rows reads, from S or dP's first.
MSA_HOST_DEVICE constexpr uint32_t operand_column(int k) {
  constexpr int kMmasPerChunk = kChunkRows / kMmaK;
  return k / kMmasPerChunk * kChunkRows + k % kMmasPerChunk * (kMmaK / 2);
}

// Shared layouts, all 128-byte swizzled (rows of 64 elements; 8 rows, 1 KiB, an atom):
//   K, V   [2 halves of d][128 keys][64 d]              K-major in S, dP; MN-major in dQ
//   Q, dO  [16 row groups][2 halves of d][8 rows][64 d] K-major in S, dP; MN-major in dK, dV
//   dS     [2 halves of rows][128 keys][64 rows]        MN-major in dQ
constexpr uint32_t kAtomBytes = 1024;
constexpr uint32_t kHalfTileBytes = kBlockKeys * 128;  // a half of K, V or dS
constexpr uint32_t kTileBytes = 2 * kHalfTileBytes;
constexpr uint32_t kRowGroupBytes = 2 * kAtomBytes;

template <int kGroup>
struct Slots {
  static_assert(kGroup == 16 || kGroup == 8);
  static constexpr int kPerTask = slots_per_task(kGroup);
  static constexpr int kPerChunk = kChunkRows / kGroup;
  static constexpr uint32_t kBytes = kGroup * kHeadDim * 2;  // Q or dO of a slot
  static constexpr uint32_t kStageBytes = 2 * kTileBytes;
};

// What compute needs of a task beside S and dP.
struct RowStats {
  float neg_lse_log2[kTileRows];
  float neg_delta[kTileRows];
  int32_t last_key[16];  // of each slot: last visible key of the block; may be past it, or negative
  int32_t diagonal;      // some key of the block is in some query's future
  int32_t unused[3];
};

struct alignas(1024) SharedStorage {
  uint8_t k[kTileBytes];
  uint8_t v[kTileBytes];
  uint8_t q[kNumStages][kTileBytes];
  uint8_t grad_out[kNumStages][kTileBytes];
  uint8_t ds[kTileBytes];
  RowStats stats[kNumStages];
  // Producer and consumer, arrivals: see the table in kernel.cuh.
  uint64_t bar_kv_full;
  uint64_t bar_kv_empty;
  uint64_t bar_rows_full[kNumStages];
  uint64_t bar_rows_empty[kNumStages];
  uint64_t bar_s_full;
  uint64_t bar_p_full[kNumHalves];
  uint64_t bar_p_empty;
  uint64_t bar_dp_full;
  uint64_t bar_ds_full[kNumHalves];
  uint64_t bar_dq_full;
  uint64_t bar_dq_empty;
  uint64_t bar_dv_full;
  uint64_t bar_dk_full;
  uint32_t tmem_base;
};
static_assert(sizeof(SharedStorage) <= 232448, "shared memory of a CTA on sm_100");

}  // namespace msa::sm100
