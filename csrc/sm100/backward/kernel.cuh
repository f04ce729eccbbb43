// The MSA backward on Blackwell: dQ, dK and dV of every task, five 128x128x128 GEMMs each, all
// transposed so that a thread of compute owns one key.
//
//   S^T = K Q^T      P^T = exp2(S^T * scale * log2e - lse * log2e), 0 where not visible
//   dP^T = V dO^T    dS^T = P^T * (dP^T - delta)
//   dV += P^T dO     dK += dS^T Q     dQ^T = K^T dS^T
//
// Roles: config.cuh. Barriers, one completion a task unless said otherwise:
//
// | barrier    | stages | producer -> consumer       | arrivals                                   |
// | kv_full    | 1      | load -> mma                | 64 KiB of TMA, a segment                   |
// | kv_empty   | 1      | mma -> load                | commit, a segment                          |
// | rows_full  | 2      | load, scalar -> mma        | 64 KiB of TMA; scalar warp                 |
// | rows_empty | 2      | mma -> load, scalar        | commit of dK, the stage's last reader      |
// | s_full     | 1      | mma -> compute             | commit                                     |
// | p_full     | 1      | compute -> mma             | 8 warps for each half of the rows          |
// | p_empty    | 1      | mma -> itself              | commit of dV, unless a segment ends        |
// | dp_full    | 1      | mma -> compute             | commit                                     |
// | ds_full    | 1      | compute -> mma             | 8 warps for each half of the rows          |
// | dq_full    | 1      | mma -> reduce              | commit                                     |
// | dq_empty   | 1      | reduce -> mma              | 4 warps                                    |
// | dv/dk_full | 1      | mma -> reduce              | commit, a segment; no empty barrier        |
//
// The tensor core's queue inside a segment, and what runs beside it:
//
//   mma      | dV(n) .. | dQ(n-1)    | .. dV(n) | dP(n)      | S(n+1)     | dK(n)      |
//   compute  | P(n)  .............. |           |            | dS(n) ............ | P(n+1)
//   reduce   |                       | .. dQ(n-1) drained, added ..     |
//
// S(n+1) fills the time in which compute makes the first half of dS(n); half of dV(n) the time in
// which reduce drains dQ(n-1) before dP(n) overwrites it. A new segment has new K and V: there
// dQ(n) comes right after dK(n), and S, dP of its first task before dV.
//
// What an MMA reads or overwrites in tensor memory is never left to the order in which the tensor
// core executes MMAs of different accumulators: P(n) is consumed (p_empty) before S(n+1) is issued,
// dS(n) (rows_empty) before dQ(n), which takes its columns.
//
// What needs no barrier of its own: reduce drains a segment's dV and dK before its last dQ, whose
// dq_empty mma awaits before the next segment's first dP. dS(n) is stored to shared memory after
// dp_full(n), whose commit covers dQ(n-1), the last reader of dS(n-1). Row statistics are last read
// before ds_full(n), which mma awaits before it commits rows_empty(n).
#pragma once

#include "device/ptx_sm100.cuh"
#include "device/task.cuh"
#include "device/vector.cuh"
#include "sm100/backward/config.cuh"

namespace msa::sm100 {

// The tasks of this CTA. Every role asks again: kept in registers over the roles' branches, the
// answer spills.
__device__ __forceinline__ TaskInterval cta_tasks(const MainParams& main) {
  return cta_interval(main.descriptor->walk, blockIdx.x);
}

// Walks a CTA's tasks, the header of the next one always read ahead.
struct TaskWalk {
  const TaskHeader* headers;
  int task;
  int end;
  uint32_t num_done = 0;
  bool segment_begin = true;
  TaskHeader header;
  TaskHeader next_header;

  __device__ explicit TaskWalk(const MainParams& main) : headers(main.task_headers) {
    const TaskInterval tasks = cta_tasks(main);
    task = tasks.begin;
    end = tasks.end;
    header = load_header(headers + task);
    read_ahead();
  }

