// Parameter structs shared by the host layer and every kernel: plain data, no torch, no CuTe.
// T tokens, Hq query heads, Hkv KV heads, G = Hq/Hkv, W workspace rows, D = 128. Strides in
// elements.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "topology.h"

namespace msa {

constexpr float kLog2E = 1.4426950408889634f;

// A [rows, heads, 128] operand whose last dimension is contiguous.
struct StridedOperand {
  const __nv_bfloat16* data;
  int64_t row_stride;
  int64_t head_stride;
};

// 16-byte header of a task; its query slots are task_tokens[task][0 .. 128/G).
struct TaskHeader {
  int32_t workspace_block;  // keys [128*workspace_block, +128) of the workspace
  int32_t index_head;       // = KV head
  int32_t position_offset;  // workspace position of a query = token + position_offset
  int32_t num_queries;      // filled slots, 1 .. 128/G, from slot 0 on, tokens ascending
};

// Flag bits the task build raises; see msa_ext.debug.
enum TaskFlags : uint32_t {
  kFlagWorkCountClamped = 1u << 0,  // work_count > work_capacity (non-fatal)
  kFlagTaskOverflow = 1u << 1,      // more tasks than the table holds
  kFlagBadItem = 1u << 2,           // an item's fields out of range or misaligned
  kFlagBadQueryIndex = 1u << 3,     // a query index outside its entry
  kFlagBadRowPointer = 1u << 4,     // a CSR row outside its edges
};

// Written by the task build, read by the main kernel: one a call.
struct TaskDescriptor {
  Walk walk;
  int32_t num_items;  // items used, after clamping
  uint32_t flags;     // TaskFlags
};

// The schedule as the task build reads it; see msa_ext.schedule.MSABackwardSchedule.
struct ScheduleParams {
  const int32_t* row_ptr;                    // [Hkv, num_rows + 1]
  const int32_t* q_indices;                  // [Hkv, edge_capacity]
  const int32_t* items;                      // [work_capacity, 6]
  const int32_t* work_count;                 // [1]
  const int32_t* cu_seqlens;                 // [num_entries + 1]
  const int32_t* document_workspace_starts;  // [num_entries]
  const int32_t* query_offsets;              // [num_entries], or null for zeros
  int32_t num_kv_heads;
  int32_t group;
  int32_t num_rows;
  int32_t num_entries;
  int32_t num_tokens;
  int32_t num_blocks;  // of the workspace
  int32_t work_capacity;
  int64_t edge_capacity;
};

struct TaskBuildParams {
  ScheduleParams schedule;
  uint64_t* keys[2];           // [task_capacity] each
  uint32_t* values[2];         // [task_capacity] each
  uint32_t* histogram;         // [CTAs, 256]
  TaskHeader* headers;         // [task_capacity]
  int32_t* tokens;             // [task_capacity, 128/G]
  TaskDescriptor* descriptor;  // [1]
  uint32_t* flags;             // [1], a copy of the descriptor's that outlives the workspace
  int64_t task_capacity;
  int32_t window_log2;
  int32_t num_sms;
  WalkRule walk;
};

// Memory to be zeroed: 16-byte aligned, a multiple of 16 bytes.
struct ByteRange {
  uint8_t* data;
  int64_t bytes;
};

struct DeltaParams {
  StridedOperand out;       // [T, Hq, 128]
  StridedOperand grad_out;  // [T, Hq, 128]
  const float* lse;         // [T, Hq]
  float* neg_lse_log2;      // [T, Hq], -lse * log2(e), or -inf where lse = -inf
  float* delta;             // [T, Hq], rowsum(out * grad_out), or 0 where lse = -inf
  int64_t num_tokens;
  int32_t num_heads;
  ByteRange clear[3];  // the pools
};

// Which rows of compact operands belong together; see msa_ext.attention.
struct LayoutParams {
  const int32_t* cu_seqlens;       // [num_entries + 1]
  const int32_t* cu_seqlens_k;     // [num_documents + 1]
  const int32_t* query_offsets;    // [num_entries], or null for key length - query length
  const int32_t* entry_documents;  // [num_entries], or null for 0, 1, 2, ...
  int32_t num_entries;
  int32_t num_documents;
  int32_t num_tokens;  // T
  int32_t num_keys;    // Tk
};

struct ForwardParams {
  StridedOperand q;     // [T, Hq, 128]
  StridedOperand k;     // [Tk, Hkv, 128]
  StridedOperand v;     // [Tk, Hkv, 128]
  const int32_t* topk;  // [Hkv, T, top_k], document-local block ids, -1 = empty
  __nv_bfloat16* out;   // [T, Hq, 128]
  float* lse;           // [T, Hq], natural log
  LayoutParams layout;
  float scale_log2;  // softmax_scale * log2(e)
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t group;  // 16 or 8
  int32_t top_k;  // K, 1 .. 64
};

// How the private accumulation pools are laid out; see device/pool_layout.h.
enum class PoolLayout : int32_t {
  kRowMajor,  // dq [T, Hq, 128], dk/dv [W, Hkv, 128]
  kWgmma,     // warpgroup accumulator fragments (sm90)
  kTmem,      // 16 bytes a lane of tensor memory (sm100)
};

enum class DqAccum : int32_t { kBf16, kFp16, kFp32 };

// What a main kernel consumes and produces. The pools hold dQ/scale, dK/scale and dV.
struct MainParams {
  StridedOperand q;                  // [T, Hq, 128]
  StridedOperand grad_out;           // [T, Hq, 128]
  StridedOperand k;                  // [W, Hkv, 128]
  StridedOperand v;                  // [W, Hkv, 128]
  const float* neg_lse_log2;         // [T, Hq], -inf where lse = -inf
  const float* delta;                // [T, Hq]
  const TaskDescriptor* descriptor;  // [1]
  const TaskHeader* task_headers;    // [task_capacity]
  const int32_t* task_tokens;        // [task_capacity, 128/G], -1 in empty slots
  void* dq_pool;                     // T*Hq*128 elements of dq_accum
  float* dk_pool;                    // W*Hkv*128
  float* dv_pool;                    // W*Hkv*128
  float scale_log2;                  // softmax_scale * log2(e)
  int32_t num_tokens;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t group;  // 16 or 8
  int64_t workspace_rows;
  int64_t task_capacity;
  DqAccum dq_accum;
};

// What a TMA-fed main kernel takes.
struct TmaKernelParams {
  CUtensorMap q;         // {64 d, 8 heads, 2 halves of d, Hq/8, T}, box {64, 8, 2, G/8, 1}
  CUtensorMap grad_out;  // as q
  CUtensorMap k;         // {64 d, W keys, 2 halves of d, Hkv}, box {64, 128, 2, 1}
  CUtensorMap v;         // as k
  MainParams main;
};

struct PostprocessParams {
  const void* dq_pool;   // T*Hq*128 elements of dq_accum
  const float* dk_pool;  // W*Hkv*128
  const float* dv_pool;
  __nv_bfloat16* dq;  // [T, Hq, 128]
  void* dk;           // [W, Hkv, 128], BF16 or FP32
  void* dv;
  float softmax_scale;
  int64_t num_tokens;
  int64_t workspace_rows;
  int32_t num_heads;
  int32_t num_kv_heads;
  PoolLayout layout;
  DqAccum dq_accum;
  bool kv_grad_fp32;
};

}  // namespace msa
