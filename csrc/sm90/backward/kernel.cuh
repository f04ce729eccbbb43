// The MSA backward on Hopper: dQ, dK and dV of every task, five GEMMs a 64-row step.
//
//   S^T = K Q^T      P^T = exp2(S^T * scale * log2e - lse * log2e), 0 where not visible
//   dP^T = V dO^T    dS^T = P^T * (dP^T - delta)
//   dV += P^T dO     dK += dS^T Q     dQ = dS K
//
// A consumer warpgroup owns 64 of the block's 128 keys: its S^T, dP^T fragments turn in place into
// the register operands P^T, dS^T of dV and dK, whose accumulators live in registers for a whole
// segment. dS goes through shared memory, where both warpgroups meet; each then computes 64 columns
// of dQ, one step late, so that its GEMM runs beside the next step's exponentials.
//
// | barrier     | stages | producer -> consumer          | count / bytes                        |
// | bar_kv      | 1      | TMA -> consumers -> producer  | 64 KiB; empty: 8 warps               |
// | bar_step    | 3      | TMA -> consumers -> producer  | Slots::kStageBytes; empty: 8 warps   |
// | bar_ds_full | 2      | consumer warps -> both groups | 8 warps; no empty barrier, see below |
//
// A warpgroup's tensor-core queue in a step n, and what its threads do meanwhile:
//   S(n) | dP(n)   | dV(n)         | dQ(n-1) | dK(n)
//        | exp2(n) | dS(n), store  |         | stage dQ(n-1), fence, hand over dS(n), add dQ(n-1)
// The queue runs dry between dK(n) and S(n+1), and whenever exp2 outlasts dP: the other warpgroup
// fills in.
//
// ds[n % 2] is free for step n once both warpgroups have finished dQ(n-2): each waits for its
// dQ(n-2) before it arrives on bar_ds_full(n-1), and each has waited on bar_ds_full(n-1) before it
// stores dS(n).
#pragma once

#include "device/ptx.cuh"
#include "device/ptx_sm90.cuh"
#include "device/task.cuh"
#include "device/vector.cuh"
#include "sm90/backward/config.cuh"