  __device__ bool done() const { return task == end; }
  __device__ bool is_last() const { return task + 1 == end; }
  // The next task has another block or head, or there is none.
  __device__ bool segment_end() const { return is_last() || !same_segment(next_header, header); }
  __device__ void advance() {
    segment_begin = segment_end();
    header = next_header;
    ++task;
    ++num_done;
    read_ahead();
  }
  __device__ void read_ahead() {
    if (task + 1 < end) next_header = load_header(headers + task + 1);
  }

  // Phase of a barrier that completes once a task.
  __device__ uint32_t phase() const { return num_done % 2; }
  __device__ uint32_t stage() const { return num_done % kNumStages; }
  __device__ uint32_t stage_phase() const { return num_done / kNumStages % 2; }
};

// The query slots of a task, -1 where empty.
template <int kGroup>
__device__ __forceinline__ void load_tokens(int32_t (&tokens)[Slots<kGroup>::kPerTask],
                                            const MainParams& main, int task) {
  const int4* slots =
      reinterpret_cast<const int4*>(main.task_tokens) + int64_t{task} * Slots<kGroup>::kPerTask / 4;
#pragma unroll
  for (int i = 0; i < Slots<kGroup>::kPerTask / 4; ++i) {
    const int4 x = __ldg(slots + i);
    tokens[4 * i] = x.x;
    tokens[4 * i + 1] = x.y;
    tokens[4 * i + 2] = x.z;
    tokens[4 * i + 3] = x.w;
  }
}

// -------------------------------------------------------------------------------------------------
// load: one thread

template <int kGroup>
__device__ void load(const TmaKernelParams& params, SharedStorage& shared, TaskWalk walk) {
  using S = Slots<kGroup>;
  uint32_t kv_phase = 0;
  for (; !walk.done(); walk.advance()) {
    int32_t tokens[S::kPerTask];
    load_tokens<kGroup>(tokens, params.main, walk.task);
    const int head = walk.header.index_head;
    if (walk.segment_begin) {
      mbarrier_wait(&shared.bar_kv_empty, kv_phase ^ 1);
      kv_phase ^= 1;
      mbarrier_arrive_expect_tx(&shared.bar_kv_full, 2 * kTileBytes);
      load_block(shared.k, &params.k, &shared.bar_kv_full, walk.header);
      load_block(shared.v, &params.v, &shared.bar_kv_full, walk.header);
    }
    const uint32_t stage = walk.stage();
    uint64_t* full = &shared.bar_rows_full[stage];
    mbarrier_wait(&shared.bar_rows_empty[stage], walk.stage_phase() ^ 1);
    mbarrier_arrive_expect_tx(full, S::kStageBytes);
#pragma unroll
    for (int slot = 0; slot < S::kPerTask; ++slot) {
      load_slot<kGroup>(shared.q[stage] + slot * S::kBytes, &params.q, full, head, tokens[slot]);
      load_slot<kGroup>(shared.grad_out[stage] + slot * S::kBytes, &params.grad_out, full, head,
                        tokens[slot]);
    }
  }
}

// -------------------------------------------------------------------------------------------------
// scalar: one warp, four rows a lane

template <int kGroup>
__device__ void load_stats(const MainParams& main, SharedStorage& shared, TaskWalk walk) {
  using S = Slots<kGroup>;
  const int lane = threadIdx.x % 32;
  const int row = 4 * lane;
  for (; !walk.done(); walk.advance()) {
    const int32_t* tokens = main.task_tokens + int64_t{walk.task} * S::kPerTask;
    const int32_t token = __ldg(tokens + row / kGroup);
    float4 neg_lse_log2 = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 delta = neg_lse_log2;
    if (token >= 0) {
      const int64_t at =
          int64_t{token} * main.num_heads + walk.header.index_head * kGroup + row % kGroup;
      neg_lse_log2 = __ldg(reinterpret_cast<const float4*>(main.neg_lse_log2 + at));
      delta = __ldg(reinterpret_cast<const float4*>(main.delta + at));
    }
    const int offset = key_offset(walk.header);
    RowStats& stats = shared.stats[walk.stage()];
    mbarrier_wait(&shared.bar_rows_empty[walk.stage()], walk.stage_phase() ^ 1);
    *reinterpret_cast<float4*>(stats.neg_lse_log2 + row) = neg_lse_log2;
    *reinterpret_cast<float4*>(stats.neg_delta + row) =
        make_float4(-delta.x, -delta.y, -delta.z, -delta.w);
    if (row % kGroup == 0) stats.last_key[row / kGroup] = token + offset;
    if (lane == 0) stats.diagonal = is_diagonal(token, offset);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.bar_rows_full[walk.stage()]);
  }
}

