// The forward written for reading: a CTA owns one token and KV head, and takes the chosen blocks in
// the order of their slots with a running maximum.
//
// Thread i owns key i of the block while it computes scores, and column i of d while it sums V. A
// warp reduces the scores of every fourth head. Only keys that the token sees are read: what stands
// behind them, NaN included, is another document's.
#pragma once

#include "device/layout.cuh"
#include "device/vector.cuh"

namespace msa::simple {

constexpr int kForwardThreads = 128;
static_assert(kForwardThreads == kBlockKeys && kForwardThreads == kHeadDim);

template <int kGroup>
struct ForwardStorage {
  float q[kGroup][kHeadDim];
  float p[kGroup][kBlockKeys];  // scores in units of log2, then exponentials
  float row_max[kGroup];        // running, in units of log2
  float row_sum[kGroup];        // of exponentials relative to it
  float rescale[kGroup];        // of what was summed before this block
};

// Whether slot `slot` names a block that has a visible key and no earlier slot has named.
__device__ inline bool is_chosen(const int32_t* ids, int slot, int num_keys) {
  const int id = ids[slot];
  if (id < 0 || id >= ceil_div(num_keys, kBlockKeys)) return false;
  for (int i = 0; i < slot; ++i) {
    if (ids[i] == id) return false;
  }
  return true;
}

template <int kGroup>
__device__ void write_scores(const ForwardParams& params, ForwardStorage<kGroup>& shared,
                             int64_t key_row, int kv_head, bool visible) {
  float s[kGroup] = {};
  if (visible) {
    const __nv_bfloat16* key =
        params.k.data + key_row * params.k.row_stride + kv_head * params.k.head_stride;
    for (int d = 0; d < kHeadDim; d += 8) {
      float x[8];
      unpack_bf16x8(__ldg(reinterpret_cast<const uint4*>(key + d)), x);
#pragma unroll
      for (int head = 0; head < kGroup; ++head) {
#pragma unroll
        for (int i = 0; i < 8; ++i) s[head] = fmaf(shared.q[head][d + i], x[i], s[head]);
      }
    }
  }
#pragma unroll
  for (int head = 0; head < kGroup; ++head) {
    shared.p[head][threadIdx.x] = visible ? s[head] * params.scale_log2 : -INFINITY;
  }
}

// Scores -> exponentials relative to the new running maximum, of every fourth head from the warp's
// own on.
template <int kGroup>
__device__ void softmax(ForwardStorage<kGroup>& shared) {
  const int lane = threadIdx.x % 32;
  for (int head = threadIdx.x / 32; head < kGroup; head += kForwardThreads / 32) {
    float* row = shared.p[head];
    float maximum = shared.row_max[head];
    const float before = maximum;
    for (int key = lane; key < kBlockKeys; key += 32) maximum = fmaxf(maximum, row[key]);
    for (int offset = 16; offset > 0; offset /= 2) {
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, offset));
    }
    const float base = maximum == -INFINITY ? 0.0f : maximum;
    float sum = 0.0f;
    for (int key = lane; key < kBlockKeys; key += 32) {
      row[key] = exp2f(row[key] - base);
      sum += row[key];
    }
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    __syncwarp();
    if (lane == 0) {
      const float rescale = exp2f(before - base);
      shared.row_max[head] = maximum;
      shared.row_sum[head] = shared.row_sum[head] * rescale + sum;
      shared.rescale[head] = rescale;
    }
  }
}

template <int kGroup>
__global__ void __launch_bounds__(kForwardThreads)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  __shared__ ForwardStorage<kGroup> shared;
  const int own = threadIdx.x;
  const int64_t token = blockIdx.x / params.num_kv_heads;
  const int kv_head = blockIdx.x % params.num_kv_heads;
  const QueryPlace place = locate_query(params.layout, static_cast<int32_t>(token));
  const int64_t first_row = token * params.num_heads + kv_head * kGroup;
  for (int head = 0; head < kGroup; ++head) {
    const __nv_bfloat16* q = params.q.data + token * params.q.row_stride +
                             (kv_head * kGroup + head) * params.q.head_stride;
    shared.q[head][own] = place.num_keys > 0 ? __bfloat162float(q[own]) : 0.0f;
  }
  if (own < kGroup) {
    shared.row_max[own] = -INFINITY;
    shared.row_sum[own] = 0.0f;
  }
  __syncthreads();

  const int32_t* ids =
      params.topk + (kv_head * int64_t{params.layout.num_tokens} + token) * params.top_k;
  float acc[kGroup] = {};
  for (int slot = 0; slot < params.top_k; ++slot) {
    if (place.num_keys == 0 || !is_chosen(ids, slot, place.num_keys)) continue;
    const int first = ids[slot] * kBlockKeys;
    const int count = min(place.num_keys - first, kBlockKeys);
    const int64_t key_row = int64_t{place.first_key} + first;
    write_scores<kGroup>(params, shared, key_row + own, kv_head, own < count);
    __syncthreads();
    softmax<kGroup>(shared);
    __syncthreads();
#pragma unroll
    for (int head = 0; head < kGroup; ++head) acc[head] *= shared.rescale[head];
    for (int key = 0; key < count; ++key) {
      const float v = __bfloat162float(params.v.data[(key_row + key) * params.v.row_stride +
                                                     kv_head * params.v.head_stride + own]);
#pragma unroll
      for (int head = 0; head < kGroup; ++head) {
        acc[head] = fmaf(shared.p[head][key], v, acc[head]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int head = 0; head < kGroup; ++head) {
    const float sum = shared.row_sum[head];
    params.out[(first_row + head) * kHeadDim + own] =
        __float2bfloat16_rn(sum == 0.0f ? 0.0f : acc[head] / sum);
  }
  if (own < kGroup) {
    const float sum = shared.row_sum[own];
    params.lse[first_row + own] =
        sum == 0.0f ? -INFINITY : (shared.row_max[own] + log2f(sum)) / kLog2E;
  }
}

}  // namespace msa::simple