namespace msa::sm90 {

// What an empty slot's row stats are copied from.
alignas(16) __device__ const float zero_row_stats[16] = {};

// -------------------------------------------------------------------------------------------------
// producer

// One warp. Lane s < kPerStep serves slot s of the step.
template <int kGroup, DqAccum kDqAccum>
__device__ void produce(const TmaKernelParams& params, SharedStorage<kDqAccum>& shared,
                        TaskInterval tasks) {
  using S = Slots<kGroup>;
  const MainParams& main = params.main;
  const int lane = threadIdx.x % 32;
  PipelineState<kNumStages> stage;
  uint32_t kv_phase = 0;

  auto header_of = [&](int task) { return load_header(main.task_headers + task); };
  TaskHeader header = header_of(tasks.begin);
  bool segment_begin = true;
  for (int task = tasks.begin; task < tasks.end; ++task) {
    const int32_t* tokens = main.task_tokens + int64_t{task} * S::kPerTask;
    const int num_steps = header.num_queries > S::kPerStep ? 2 : 1;
    const int token_of_lane = lane < S::kPerTask ? __ldg(tokens + lane) : -1;
    const bool walk_end = task + 1 == tasks.end;
    const TaskHeader next = walk_end ? header : header_of(task + 1);
    const bool segment_end = walk_end || !same_segment(next, header);

    if (segment_begin) {
      mbarrier_wait(&shared.bar_kv_empty, kv_phase ^ 1);
      kv_phase ^= 1;
      if (lane == 0) {
        mbarrier_arrive_expect_tx(&shared.bar_kv_full, 2 * kKvBytes);
        load_block(shared.k, &params.k, &shared.bar_kv_full, header);
        load_block(shared.v, &params.v, &shared.bar_kv_full, header);
      }
    }
    const int offset = key_offset(header);
    const bool diagonal = is_diagonal(__shfl_sync(~0u, token_of_lane, 0), offset);
    for (int step = 0; step < num_steps; ++step) {
      const int slot = lane % S::kPerStep;
      const int token = __shfl_sync(~0u, token_of_lane, step * S::kPerStep + slot);
      uint64_t* full = &shared.bar_step_full[stage.index];
      mbarrier_wait(&shared.bar_step_empty[stage.index], stage.phase ^ 1);
      StepInfo& info = shared.step[stage.index];
      if (lane < S::kPerStep) {
        info.token[slot] = token;
        info.last_key[slot] = token + offset;
      }
      if (lane == 0) {
        const bool last_step = step + 1 == num_steps;
        info.index_head = header.index_head;
        info.workspace_block = header.workspace_block;
        info.flags = (segment_end && last_step ? kSegmentEnd : 0) |
                     (walk_end && last_step ? kWalkEnd : 0) | (diagonal ? kDiagonal : 0);
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive_expect_tx(full, S::kStageBytes);
      __syncwarp();
      if (lane < S::kPerStep) {
        load_slot<kGroup>(shared.q[stage.index] + slot * S::kBytes, &params.q, full,
                          header.index_head, token);
        load_slot<kGroup>(shared.grad_out[stage.index] + slot * S::kBytes, &params.grad_out, full,
                          header.index_head, token);
        const int64_t row = int64_t{token} * main.num_heads + header.index_head * kGroup;
        bulk_load(shared.neg_lse_log2[stage.index] + slot * kGroup,
                  token < 0 ? zero_row_stats : main.neg_lse_log2 + row, S::kStatsBytes, full);
        bulk_load(shared.delta[stage.index] + slot * kGroup,
                  token < 0 ? zero_row_stats : main.delta + row, S::kStatsBytes, full);
      }
      stage.advance();
    }
    segment_begin = segment_end;
    header = next;
  }
}

// -------------------------------------------------------------------------------------------------
// consumer

template <int kGroup, DqAccum kDqAccum>
struct Consumer {
  using S = Slots<kGroup>;
  using Storage = SharedStorage<kDqAccum>;

  const MainParams& main;
  Storage& shared;
  const int warpgroup;  // 0 or 1: its 64 keys, its 64 columns of dQ
  const int warp;       // in the warpgroup
  const int lane;
  PipelineState<kNumStages> stage;
  uint32_t num_steps = 0;  // done by this CTA; dS of step n is in ds[n % 2]
  uint32_t kv_phase = 0;
  float dk[64];
  float dv[64];
  int32_t dq_tokens[S::kPerWarp];  // of the warp's 16 rows of dQ, one step late

  __device__ __forceinline__ void run() {
    uint32_t flags;
    do {
      flags = step<true>();
      while (!(flags & kSegmentEnd)) {
        release_step();
        flags = step<false>();
      }
      finish_segment();
      release_step();
    } while (!(flags & kWalkEnd));
    // Shared memory must outlive the reads of the bulk reductions.
    if (lane == 0) bulk_wait_read<0>();
  }

  // S, P, dP, dS, dV, dK of a step, and dQ of the segment's step before.
  template <bool kFirst>
  __device__ __forceinline__ uint32_t step() {
    mbarrier_wait(&shared.bar_step_full[stage.index], stage.phase);
    const StepInfo& info = shared.step[stage.index];
    const uint32_t flags = info.flags;
    if constexpr (kFirst) {
      mbarrier_wait(&shared.bar_kv_full, kv_phase);
      kv_phase ^= 1;
    }

    float s[32];
    float dp[32];
    const uint32_t q = smem_address(shared.q[stage.index]);
    const uint32_t grad_out = smem_address(shared.grad_out[stage.index]);
    gemm_keys_by_rows(s, smem_address(shared.k), q);
    wgmma_commit();
    gemm_keys_by_rows(dp, smem_address(shared.v), grad_out);
    wgmma_commit();

    float2 stats[8];
    load_stats(stats, shared.neg_lse_log2[stage.index]);
    wgmma_wait<1>();
    softmax(s, stats, flags, info);
    uint32_t p_operand[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) p_operand[i] = pack_bf16x2(s[2 * i], s[2 * i + 1]);
    keep(p_operand);
    wgmma_fence();
    gemm_keys_by_dims<!kFirst>(dv, p_operand, grad_out);
    wgmma_commit();

    load_stats(stats, shared.delta[stage.index]);
    wgmma_wait<1>();
    keep(dp);
    uint32_t ds_operand[16];
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const float2 delta = stats[i / 4];
      ds_operand[i / 2] = pack_bf16x2(s[i] * (dp[i] - delta.x), s[i + 1] * (dp[i + 1] - delta.y));
    }
    keep(ds_operand);
    if constexpr (!kFirst) wait_ds();
    store_ds(ds_operand);
    float dq[32];
    if constexpr (!kFirst) issue_dq(dq);
    wgmma_fence();
    gemm_keys_by_dims<!kFirst>(dk, ds_operand, q);
    wgmma_commit();

    if constexpr (!kFirst) {
      wgmma_wait<1>();
      keep(dq);
      stage_dq(dq);
    }
    fence_proxy_async();  // the one fence of a step: it waits for every store before it
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(&shared.bar_ds_full[num_steps % 2]);
      if constexpr (!kFirst) reduce_dq(info.index_head);
    }
#pragma unroll
    for (int i = 0; i < S::kPerWarp; ++i) dq_tokens[i] = info.token[warp * S::kPerWarp + i];
    wgmma_wait<0>();
    keep(dk);
    keep(dv);
    ++num_steps;
    return flags;
  }