// -------------------------------------------------------------------------------------------------
// mma: one thread

struct Mma {
  using KeysByDims = SmemOperand<Major::K, 0, kAtomBytes>;                    // K, V of S, dP
  using RowsByDims = SmemOperand<Major::K, 0, kRowGroupBytes>;                // Q, dO of S, dP
  using RowsTransposed = SmemOperand<Major::MN, kAtomBytes, kRowGroupBytes>;  // dO, Q of dV, dK
  using KeysTransposed = SmemOperand<Major::MN, kHalfTileBytes, kAtomBytes>;  // K, dS of dQ

  SharedStorage& shared;
  const uint32_t tmem;
  uint32_t p_empty_phase = 0;
  uint32_t segment_phase = 0;

  __device__ __forceinline__ void run(TaskWalk walk) {
    for (; !walk.done(); walk.advance()) {
      const bool first = walk.segment_begin;
      const bool last = walk.segment_end();
      const uint32_t stage = walk.stage();
      const uint32_t q = smem_address(shared.q[0]) + stage * kTileBytes;
      const uint32_t grad_out = smem_address(shared.grad_out[0]) + stage * kTileBytes;
      if (first) {
        mbarrier_wait(&shared.bar_kv_full, segment_phase);
        mbarrier_wait(&shared.bar_rows_full[stage], walk.stage_phase());
        issue_s(q);
        issue_dp(grad_out, walk.phase());
      }

      issue_half<kTmemDv, kTmemS>(0, shared.bar_p_full, walk.phase(), grad_out, first);
      if (!first) issue_dq(walk.num_done - 1);
      issue_half<kTmemDv, kTmemS>(1, shared.bar_p_full, walk.phase(), grad_out, first);
      mma_commit(last ? &shared.bar_dv_full : &shared.bar_p_empty);
      if (!first) issue_dp(grad_out, walk.phase());
      if (!last) issue_next_s(walk.num_done + 1);

      issue_half<kTmemDk, kTmemDp>(0, shared.bar_ds_full, walk.phase(), q, first);
      issue_half<kTmemDk, kTmemDp>(1, shared.bar_ds_full, walk.phase(), q, first);
      mma_commit(&shared.bar_rows_empty[stage]);
      if (last) {
        mma_commit(&shared.bar_dk_full);
        issue_dq(walk.num_done);
        if (!walk.is_last()) mma_commit(&shared.bar_kv_empty);
        segment_phase ^= 1;
      }
    }
  }

  // acc[128 keys, 128 rows] = keys[128, 128 d] * rows[128, 128 d]^T
  __device__ __forceinline__ void issue_keys_by_rows(uint32_t acc, const uint8_t* keys,
                                                     uint32_t rows) const {
    const KeysByDims a{smem_address(keys)};
    const RowsByDims b{rows};
#pragma unroll
    for (int k = 0; k < kMmasPerGemm; ++k) {  // 16 d each
      const uint32_t in_half = k % 4 * 32;
      mma_ss<KeysByDims::kMajor, RowsByDims::kMajor>(
          acc, a.descriptor(k / 4 * kHalfTileBytes + in_half),
          b.descriptor(k / 4 * kAtomBytes + in_half), k > 0);
    }
  }

  __device__ __forceinline__ void issue_s(uint32_t q) const {
    issue_keys_by_rows(tmem + kTmemS, shared.k, q);
    mma_commit(&shared.bar_s_full);
  }

  // S of task `next`, once P of the one before has been consumed.
  __device__ __forceinline__ void issue_next_s(uint32_t next) {
    mbarrier_wait(&shared.bar_rows_full[next % kNumStages], next / kNumStages % 2);
    mbarrier_wait_tmem(&shared.bar_p_empty, p_empty_phase);
    p_empty_phase ^= 1;
    issue_s(smem_address(shared.q[0]) + next % kNumStages * kTileBytes);
  }

