// The backward's launches: task build beside delta and clear, then main, then postprocess.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "host/workspace.h"
#include "params.h"

namespace msa {

struct BackwardSizes {
  int64_t num_tokens;      // T
  int num_heads;           // Hq
  int num_kv_heads;        // Hkv
  int64_t workspace_rows;  // W
  int num_entries;
  int num_rows;  // CSR rows of an index head
  int64_t edge_capacity;
  int64_t work_capacity;

  int group() const { return num_heads / num_kv_heads; }
  // Tasks of all items: a task an edge-slot-full of each item, and a partial one.
  int64_t task_capacity() const {
    return num_kv_heads * edge_capacity / slots_per_task(group()) + work_capacity;
  }
};

// Sections of the workspace, in order.
enum class BackwardSection {
  kDescriptor,
  kNegLse,
  kDelta,
  kSortBuffer0,
  kSortBuffer1,
  kSortHistogram,
  kTaskHeaders,
  kTaskTokens,
  kDqPool,
  kDkPool,
  kDvPool,
};

struct BackwardArguments {
  std::string backend;
  int device;
  cudaStream_t stream;
  BackwardSizes sizes;
  StridedOperand q, grad_out, out;  // [T, Hq, 128]
  StridedOperand k, v;              // [W, Hkv, 128]
  const float* lse;                 // [T, Hq], natural log
  ScheduleParams schedule;          // the pointers; sizes are filled in
  uint8_t* workspace;               // plan_backward(...).total_bytes, 256-byte aligned
  __nv_bfloat16* dq;                // [T, Hq, 128]
  void* dk;                         // [W, Hkv, 128] BF16, or FP32 if kv_grad_fp32
  void* dv;
  bool kv_grad_fp32;
  float softmax_scale;
  DqAccum dq_accum;
  uint32_t* flags;     // [1], TaskFlags of this call
  size_t guard_bytes;  // between the workspace's sections
};

// The stages, in order; `backward` runs those in a mask of bits (1 << stage), all by default.
enum class Stage { kDelta, kClear, kTaskBuild, kMain, kPostprocess };
constexpr uint32_t kAllStages = 0x1F;

// The workspace of a call; throws std::invalid_argument where the sizes cannot be served.
WorkspacePlan plan_backward(const BackwardSizes& sizes, DqAccum dq_accum, size_t guard_bytes);

// Enqueues the backward on the stream; never synchronises. Throws std::invalid_argument or
// std::runtime_error.
void backward(const BackwardArguments& arguments, uint32_t stages = kAllStages);

}  // namespace msa