  // dQ of the segment's last step, then dK and dV into their pools.
  __device__ __forceinline__ void finish_segment() {
    float dq[32];
    wait_ds();
    issue_dq(dq);
    wgmma_wait<0>();
    keep(dq);
    keep(dk);
    keep(dv);
    stage_dq(dq);
    fence_proxy_async();
    __syncwarp();
    const StepInfo& info = shared.step[stage.index];
    if (lane == 0) {
      mbarrier_arrive(&shared.bar_kv_empty);
      reduce_dq(info.index_head);
    }
    const int64_t block_head = int64_t{info.workspace_block} * main.num_kv_heads + info.index_head;
    flush(main.dk_pool, block_head, dk);
    flush(main.dv_pool, block_head, dv);
  }

  // What is computed from the result is computed where it is used: a descriptor kept over the loop
  // spills.
  static __device__ __forceinline__ int recomputed(int x) {
    asm volatile("" : "+r"(x));
    return x;
  }

  // acc[64 keys, 64 rows] = keys[64, 128 d] * rows[64, 128 d]^T
  __device__ __forceinline__ void gemm_keys_by_rows(float (&acc)[32], uint32_t keys,
                                                    uint32_t rows) {
    const uint64_t a =
        smem_descriptor(keys + recomputed(warpgroup) * kConsumerKeys * 128, 0, kAtomBytes);
    const uint64_t b = smem_descriptor(rows, 0, kRowGroupBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {  // 16 d each
      const uint32_t in_half = k % 4 * 32;
      wgmma_m64n64k16_ss<Major::kK, Major::kK>(acc, advance(a, k / 4 * kKvHalfBytes + in_half),
                                               advance(b, k / 4 * kAtomBytes + in_half), k > 0);
    }
  }

  // acc[64 keys, 128 d] = or += operand[64 keys, 64 rows] * rows[64, 128 d]
  template <bool kAccumulate>
  __device__ __forceinline__ void gemm_keys_by_dims(float (&acc)[64], const uint32_t (&operand)[16],
                                                    uint32_t rows) {
    const uint64_t b = smem_descriptor(rows, kAtomBytes, kRowGroupBytes);
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // 16 rows each
      wgmma_m64n128k16_rs<Major::kMn>(acc, operand[4 * k], operand[4 * k + 1], operand[4 * k + 2],
                                      operand[4 * k + 3], advance(b, k * 2 * kRowGroupBytes),
                                      kAccumulate || k > 0);
    }
  }