  // dP, once dQ of the task before has left its columns.
  __device__ __forceinline__ void issue_dp(uint32_t grad_out, uint32_t phase) const {
    mbarrier_wait_tmem(&shared.bar_dq_empty, phase ^ 1);
    issue_keys_by_rows(tmem + kTmemDp, shared.v, grad_out);
    mma_commit(&shared.bar_dp_full);
  }

  // acc[128 keys, 128 d] = or += operand[128 keys, half of the rows] * rows[half, 128 d]; the
  // operand replaces the scores whose first column is kScores.
  template <uint32_t kAcc, uint32_t kScores>
  __device__ __forceinline__ void issue_half(int half, uint64_t (&bar_full)[kNumHalves],
                                             uint32_t phase, uint32_t rows, bool first) const {
    mbarrier_wait_tmem(&bar_full[half], phase);
    const RowsTransposed b{rows};
#pragma unroll
    for (int i = 0; i < kMmasPerHalf; ++i) {  // 16 rows each
      const int k = half * kMmasPerHalf + i;
      mma_ts<RowsTransposed::kMajor>(tmem + kAcc, tmem + kScores + operand_column(k),
                                     b.descriptor(k * 2 * kRowGroupBytes), !first || k > 0);
    }
  }

  // dQ^T[128 d, 128 rows] = K[128 keys, 128 d]^T * dS^T[128 keys, 128 rows] of task `task`, once dK
  // has consumed dS^T, whose columns it takes.
  __device__ __forceinline__ void issue_dq(uint32_t task) const {
    mbarrier_wait_tmem(&shared.bar_rows_empty[task % kNumStages], task / kNumStages % 2);
    const KeysTransposed a{smem_address(shared.k)};
    const KeysTransposed b{smem_address(shared.ds)};
#pragma unroll
    for (int k = 0; k < kMmasPerGemm; ++k) {  // 16 keys each
      mma_ss<KeysTransposed::kMajor, KeysTransposed::kMajor>(
          tmem + kTmemDq, a.descriptor(k * 2 * kAtomBytes), b.descriptor(k * 2 * kAtomBytes),
          k > 0);
    }
    mma_commit(&shared.bar_dq_full);
  }
};

// -------------------------------------------------------------------------------------------------
// compute: two warpgroups, a thread a key; of either half of the rows a warpgroup has 32

template <int kGroup>
struct Compute {
  using S = Slots<kGroup>;

  SharedStorage& shared;
  const float scale_log2;
  const int group;           // 0 or 1
  const int key;             // of the block
  const uint32_t tmem_lane;  // the warp's quarter of tensor memory

  __device__ __forceinline__ void run(TaskInterval tasks) const {
    const uint32_t num_tasks = tasks.end - tasks.begin;
    for (uint32_t n = 0; n < num_tasks; ++n) {
      const RowStats& stats = shared.stats[n % kNumStages];
      uint32_t loaded[kNumHalves][kChunkRows];
      float p[kNumHalves][kChunkRows];
      mbarrier_wait_tmem(&shared.bar_s_full, n % 2);
      tmem_load(loaded[0], tmem_lane + kTmemS + first_row(0));
#pragma unroll
      for (int half = 0; half < kNumHalves; ++half) {
        tmem_wait_load(loaded[half], p[half]);
        if (half == 0) tmem_load(loaded[1], tmem_lane + kTmemS + first_row(1));
        softmax(p[half], stats, half);
        uint32_t packed[kChunkRows / 2];
        pack(packed, p[half]);
        tmem_store(tmem_lane + kTmemS + first_row(half), packed);
        hand_over(&shared.bar_p_full[half]);
      }

      mbarrier_wait_tmem(&shared.bar_dp_full, n % 2);
      tmem_load(loaded[0], tmem_lane + kTmemDp + first_row(0));
#pragma unroll
      for (int half = 0; half < kNumHalves; ++half) {
        float ds[kChunkRows];
        tmem_wait_load(loaded[half], ds);
        if (half == 0) tmem_load(loaded[1], tmem_lane + kTmemDp + first_row(1));
        score_gradient(ds, p[half], stats, half);
        uint32_t packed[kChunkRows / 2];
        pack(packed, ds);
        tmem_store(tmem_lane + kTmemDp + first_row(half), packed);
        store_ds(packed, half);
        if (half + 1 == kNumHalves) fence_proxy_async();  // for the stores of both halves
        hand_over(&shared.bar_ds_full[half]);
      }
    }
  }

