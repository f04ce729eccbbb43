// Parameter structs shared by the host layer and every kernel: plain data, no torch, no CuTe.
// T tokens, Hq query heads, Hkv KV heads, G = Hq/Hkv, W workspace rows, D = 128. Strides in
// elements.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "topology.h"

namespace msa {

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

// How the private accumulation pools are laid out; see device/pool_layout.h.
enum class PoolLayout : int32_t {
  kRowMajor,  // dq [T, Hq, 128], dk/dv [W, Hkv, 128]
  kWgmma,     // warpgroup accumulator fragments (sm90)
  kTmem,      // one TMEM lane a key (sm100)
};

enum class DqAccum : int32_t { kBf16, kFp16, kFp32 };

// A [rows, heads, 128] operand whose last dimension is contiguous.
struct StridedOperand {
  const __nv_bfloat16* data;
  int64_t row_stride;
  int64_t head_stride;
};

// What a main kernel consumes and produces. The pools hold dQ/scale, dK/scale and dV.
struct MainParams {
  StridedOperand q;                  // [T, Hq, 128]
  StridedOperand grad_out;           // [T, Hq, 128]
  StridedOperand k;                  // [W, Hkv, 128]
  StridedOperand v;                  // [W, Hkv, 128]
  const float2* row_stats;           // [T, Hq] {-lse*log2(e), or -inf where lse = -inf; delta}
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

}  // namespace msa