  // Until both warpgroups have stored the dS of the step before.
  __device__ __forceinline__ void wait_ds() {
    const uint32_t n = num_steps - 1;
    mbarrier_wait(&shared.bar_ds_full[n % 2], n / 2 % 2);
  }

  // dq[64 rows, 64 of this warpgroup's d] = dS[128 keys, 64 rows]^T * K[128 keys, 64 d], of the
  // last stored dS.
  __device__ __forceinline__ void issue_dq(float (&dq)[32]) {
    const uint64_t a = smem_descriptor(smem_address(shared.ds[(num_steps - 1) % 2]), 0, kAtomBytes);
    const uint64_t b = smem_descriptor(
        smem_address(shared.k) + recomputed(warpgroup) * kKvHalfBytes, 0, kAtomBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {  // 16 keys each
      wgmma_m64n64k16_ss<Major::kMn, Major::kMn>(dq, advance(a, k * 2 * kAtomBytes),
                                                 advance(b, k * 2 * kAtomBytes), k > 0);
    }
    wgmma_commit();
  }

  // The stage's tiles, stats and info have been read by this warp.
  __device__ __forceinline__ void release_step() {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.bar_step_empty[stage.index]);
    stage.advance();
  }

  // Row statistics of rows 8c + 2(lane % 4) + {0, 1}.
  __device__ __forceinline__ void load_stats(float2 (&stats)[8], const float* rows) {
#pragma unroll
    for (int c = 0; c < 8; ++c) stats[c] = reinterpret_cast<const float2*>(rows)[4 * c + lane % 4];
  }