  __device__ __forceinline__ int first_row(int half) const {
    return half * kHalfRows + group * kChunkRows;
  }

  // What the warp stored is read by mma after the barrier.
  __device__ __forceinline__ void hand_over(uint64_t* bar) const {
    tmem_wait_store();
    tmem_fence_before_arrive();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(bar);
  }

  // S -> P in place.
  __device__ __forceinline__ void softmax(float (&s)[kChunkRows], const RowStats& stats,
                                          int half) const {
    const float4* neg_lse_log2 =
        reinterpret_cast<const float4*>(stats.neg_lse_log2 + first_row(half));
    const float2 scale = make_float2(scale_log2, scale_log2);
#pragma unroll
    for (int i = 0; i < kChunkRows; i += 4) {
      const float4 x = neg_lse_log2[i / 4];
      const float2 lo = __ffma2_rn(make_float2(s[i], s[i + 1]), scale, make_float2(x.x, x.y));
      const float2 hi = __ffma2_rn(make_float2(s[i + 2], s[i + 3]), scale, make_float2(x.z, x.w));
      s[i] = exp2_approx(lo.x);
      s[i + 1] = exp2_approx(lo.y);
      s[i + 2] = exp2_approx(hi.x);
      s[i + 3] = exp2_approx(hi.y);
    }
    if (stats.diagonal) {
#pragma unroll
      for (int slot = 0; slot < S::kPerChunk; ++slot) {
        const bool visible = key <= stats.last_key[first_row(half) / kGroup + slot];
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          if (!visible) s[slot * kGroup + i] = 0.0f;
        }
      }
    }
  }

  // dP -> dS = P * (dP - delta) in place.
  __device__ __forceinline__ void score_gradient(float (&dp)[kChunkRows],
                                                 const float (&p)[kChunkRows],
                                                 const RowStats& stats, int half) const {
    const float4* neg_delta = reinterpret_cast<const float4*>(stats.neg_delta + first_row(half));
#pragma unroll
    for (int i = 0; i < kChunkRows; i += 4) {
      const float4 x = neg_delta[i / 4];
      const float2 lo =
          __fmul2_rn(make_float2(p[i], p[i + 1]),
                     __fadd2_rn(make_float2(dp[i], dp[i + 1]), make_float2(x.x, x.y)));
      const float2 hi =
          __fmul2_rn(make_float2(p[i + 2], p[i + 3]),
                     __fadd2_rn(make_float2(dp[i + 2], dp[i + 3]), make_float2(x.z, x.w)));
      dp[i] = lo.x;
      dp[i + 1] = lo.y;
      dp[i + 2] = hi.x;
      dp[i + 3] = hi.y;
    }
  }

  static __device__ __forceinline__ void pack(uint32_t (&packed)[kChunkRows / 2],
                                              const float (&x)[kChunkRows]) {
#pragma unroll
    for (int i = 0; i < kChunkRows / 2; ++i) packed[i] = pack_bf16x2(x[2 * i], x[2 * i + 1]);
  }

  // ds[half][key][64 rows], 16 bytes of 8 rows swizzled by the key.
  __device__ __forceinline__ void store_ds(const uint32_t (&packed)[kChunkRows / 2],
                                           int half) const {
    uint8_t* row = shared.ds + half * kHalfTileBytes + key * 128;
#pragma unroll
    for (int i = 0; i < kChunkRows / 8; ++i) {
      const int chunk = group * (kChunkRows / 8) + i;
      *reinterpret_cast<uint4*>(row + ((chunk ^ key % 8) << 4)) =
          make_uint4(packed[4 * i], packed[4 * i + 1], packed[4 * i + 2], packed[4 * i + 3]);
    }
  }
};

// -------------------------------------------------------------------------------------------------
// reduce: one warpgroup, a thread a d of dQ and a key of dK, dV

