// Compile-time plan of the Hopper backward: tile, warp roles, shared memory, barriers.
#pragma once

#include <cstdint>

#include "params.h"

namespace msa::sm90 {

// A task's 128 rows are taken in two steps of 64: with dK and dV of 64 keys a warpgroup (128
// registers a thread) there is room for S, dP and dQ of a 64-row step (32 each), not of a 128-row
// one.
constexpr int kStepRows = 64;
constexpr int kNumStages = 3;

// | role     | warpgroup | registers | work                                                     |
// | producer | 0         | 24        | one warp: task table -> TMA of K/V a segment, Q/dO a step |
// | consumer | 1, 2      | 240       | 64 keys each: S, dP, dV, dK of them; 64 columns of dQ     |
constexpr int kWarpgroupThreads = 128;
constexpr int kNumConsumers = 2;
constexpr int kNumThreads = (1 + kNumConsumers) * kWarpgroupThreads;
constexpr int kNumConsumerWarps = kNumConsumers * 4;
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
static_assert(kProducerRegisters + kNumConsumers * kConsumerRegisters <= 65536 / kWarpgroupThreads,
              "the register file holds 512 registers for each thread index of a warpgroup");
constexpr int kConsumerKeys = kBlockKeys / kNumConsumers;  // 64
constexpr int kConsumerDqDims = kHeadDim / kNumConsumers;  // 64

// Shared layouts, all 128-byte swizzled (rows of 64 elements; 8 rows, 1 KiB, an atom):
//   K, V   [2 halves of d][128 keys][64 d]            K-major for S, dP; MN-major for dQ
//   Q, dO  [8 row groups][2 halves of d][8 rows][64 d] K-major for S, dP; MN-major for dK, dV
//   dS     [128 keys][64 rows]                        MN-major A of dQ
constexpr uint32_t kAtomBytes = 1024;
constexpr uint32_t kKvHalfBytes = kBlockKeys * 128;
constexpr uint32_t kKvBytes = 2 * kKvHalfBytes;
constexpr uint32_t kRowGroupBytes = 2 * kAtomBytes;
constexpr uint32_t kStepBytes = kStepRows / 8 * kRowGroupBytes;
constexpr uint32_t kDsBytes = kBlockKeys * kStepRows * 2;

template <int kGroup>
struct Slots {
  static_assert(kGroup == 16 || kGroup == 8);
  static constexpr int kPerTask = slots_per_task(kGroup);
  static constexpr int kPerStep = kPerTask / 2;
  static constexpr int kPerWarp = kPerStep / 4;              // a warp's 16 dQ rows
  static constexpr uint32_t kBytes = kGroup * kHeadDim * 2;  // Q or dO of a slot
  static constexpr uint32_t kStatsBytes = kGroup * 4;        // lse or delta of a slot
  static constexpr uint32_t kStageBytes = kPerStep * 2 * (kBytes + kStatsBytes);
};

enum StepFlags : uint32_t {
  kSegmentEnd = 1,  // dK/dV are flushed after it
  kWalkEnd = 2,     // last step of the CTA
  kDiagonal = 4,    // some key of the block is in some query's future
};

// What the producer tells the consumers about a step, beside its tiles.
struct StepInfo {
  int32_t token[8];     // of each slot; -1 = empty
  int32_t last_key[8];  // last visible key of the block, may be negative or past the block
  int32_t index_head;
  int32_t workspace_block;
  uint32_t flags;  // StepFlags
  int32_t unused;
};

template <DqAccum kDqAccum>
constexpr uint32_t kDqElementBytes = kDqAccum == DqAccum::kFp32 ? 4 : 2;

template <DqAccum kDqAccum>
struct alignas(1024) SharedStorage {
  // A warp's staging: 16 rows x 64 columns in fragment order, read by its own bulk reduce only.
  static constexpr uint32_t kDqWarpBytes = 16 * kConsumerDqDims * kDqElementBytes<kDqAccum>;
  uint8_t k[kKvBytes];
  uint8_t v[kKvBytes];
  uint8_t q[kNumStages][kStepBytes];
  uint8_t grad_out[kNumStages][kStepBytes];
  uint8_t ds[2][kDsBytes];
  uint8_t dq[kNumConsumerWarps][kDqWarpBytes];
  float neg_lse_log2[kNumStages][kStepRows];
  float delta[kNumStages][kStepRows];
  StepInfo step[kNumStages];
  uint64_t bar_kv_full;
  uint64_t bar_kv_empty;
  uint64_t bar_step_full[kNumStages];
  uint64_t bar_step_empty[kNumStages];
  uint64_t bar_ds_full[2];
};
static_assert(sizeof(SharedStorage<DqAccum::kFp32>) <= 232448, "shared memory of a CTA on sm_90");

}  // namespace msa::sm90
