// The main kernel written for reading: a CTA takes tasks in turn and each of a task's rows one by
// one.
//
// Thread i owns key i of the block while it computes P and dS, and column i of d while it computes
// gradients. K, V and the block's dK, dV of one task lie in shared memory.
#pragma once

#include "device/task.cuh"

namespace msa::simple {

constexpr int kThreads = 128;
static_assert(kThreads == kBlockKeys && kThreads == kHeadDim);
// Two more than the row: consecutive keys then start in consecutive banks.
constexpr int kPaddedDim = kHeadDim + 2;

struct SharedStorage {
  __nv_bfloat16 k[kBlockKeys][kPaddedDim];
  __nv_bfloat16 v[kBlockKeys][kPaddedDim];
  float dk[kBlockKeys][kHeadDim];
  float dv[kBlockKeys][kHeadDim];
  float q[kHeadDim];
  float grad_out[kHeadDim];
  float p[kBlockKeys];
  float ds[kBlockKeys];
};

__device__ void add_dq(float* pool, int64_t offset, float x) { atomicAdd(pool + offset, x); }
__device__ void add_dq(__nv_bfloat16* pool, int64_t offset, float x) {
  atomicAdd(pool + offset, __float2bfloat16_rn(x));
}
__device__ void add_dq(__half* pool, int64_t offset, float x) {
  atomicAdd(pool + offset, __float2half_rn(x));
}

__device__ float row_element(const StridedOperand& operand, int64_t row, int head, int d) {
  return __bfloat162float(operand.data[row * operand.row_stride + head * operand.head_stride + d]);
}

template <class DqElement>
__device__ void run_task(const MainParams& params, SharedStorage& shared, int64_t task) {
  const TaskHeader header = load_header(params.task_headers + task);
  const int64_t first_key = int64_t{header.workspace_block} * kBlockKeys;
  const int own = threadIdx.x;
  for (int i = 0; i < kBlockKeys; ++i) {
    shared.k[i][own] = params.k.data[(first_key + i) * params.k.row_stride +
                                     header.index_head * params.k.head_stride + own];
    shared.v[i][own] = params.v.data[(first_key + i) * params.v.row_stride +
                                     header.index_head * params.v.head_stride + own];
    shared.dk[i][own] = shared.dv[i][own] = 0.0f;
  }

  const int32_t* tokens = params.task_tokens + task * slots_per_task(params.group);
  for (int slot = 0; slot < header.num_queries; ++slot) {
    const int64_t token = tokens[slot];
    const bool visible = first_key + own <= token + header.position_offset;
    for (int i = 0; i < params.group; ++i) {
      const int head = header.index_head * params.group + i;
      __syncthreads();
      shared.q[own] = row_element(params.q, token, head, own);
      shared.grad_out[own] = row_element(params.grad_out, token, head, own);
      __syncthreads();

      float s = 0.0f;
      float dp = 0.0f;
      for (int d = 0; d < kHeadDim; ++d) {
        s = fmaf(shared.q[d], __bfloat162float(shared.k[own][d]), s);
        dp = fmaf(shared.grad_out[d], __bfloat162float(shared.v[own][d]), dp);
      }
      const int64_t row = token * params.num_heads + head;
      const float p = visible ? exp2f(fmaf(s, params.scale_log2, params.neg_lse_log2[row])) : 0.0f;
      shared.p[own] = p;
      shared.ds[own] = p * (dp - params.delta[row]);
      __syncthreads();

      float dq = 0.0f;
      for (int key = 0; key < kBlockKeys; ++key) {
        dq = fmaf(shared.ds[key], __bfloat162float(shared.k[key][own]), dq);
        shared.dk[key][own] = fmaf(shared.ds[key], shared.q[own], shared.dk[key][own]);
        shared.dv[key][own] = fmaf(shared.p[key], shared.grad_out[own], shared.dv[key][own]);
      }
      add_dq(static_cast<DqElement*>(params.dq_pool),
             (token * params.num_heads + head) * kHeadDim + own, dq);
    }
  }
  for (int key = 0; key < kBlockKeys; ++key) {
    const int64_t row = (first_key + key) * params.num_kv_heads + header.index_head;
    const int64_t offset = row * kHeadDim + own;
    atomicAdd(params.dk_pool + offset, shared.dk[key][own]);
    atomicAdd(params.dv_pool + offset, shared.dv[key][own]);
  }
  __syncthreads();
}

template <class DqElement>
__global__ void __launch_bounds__(kThreads)
    simple_kernel(const __grid_constant__ MainParams params) {
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int64_t num_tasks = params.descriptor->walk.num_tasks;
  for (int64_t task = blockIdx.x; task < num_tasks; task += gridDim.x) {
    run_task<DqElement>(params, shared, task);
  }
}

}  // namespace msa::simple