template <int kGroup, DqAccum kDqAccum>
struct Reduce {
  using S = Slots<kGroup>;
  static constexpr bool kFp32 = kDqAccum == DqAccum::kFp32;
  static constexpr int kWords = kTileRows / (kFp32 ? 1 : 2);  // of a lane of dQ, as in the pool
  static constexpr int kDqLoads = kTileRows / 32;

  const MainParams& main;
  SharedStorage& shared;
  const int lane;            // of tensor memory
  const uint32_t tmem_lane;  // the warp's quarter of tensor memory
  const uint64_t policy;

  __device__ __forceinline__ void run(TaskWalk walk) const {
    uint32_t segment_phase = 0;
    for (; !walk.done(); walk.advance()) {
      if (walk.segment_end()) {
        const int64_t block_head =
            int64_t{walk.header.workspace_block} * main.num_kv_heads + walk.header.index_head;
        flush(main.dv_pool, block_head, kTmemDv, &shared.bar_dv_full, segment_phase);
        flush(main.dk_pool, block_head, kTmemDk, &shared.bar_dk_full, segment_phase);
        segment_phase ^= 1;
      }
      mbarrier_wait_tmem(&shared.bar_dq_full, walk.phase());
      float x[kDqLoads][32];
      load_dq(x);
      tmem_fence_before_arrive();
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared.bar_dq_empty);
      int32_t tokens[S::kPerTask];  // read now: the loads of dQ left no registers
      load_tokens<kGroup>(tokens, main, walk.task);
      uint32_t dq[kWords];
      convert_dq(dq, x);
      add_dq(dq, tokens, walk.header.index_head);
    }
  }

  // 128 rows of a d: all loads in flight at once, for mma waits to overwrite them.
  __device__ __forceinline__ void load_dq(float (&x)[kDqLoads][32]) const {
    uint32_t loaded[kDqLoads][32];
#pragma unroll
    for (int i = 0; i < kDqLoads; ++i) tmem_load(loaded[i], tmem_lane + kTmemDq + 32 * i);
    tmem_wait_loads(loaded, x);
  }

  // To the pool's type.
  static __device__ __forceinline__ void convert_dq(uint32_t (&dq)[kWords],
                                                    const float (&x)[kDqLoads][32]) {
#pragma unroll
    for (int row = 0; row < kTileRows; ++row) {
      if constexpr (kFp32) {
        dq[row] = __float_as_uint(x[row / 32][row % 32]);
      } else if (row % 2 == 0) {
        dq[row / 2] = pack(x[row / 32][row % 32], x[row / 32][row % 32 + 1]);
      }
    }
  }

  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    if constexpr (kDqAccum == DqAccum::kBf16) {
      return pack_bf16x2(lo, hi);
    } else {
      return pack_f16x2(lo, hi);
    }
  }

  // Adds to the pool (PoolLayout::kTmem): 16 bytes of heads at a time.
  __device__ __forceinline__ void add_dq(const uint32_t (&dq)[kWords],
                                         const int32_t (&tokens)[S::kPerTask],
                                         int index_head) const {
    constexpr int kElementBytes = kFp32 ? 4 : 2;
    constexpr int kWordsPerSlot = kWords / S::kPerTask;
    uint8_t* pool = static_cast<uint8_t*>(main.dq_pool) +
                    index_head * (kGroup * kHeadDim * kElementBytes) + lane * 16;
#pragma unroll
    for (int slot = 0; slot < S::kPerTask; ++slot) {
      if (slot > 0 && tokens[slot] < 0) continue;  // the first is always filled
      uint8_t* target = pool + int64_t{tokens[slot]} * main.num_heads * (kHeadDim * kElementBytes);
#pragma unroll
      for (int i = 0; i < kWordsPerSlot; i += 4) {
        const int x = slot * kWordsPerSlot + i;
        red_add_16_bytes<kDqAccum>(target + i / 4 * (kHeadDim * 16),
                                   {dq[x], dq[x + 1], dq[x + 2], dq[x + 3]}, policy);
      }
    }
  }

  // Adds dK or dV of 128 keys to the pool (PoolLayout::kTmem), four d at a time.
  __device__ __forceinline__ void flush(float* pool, int64_t block_head, uint32_t column,
                                        uint64_t* bar_full, uint32_t phase) const {
    mbarrier_wait_tmem(bar_full, phase);
    float* target = pool + block_head * (kBlockKeys * kHeadDim) + lane * 4;
#pragma unroll
    for (int i = 0; i < kHeadDim; i += 32) {
      uint32_t loaded[32];
      float x[32];
      tmem_load(loaded, tmem_lane + column + i);
      tmem_wait_load(loaded, x);
#pragma unroll
      for (int d = 0; d < 32; d += 4) {
        red_add_v4(target + (i + d) * kBlockKeys, x[d], x[d + 1], x[d + 2], x[d + 3]);
      }
    }
  }
};

