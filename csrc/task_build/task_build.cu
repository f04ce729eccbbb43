// Schedule items -> the ordered task table and its descriptor.
//
//   expand   a CTA an item: checks it, checks every query of each task, appends (key, value) of
//   good tasks sort     by (head, window of the first token, block, first token): keys are unique,
//   so the table does not depend
//            on the items' order nor on the order of appending
//   gather   a thread a task: header and resolved tokens in sorted order; the walk into the
//   descriptor
#include <algorithm>
#include <cub/device/device_radix_sort.cuh>

#include "host/error.h"
#include "task_build/launch.h"

namespace msa::task_build {
namespace {

constexpr int kThreads = 128;

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

__global__ void __launch_bounds__(kThreads)
    expand_kernel(const __grid_constant__ TaskBuildParams params, KeyBits bits) {
  const ScheduleParams& s = params.schedule;
  TaskDescriptor& descriptor = *params.descriptor;
  const int work_count = *s.work_count;
  const int num_items = min(max(work_count, 0), s.work_capacity);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    descriptor.num_items = num_items;
    if (work_count > s.work_capacity) atomicOr(&descriptor.flags, kFlagWorkCountClamped);
    if (work_count < 0) atomicOr(&descriptor.flags, kFlagBadItem);
  }
  const int item_idx = blockIdx.x;
  if (item_idx >= num_items) return;