  // S^T -> P^T in place. Element 4c + 2r + j: row 8c + 2(lane % 4) + j, key 16 warp + lane/4 + 8r
  // of ours.
  __device__ __forceinline__ void softmax(float (&s)[32], const float2 (&neg_lse_log2)[8],
                                          uint32_t flags, const StepInfo& info) {
    keep(s);
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      s[i] = exp2_approx(fmaf(s[i], main.scale_log2, neg_lse_log2[i / 4].x));
      s[i + 1] = exp2_approx(fmaf(s[i + 1], main.scale_log2, neg_lse_log2[i / 4].y));
    }
    if (flags & kDiagonal) {
      const int key = warpgroup * kConsumerKeys + warp * 16 + lane / 4;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const int last_key = info.last_key[8 * c / kGroup];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (key + 8 * r > last_key) s[4 * c + 2 * r] = s[4 * c + 2 * r + 1] = 0.0f;
        }
      }
    }
  }

  // dS^T fragments -> ds[key][row], 16 bytes of 8 rows swizzled by the key.
  __device__ __forceinline__ void store_ds(const uint32_t (&operand)[16]) {
    const int key = warpgroup * kConsumerKeys + warp * 16 + lane % 16;
    const uint32_t row = smem_address(shared.ds[num_steps % 2]) + key * 128;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t chunk = 2 * k + lane / 16;
      stmatrix_x4(row + ((chunk ^ (key % 8)) << 4), operand[4 * k], operand[4 * k + 1],
                  operand[4 * k + 2], operand[4 * k + 3]);
    }
  }

  // This warp's dQ -> its staging buffer, in the pool's order (PoolLayout::kWgmma).
  __device__ __forceinline__ void stage_dq(const float (&dq)[32]) {
    uint8_t* staging = shared.dq[warpgroup * 4 + warp];
    if (lane == 0) bulk_wait_read<0>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (kGroup == 16) {  // a chunk of 8 d: of both our rows, 8 heads apart
        store_dq(staging, i * 32 + lane, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
      } else {  // of one row, which is a token of its own: two chunks
        const int x = i % 4 * 8 + i / 4 * 2;
        store_dq(staging, i * 32 + lane, dq[x], dq[x + 1], dq[x + 4], dq[x + 5]);
      }
    }
  }

  // One lane: adds the staging buffer to the rows of the tokens it belongs to.
  __device__ __forceinline__ void reduce_dq(int index_head) {
    constexpr uint32_t kBytes = kGroup * kConsumerDqDims * kDqElementBytes<kDqAccum>;  // a token's
    const uint8_t* staging = shared.dq[warpgroup * 4 + warp];
#pragma unroll
    for (int i = 0; i < S::kPerWarp; ++i) {
      if (dq_tokens[i] < 0) continue;
      const int64_t row = int64_t{dq_tokens[i]} * main.num_kv_heads + index_head;
      bulk_reduce_add<kDqAccum>(
          static_cast<uint8_t*>(main.dq_pool) + (row * 2 + warpgroup) * kBytes,
          staging + i * kBytes, kBytes);
    }
    bulk_commit();
  }

  static __device__ __forceinline__ void store_dq(uint8_t* staging, int index, float x0, float x1,
                                                  float x2, float x3) {
    if constexpr (kDqAccum == DqAccum::kFp32) {
      reinterpret_cast<float4*>(staging)[index] = make_float4(x0, x1, x2, x3);
    } else {
      reinterpret_cast<uint2*>(staging)[index] =
          make_uint2(pack_bf16x2(x0, x1), pack_bf16x2(x2, x3));
    }
  }

  // Adds 64 keys x 128 d to the pool (PoolLayout::kWgmma).
  __device__ __forceinline__ void flush(float* pool, int64_t block_head, float (&acc)[64]) {
    constexpr int kWarpElements = 16 * kHeadDim;
    float* base = pool + block_head * (kBlockKeys * kHeadDim) +
                  (warpgroup * 4 + warp) * kWarpElements + lane * 4;
#pragma unroll
    for (int c = 0; c < 16; ++c) {
      red_add_v4(base + c * (32 * 4), acc[4 * c], acc[4 * c + 1], acc[4 * c + 2], acc[4 * c + 3]);
    }
  }
};

// -------------------------------------------------------------------------------------------------
// entry

template <int kGroup, DqAccum kDqAccum>
__global__ void __launch_bounds__(kNumThreads, 1)
    backward_kernel(const __grid_constant__ TmaKernelParams params) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<kDqAccum>*>(shared_bytes);

  const TaskInterval tasks = cta_interval(params.main.descriptor->walk, blockIdx.x);
  if (tasks.begin == tasks.end) return;

  if (threadIdx.x == 0) {
    mbarrier_init(&shared.bar_kv_full, 1);
    mbarrier_init(&shared.bar_kv_empty, kNumConsumerWarps);
    for (int i = 0; i < kNumStages; ++i) {
      mbarrier_init(&shared.bar_step_full[i], 1);
      mbarrier_init(&shared.bar_step_empty[i], kNumConsumerWarps);
    }
    for (int i = 0; i < 2; ++i) mbarrier_init(&shared.bar_ds_full[i], kNumConsumerWarps);
    fence_mbarrier_init();
  }
  __syncthreads();

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform for the compiler too
  if (warp < 4) {
    warpgroup_release_registers<kProducerRegisters>();
    if (warp == 0) produce<kGroup>(params, shared, tasks);
  } else {
    warpgroup_acquire_registers<kConsumerRegisters>();
    Consumer<kGroup, kDqAccum>{params.main, shared, warp / 4 - 1, warp % 4,
                               static_cast<int>(threadIdx.x % 32)}
        .run();
  }
}

}  // namespace msa::sm90