// -------------------------------------------------------------------------------------------------
// entry

__device__ __forceinline__ void init_barriers(SharedStorage& shared) {
  mbarrier_init(&shared.bar_kv_full, 1);
  mbarrier_init(&shared.bar_kv_empty, 1);
  for (int i = 0; i < kNumStages; ++i) {
    mbarrier_init(&shared.bar_rows_full[i], 2);
    mbarrier_init(&shared.bar_rows_empty[i], 1);
  }
  for (int i = 0; i < kNumHalves; ++i) {
    mbarrier_init(&shared.bar_p_full[i], kNumComputeWarps);
    mbarrier_init(&shared.bar_ds_full[i], kNumComputeWarps);
  }
  mbarrier_init(&shared.bar_p_empty, 1);
  for (uint64_t* bar : {&shared.bar_s_full, &shared.bar_dp_full, &shared.bar_dq_full,
                        &shared.bar_dv_full, &shared.bar_dk_full}) {
    mbarrier_init(bar, 1);
  }
  mbarrier_init(&shared.bar_dq_empty, kNumReduceWarps);
  fence_mbarrier_init();
}

template <int kGroup, DqAccum kDqAccum>
__global__ void __launch_bounds__(kNumThreads, 1)
    backward_kernel(const __grid_constant__ TmaKernelParams params) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);

  const TaskInterval tasks = cta_tasks(params.main);
  if (tasks.begin == tasks.end) return;

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform for the compiler too
  const WarpRole role = warp_role(warp);
  cute::TMEM::Allocator1Sm allocator;
  if (role == WarpRole::kMma) {
    if (cute::elect_one_sync()) init_barriers(shared);
    __syncwarp();
    allocator.allocate(kTmemColumns, &shared.tmem_base);  // the SM has no other CTA to wait for it
  }
  __syncthreads();
  const uint32_t tmem = shared.tmem_base;
  const uint32_t tmem_lane = tmem + (warp % 4 * 32 << 16);
  const int lane = threadIdx.x % 128;

  if (role >= WarpRole::kCompute) {  // comparisons, not a jump table
    warpgroup_acquire_registers<kComputeRegisters>();
    const int group = (warp - kFirstComputeWarp) / 4;
    Compute<kGroup>{shared, params.main.scale_log2, group, lane, tmem_lane}.run(
        cta_tasks(params.main));
  } else if (role >= WarpRole::kReduce) {
    warpgroup_acquire_registers<kReduceRegisters>();
    Reduce<kGroup, kDqAccum>{params.main, shared, lane, tmem_lane, l2_evict_last_policy()}.run(
        TaskWalk(params.main));
  } else {
    warpgroup_release_registers<kIssueRegisters>();
    if (role == WarpRole::kLoad) {
      if (cute::elect_one_sync()) load<kGroup>(params, shared, TaskWalk(params.main));
    } else if (role == WarpRole::kMma) {
      if (cute::elect_one_sync()) Mma{shared, tmem}.run(TaskWalk(params.main));
    } else if (role == WarpRole::kScalar) {
      load_stats<kGroup>(params.main, shared, TaskWalk(params.main));
    }
    __syncwarp();
  }

  // Tensor memory is freed once nobody uses it; what each role did last, it has handed over.
  __syncthreads();
  tmem_fence_after_wait();
  if (warp_role(threadIdx.x / 32) == WarpRole::kMma) allocator.free(tmem, kTmemColumns);
}

}  // namespace msa::sm100
