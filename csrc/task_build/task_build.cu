// Schedule items -> the ordered task table and its descriptor, in one cooperative launch.
//
//   expand   a warp 32 tasks of an item: checks item and queries, appends (key, value) of good tasks
//   sort     stable radix sort, 8 bits a pass, by (head, window of the first token, block, first
//            token); keys are unique, so the table depends neither on the items' order nor on the
//            order of appending
//   gather   a thread a task: header and tokens in sorted order; the walk into the descriptor
//
// Only the tasks there are get sorted: their number stays on the device.
#include <cooperative_groups.h>

#include <algorithm>

#include "device/ptx.cuh"
#include "host/error.h"
#include "task_build/launch.h"

namespace msa::task_build {
namespace {

constexpr int kWarps = kThreads / 32;

struct Item {
  int index_head;
  int row;
  int q_begin;
  int q_count;
  int entry;
  int local_block;
};

// An item's place once its fields are known to be good.
struct ItemPlace {
  const int32_t* queries;   // its entry-local query indices
  int32_t first_token;      // of the entry
  int32_t num_queries;      // of the entry
  int32_t position_offset;  // workspace position = token + position_offset
  int32_t workspace_block;
};

__device__ Item load_item(const ScheduleParams& s, int index) {
  const int32_t* x = s.items + int64_t{index} * 6;
  return {x[0], x[1], x[2], x[3], x[4], x[5]};
}

__device__ bool in_range(int64_t x, int64_t limit) { return x >= 0 && x < limit; }

// Flags of what is wrong with the item, 0 if nothing; reads nothing out of bounds.
__device__ uint32_t locate(const ScheduleParams& s, const Item& item, ItemPlace& place) {
  if (!in_range(item.index_head, s.num_kv_heads) || !in_range(item.row, s.num_rows) ||
      !in_range(item.entry, s.num_entries) || !in_range(item.local_block, s.num_blocks) ||
      item.q_begin < 0 || item.q_begin % slots_per_task(s.group) != 0 || item.q_count < 1 ||
      item.q_count > kMaxItemQueries) {
    return kFlagBadItem;
  }
  const int32_t first_token = s.cu_seqlens[item.entry];
  const int64_t end_token = s.cu_seqlens[item.entry + 1];
  const int64_t start = s.document_workspace_starts[item.entry];
  const int64_t offset = s.query_offsets == nullptr ? 0 : s.query_offsets[item.entry];
  const int64_t block = start / kBlockKeys + item.local_block;
  if (first_token < 0 || end_token < first_token || end_token > s.num_tokens || start < 0 ||
      start % kBlockKeys != 0 || !in_range(block, s.num_blocks) || offset < 0 ||
      start + offset + (end_token - first_token) > int64_t{s.num_blocks} * kBlockKeys) {
    return kFlagBadItem;
  }
  const int32_t* row_ptr = s.row_ptr + int64_t{item.index_head} * (s.num_rows + 1) + item.row;
  const int64_t row_begin = row_ptr[0];
  const int64_t row_end = row_ptr[1];
  if (row_begin < 0 || row_end > s.edge_capacity ||
      row_begin + item.q_begin + item.q_count > row_end) {
    return kFlagBadRowPointer;
  }
  place = {s.q_indices + item.index_head * s.edge_capacity + row_begin + item.q_begin, first_token,
           static_cast<int32_t>(end_token - first_token),
           static_cast<int32_t>(start + offset - first_token), static_cast<int32_t>(block)};
  return 0;
}

__device__ uint64_t sort_key(const Item& item, int32_t block, uint32_t token, const KeyBits& bits,
                             int window_log2) {
  const uint64_t window = token >> window_log2;
  uint64_t key = item.index_head;
  key = key << (bits.token - window_log2) | window;
  key = key << bits.block | static_cast<uint32_t>(block);
  return key << window_log2 | (token & ((1u << window_log2) - 1));
}

// Checks 32 tasks of an item and appends the good ones. Called by whole warps.
__device__ void expand(const TaskBuildParams& params, const KeyBits& bits, int item_idx,
                       int chunk) {
  const ScheduleParams& s = params.schedule;
  const Item item = load_item(s, item_idx);
  ItemPlace place;
  const uint32_t bad = locate(s, item, place);
  const int lane = threadIdx.x % 32;
  if (bad != 0) {
    if (chunk == 0 && lane == 0) atomicOr(&params.descriptor->flags, bad);
    return;
  }
  const int slots = slots_per_task(s.group);
  const int task = chunk * 32 + lane;
  if (chunk * 32 * slots >= item.q_count) return;
  const int begin = task * slots;
  const int end = min(begin + slots, item.q_count);
  bool good = begin < end;
  int previous = -1;
  for (int i = begin; i < end; ++i) {
    const int query = place.queries[i];
    good = good && query > previous && query < place.num_queries;
    previous = query;
  }
  if (begin < end && !good) atomicOr(&params.descriptor->flags, kFlagBadQueryIndex);

  const unsigned ballot = __ballot_sync(~0u, good);
  int first_slot = 0;
  if (lane == 0 && ballot != 0) {
    first_slot = atomicAdd(&params.descriptor->walk.num_tasks, __popc(ballot));
  }
  const int64_t slot =
      int64_t{__shfl_sync(~0u, first_slot, 0)} + __popc(ballot & ((1u << lane) - 1));
  if (!good) return;
  if (slot >= params.task_capacity) {
    atomicOr(&params.descriptor->flags, kFlagTaskOverflow);
    return;
  }
  const uint32_t token = place.first_token + place.queries[begin];
  params.keys[0][slot] = sort_key(item, place.workspace_block, token, bits, params.window_log2);
  params.values[0][slot] = static_cast<uint32_t>(item_idx) << kTaskInItemBits | task;
}

struct SortStorage {
  uint32_t counts[kWarps][kRadix];  // of a tile, by warp; then where each warp's elements go
  uint32_t partial[kThreads / kRadix][kRadix];
  uint32_t before[kThreads / kRadix][kRadix];
  uint32_t base[kRadix];  // where this CTA's next element of a digit goes
};

// This CTA's contiguous share of `count` elements.
__device__ int2 cta_share(int count) {
  const int share = ceil_div<int>(count, gridDim.x);
  const int begin = min(static_cast<int>(blockIdx.x) * share, count);
  return make_int2(begin, min(begin + share, count));
}

// storage.base[d] = elements with a smaller digit, plus those with digit d in earlier CTAs.
__device__ void place_digits(SortStorage& storage, const uint32_t* histogram) {
  constexpr int kParts = kThreads / kRadix;
  const int digit = threadIdx.x % kRadix;
  const int part = threadIdx.x / kRadix;
  uint32_t total = 0;
  uint32_t before = 0;
  for (unsigned cta = part; cta < gridDim.x; cta += kParts) {
    const uint32_t count = histogram[cta * kRadix + digit];
    total += count;
    if (cta < blockIdx.x) before += count;
  }
  storage.partial[part][digit] = total;
  storage.before[part][digit] = before;
  __syncthreads();
  if (part == 0) {
    for (int i = 1; i < kParts; ++i) {
      total += storage.partial[i][digit];
      before += storage.before[i][digit];
    }
    storage.base[digit] = total;
  }
  __syncthreads();
  // Inclusive scan over the digits.
  for (int distance = 1; distance < kRadix; distance *= 2) {
    uint32_t sum = 0;
    if (part == 0)
      sum = storage.base[digit] + (digit >= distance ? storage.base[digit - distance] : 0);
    __syncthreads();
    if (part == 0) storage.base[digit] = sum;
    __syncthreads();
  }
  if (part == 0) storage.base[digit] += before - total;
  __syncthreads();
}

// Moves this CTA's share to its sorted place, keeping the order of equal digits.
__device__ void scatter(const TaskBuildParams& params, SortStorage& storage, int2 share, int source,
                        int shift) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  for (int first = share.x; first < share.y; first += kThreads) {
    for (int i = threadIdx.x; i < kWarps * kRadix; i += kThreads) (&storage.counts[0][0])[i] = 0;
    __syncthreads();
    const int i = first + threadIdx.x;
    const bool valid = i < share.y;
    const uint64_t key = valid ? params.keys[source][i] : 0;
    const uint32_t value = valid ? params.values[source][i] : 0;
    const int digit = valid ? static_cast<int>(key >> shift) & (kRadix - 1) : kRadix;
    const unsigned peers = __match_any_sync(~0u, digit);
    const int rank = __popc(peers & ((1u << lane) - 1));
    if (valid && rank == 0) storage.counts[warp][digit] = __popc(peers);
    __syncthreads();
    if (threadIdx.x < kRadix) {
      uint32_t next = storage.base[threadIdx.x];
      for (int w = 0; w < kWarps; ++w) {
        const uint32_t count = storage.counts[w][threadIdx.x];
        storage.counts[w][threadIdx.x] = next;
        next += count;
      }
      storage.base[threadIdx.x] = next;
    }
    __syncthreads();
    if (valid) {
      const uint32_t target = storage.counts[warp][digit] + rank;
      params.keys[1 - source][target] = key;
      params.values[1 - source][target] = value;
    }
    __syncthreads();
  }
}

__device__ void gather(const TaskBuildParams& params, const uint32_t* values, int task_idx) {
  const ScheduleParams& s = params.schedule;
  const uint32_t value = values[task_idx];
  const Item item = load_item(s, value >> kTaskInItemBits);
  ItemPlace place;
  locate(s, item, place);
  const int slots = slots_per_task(s.group);
  const int begin = (value & ((1u << kTaskInItemBits) - 1)) * slots;
  const int count = min(slots, item.q_count - begin);
  params.headers[task_idx] = {place.workspace_block, item.index_head, place.position_offset, count};
  int4* tokens = reinterpret_cast<int4*>(params.tokens + int64_t{task_idx} * slots);
  for (int i = 0; i < slots; i += 4) {
    int token[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      token[j] = i + j < count ? place.first_token + place.queries[begin + i + j] : -1;
    }
    tokens[i / 4] = make_int4(token[0], token[1], token[2], token[3]);
  }
}

// 1,024 threads of 56 registers leave room for other CTAs on the SM, and nothing spills.
__global__ void __maxnreg__(56)
    task_build_kernel(const __grid_constant__ TaskBuildParams params, KeyBits bits) {
  __shared__ SortStorage storage;
  grid_launch_dependents();  // bound by latency: delta's bandwidth is free
  const auto grid = cooperative_groups::this_grid();
  const ScheduleParams& s = params.schedule;
  TaskDescriptor& descriptor = *params.descriptor;
  const int work_count = *s.work_count;
  const int num_items = min(max(work_count, 0), s.work_capacity);
  const bool is_first_thread = blockIdx.x == 0 && threadIdx.x == 0;
  if (is_first_thread) {
    descriptor.walk.num_tasks = 0;
    descriptor.num_items = num_items;
    descriptor.flags = (work_count > s.work_capacity ? kFlagWorkCountClamped : 0) |
                       (work_count < 0 ? kFlagBadItem : 0);
  }
  grid.sync();

  const int chunks_per_item = ceil_div(kMaxItemQueries / slots_per_task(s.group), 32);
  const int64_t num_warps = int64_t{gridDim.x} * kWarps;
  const int64_t first_warp = int64_t{threadIdx.x / 32} * gridDim.x + blockIdx.x;
  for (int64_t i = first_warp; i < int64_t{num_items} * chunks_per_item; i += num_warps) {
    // Chunk by chunk over all items: most items are short.
    expand(params, bits, static_cast<int>(i % num_items), static_cast<int>(i / num_items));
  }
  grid.sync();

  const int num_tasks =
      static_cast<int>(min(static_cast<int64_t>(descriptor.walk.num_tasks), params.task_capacity));
  const int2 share = cta_share(num_tasks);
  int source = 0;
  for (int shift = 0; shift < bits.total(); shift += kRadixBits) {
    if (threadIdx.x < kRadix) storage.base[threadIdx.x] = 0;
    __syncthreads();
    for (int i = share.x + threadIdx.x; i < share.y; i += kThreads) {
      atomicAdd(&storage.base[params.keys[source][i] >> shift & (kRadix - 1)], 1);
    }
    __syncthreads();
    if (threadIdx.x < kRadix) {
      params.histogram[blockIdx.x * kRadix + threadIdx.x] = storage.base[threadIdx.x];
    }
    grid.sync();
    place_digits(storage, params.histogram);
    scatter(params, storage, share, source, shift);
    grid.sync();
    source = 1 - source;
  }

  for (int i = blockIdx.x * kThreads + threadIdx.x; i < num_tasks; i += gridDim.x * kThreads) {
    gather(params, params.values[source], i);
  }
  if (is_first_thread) {  // all have read num_tasks before the sort's barriers
    descriptor.walk = plan_walk(num_tasks, params.num_sms, params.walk);
    *params.flags = descriptor.flags;
  }
}

int bit_width(int64_t count) {
  int bits = 0;
  while (count > int64_t{1} << bits) ++bits;
  return bits;
}

}  // namespace

KeyBits key_bits(int64_t num_heads, int64_t num_tokens, int64_t num_blocks) {
  // At least one bit: a sort pass always separates the counting of tasks from the descriptor's last
  // write.
  return {bit_width(num_heads), std::max(bit_width(num_tokens), 1), bit_width(num_blocks)};
}

void launch(const TaskBuildParams& params, const KeyBits& bits, cudaStream_t stream) {
  TaskBuildParams build = params;
  build.window_log2 = std::min(params.window_log2, bits.token);
  const int64_t wanted = ceil_div<int64_t>(build.task_capacity, kThreads);
  const int grid = static_cast<int>(std::min<int64_t>(wanted, std::min(build.num_sms, kMaxCtas)));
  KeyBits key_bits = bits;
  void* arguments[] = {&build, &key_bits};
  check_cuda(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(task_build_kernel),
                                         dim3(grid), dim3(kThreads), arguments, 0, stream),
             "launch of the task build");
}

}  // namespace msa::task_build