  const Item item = load_item(s, item_idx);
  ItemPlace place;
  const uint32_t bad = locate(s, item, place);
  if (bad != 0) {
    if (threadIdx.x == 0) atomicOr(&descriptor.flags, bad);
    return;
  }
  const int slots = slots_per_task(s.group);
  const int num_tasks = ceil_div(item.q_count, slots);
  __shared__ int warp_counts[kThreads / 32];
  __shared__ int first_slot;
  for (int first = 0; first < num_tasks; first += kThreads) {
    const int task = first + threadIdx.x;
    const int begin = task * slots;
    const int end = min(begin + slots, item.q_count);
    bool good = task < num_tasks;
    int previous = -1;
    for (int i = begin; i < end; ++i) {
      const int query = place.queries[i];
      good = good && query > previous && query < place.num_queries;
      previous = query;
    }
    if (task < num_tasks && !good) atomicOr(&descriptor.flags, kFlagBadQueryIndex);

    const unsigned ballot = __ballot_sync(~0u, good);
    if (threadIdx.x % 32 == 0) warp_counts[threadIdx.x / 32] = __popc(ballot);
    __syncthreads();
    if (threadIdx.x == 0) {
      int total = 0;
      for (int& count : warp_counts) {
        const int before = total;
        total += count;
        count = before;
      }
      first_slot = atomicAdd(&descriptor.walk.num_tasks, total);
    }
    __syncthreads();
    if (good) {
      const int64_t slot = int64_t{first_slot} + warp_counts[threadIdx.x / 32] +
                           __popc(ballot & ((1u << threadIdx.x % 32) - 1));
      if (slot < params.task_capacity) {
        const uint32_t token = place.first_token + place.queries[begin];
        params.keys[0][slot] =
            sort_key(item, place.workspace_block, token, bits, params.window_log2);
        params.values[0][slot] = static_cast<uint32_t>(item_idx) << kTaskInItemBits | task;
      } else {
        atomicOr(&descriptor.flags, kFlagTaskOverflow);
      }
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ TaskBuildParams params, const uint32_t* sorted_values) {
  const ScheduleParams& s = params.schedule;
  // Appended tasks, clamped; the counter itself is left alone, other CTAs read it.
  const int num_tasks =
      static_cast<int>(min(int64_t{params.descriptor->walk.num_tasks}, params.task_capacity));
  const int64_t task_idx = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (task_idx >= num_tasks) return;

  const uint32_t value = sorted_values[task_idx];
  const Item item = load_item(s, value >> kTaskInItemBits);
  ItemPlace place;
  locate(s, item, place);
  const int slots = slots_per_task(s.group);
  const int begin = (value & ((1u << kTaskInItemBits) - 1)) * slots;
  const int count = min(slots, item.q_count - begin);
  params.headers[task_idx] = {place.workspace_block, item.index_head, place.position_offset, count};
  int4* tokens = reinterpret_cast<int4*>(params.tokens + task_idx * slots);
  for (int i = 0; i < slots; i += 4) {
    int token[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      token[j] = i + j < count ? place.first_token + place.queries[begin + i + j] : -1;
    }
    tokens[i / 4] = make_int4(token[0], token[1], token[2], token[3]);
  }
}

__global__ void finish_kernel(TaskDescriptor* descriptor, uint32_t* flags, int64_t task_capacity,
                              int num_sms, WalkRule rule) {
  const int64_t appended = descriptor->walk.num_tasks;
  descriptor->walk = plan_walk(static_cast<int32_t>(min(appended, task_capacity)), num_sms, rule);
  *flags = descriptor->flags;
}

int bit_width(int64_t count) {
  int bits = 0;
  while (count > int64_t{1} << bits) ++bits;
  return bits;
}

cudaError_t sort(void* temp, size_t& temp_bytes, cub::DoubleBuffer<uint64_t>& keys,
                 cub::DoubleBuffer<uint32_t>& values, int64_t count, const KeyBits& bits,
                 cudaStream_t stream) {
  // One bit more than the fields need: it is set in the keys of unused tasks only.
  return cub::DeviceRadixSort::SortPairs(temp, temp_bytes, keys, values, count, 0, bits.total() + 1,
                                         stream);
}

}  // namespace

KeyBits key_bits(int64_t num_heads, int64_t num_tokens, int64_t num_blocks) {
  return {bit_width(num_heads), bit_width(num_tokens), bit_width(num_blocks)};
}

size_t sort_temp_bytes(int64_t task_capacity, const KeyBits& bits) {
  cub::DoubleBuffer<uint64_t> keys;
  cub::DoubleBuffer<uint32_t> values;
  size_t bytes = 0;
  check_cuda(sort(nullptr, bytes, keys, values, task_capacity, bits, nullptr),
             "size of the task sort's scratch");
  return bytes;
}

void launch(const TaskBuildParams& params, const KeyBits& bits, cudaStream_t stream) {
  TaskBuildParams build = params;
  build.window_log2 = std::min(params.window_log2, bits.token);
  check_cuda(cudaMemsetAsync(build.descriptor, 0, sizeof(TaskDescriptor), stream),
             "clearing the task descriptor");
  // Values follow keys; the sort copies those of unused tasks too.
  check_cuda(cudaMemsetAsync(build.keys[0], 0xFF, build.task_capacity * kBytesPerTask, stream),
             "clearing the unsorted tasks");
  expand_kernel<<<build.schedule.work_capacity, kThreads, 0, stream>>>(build, bits);
  check_cuda(cudaGetLastError(), "launch of the task build's expand");

  cub::DoubleBuffer<uint64_t> keys(build.keys[0], build.keys[1]);
  cub::DoubleBuffer<uint32_t> values(build.values[0], build.values[1]);
  size_t temp_bytes = build.sort_temp_bytes;
  check_cuda(sort(build.sort_temp, temp_bytes, keys, values, build.task_capacity, bits, stream),
             "the task sort");

  const auto grid = static_cast<unsigned>(ceil_div<int64_t>(build.task_capacity, kThreads));
  gather_kernel<<<grid, kThreads, 0, stream>>>(build, values.Current());
  check_cuda(cudaGetLastError(), "launch of the task build's gather");
  finish_kernel<<<1, 1, 0, stream>>>(build.descriptor, build.flags, build.task_capacity,
                                     build.num_sms, build.walk);
  check_cuda(cudaGetLastError(), "launch of the task build's finish");
}

}  // namespace msa::task_build
