#include "pipeline/backward.h"

#include <algorithm>

#include "delta/launch.h"
#include "host/error.h"
#include "pipeline/main_kernels.h"
#include "postprocess/launch.h"
#include "task_build/launch.h"

namespace msa {
namespace {

void check_sizes(const BackwardSizes& sizes) {
  constexpr int64_t kInt32Max = 0x7FFFFFFF;
  require(sizes.num_kv_heads >= 1 && sizes.num_heads % sizes.num_kv_heads == 0,
          "q: expected query heads that are a multiple of Hkv = ", sizes.num_kv_heads, ", got ",
          sizes.num_heads);
  require(sizes.group() == 16 || sizes.group() == 8, "q: expected Hq / Hkv of 16 or 8, got ",
          sizes.group());
  require(sizes.workspace_rows % kBlockKeys == 0,
          "k_aligned: expected a multiple of 128 rows, got ", sizes.workspace_rows);
  require(sizes.num_tokens <= kInt32Max && sizes.workspace_rows <= kInt32Max,
          "q, k_aligned: expected fewer than 2^31 rows, got ", sizes.num_tokens, ", ",
          sizes.workspace_rows);
  require(sizes.work_capacity <= task_build::kMaxItems, "scheduler_metadata: expected at most ",
          task_build::kMaxItems, " items, got ", sizes.work_capacity);
  require(sizes.task_capacity() <= kInt32Max, "schedule: expected fewer than 2^31 tasks, got ",
          sizes.task_capacity());
}

void check_kernel(const MainKernel& kernel, const DeviceInfo& device, DqAccum dq_accum) {
  require(kernel.major == 0 || kernel.major == device.major, "backend: ", kernel.name,
          " expected a device of compute capability ", kernel.major, ".x, got ", device.name, " (",
          device.major, ".", device.minor, ")");
  require(std::count(kernel.dq_accums.begin(), kernel.dq_accums.end(), dq_accum) == 1,
          "dq_accum: not supported by backend ", kernel.name);
}

// One call: what every launch takes its parameters from.
struct Call {
  const BackwardArguments& arguments;
  const BackwardSizes& sizes;
  const WorkspacePlan plan;
  const DeviceInfo& device;
  const MainKernel& kernel;
  const Tuning tuning;

  const Section& section(BackwardSection which) const {
    return plan.sections[static_cast<size_t>(which)];
  }
  template <class T>
  T* at(BackwardSection which) const {
    return reinterpret_cast<T*>(arguments.workspace + section(which).offset);
  }
  int32_t num_blocks() const { return static_cast<int32_t>(sizes.workspace_rows / kBlockKeys); }
};

DeltaParams delta_params(const Call& call, bool stats, bool clear) {
  DeltaParams params{};
  if (stats) {
    params.out = call.arguments.out;
    params.grad_out = call.arguments.grad_out;
    params.lse = call.arguments.lse;
    params.neg_lse_log2 = call.at<float>(BackwardSection::kNegLse);
    params.delta = call.at<float>(BackwardSection::kDelta);
    params.num_tokens = call.sizes.num_tokens;
    params.num_heads = call.sizes.num_heads;
  }
  if (clear) {
    const BackwardSection pools[3] = {BackwardSection::kDqPool, BackwardSection::kDkPool,
                                      BackwardSection::kDvPool};
    for (int i = 0; i < 3; ++i) {
      params.clear[i] = {call.at<uint8_t>(pools[i]),
                         static_cast<int64_t>(call.section(pools[i]).bytes)};
    }
  }
  return params;
}

TaskBuildParams task_build_params(const Call& call) {
  const BackwardSizes& sizes = call.sizes;
  TaskBuildParams params{};
  params.schedule = call.arguments.schedule;
  params.schedule.num_kv_heads = sizes.num_kv_heads;
  params.schedule.group = sizes.group();
  params.schedule.num_rows = sizes.num_rows;
  params.schedule.num_entries = sizes.num_entries;
  params.schedule.num_tokens = static_cast<int32_t>(sizes.num_tokens);
  params.schedule.num_blocks = call.num_blocks();
  params.schedule.work_capacity = static_cast<int32_t>(sizes.work_capacity);
  params.schedule.edge_capacity = sizes.edge_capacity;
  const BackwardSection buffers[2] = {BackwardSection::kSortBuffer0, BackwardSection::kSortBuffer1};
  for (int i = 0; i < 2; ++i) {
    params.keys[i] = call.at<uint64_t>(buffers[i]);
    params.values[i] = reinterpret_cast<uint32_t*>(params.keys[i] + sizes.task_capacity());
  }
  params.histogram = call.at<uint32_t>(BackwardSection::kSortHistogram);
  params.headers = call.at<TaskHeader>(BackwardSection::kTaskHeaders);
  params.tokens = call.at<int32_t>(BackwardSection::kTaskTokens);
  params.descriptor = call.at<TaskDescriptor>(BackwardSection::kDescriptor);
  params.flags = call.arguments.flags;
  params.task_capacity = sizes.task_capacity();
  params.window_log2 = call.tuning.window_log2;
  params.num_sms = call.device.num_sms;
  params.walk = call.tuning.walk;
  return params;
}

MainParams main_params(const Call& call) {
  const BackwardSizes& sizes = call.sizes;
  MainParams params{};
  params.q = call.arguments.q;
  params.grad_out = call.arguments.grad_out;
  params.k = call.arguments.k;
  params.v = call.arguments.v;
  params.neg_lse_log2 = call.at<float>(BackwardSection::kNegLse);
  params.delta = call.at<float>(BackwardSection::kDelta);
  params.descriptor = call.at<TaskDescriptor>(BackwardSection::kDescriptor);
  params.task_headers = call.at<TaskHeader>(BackwardSection::kTaskHeaders);
  params.task_tokens = call.at<int32_t>(BackwardSection::kTaskTokens);
  params.dq_pool = call.at<void>(BackwardSection::kDqPool);
  params.dk_pool = call.at<float>(BackwardSection::kDkPool);
  params.dv_pool = call.at<float>(BackwardSection::kDvPool);
  params.scale_log2 = call.arguments.softmax_scale * kLog2E;
  params.num_tokens = static_cast<int32_t>(sizes.num_tokens);
  params.num_heads = sizes.num_heads;
  params.num_kv_heads = sizes.num_kv_heads;
  params.group = sizes.group();
  params.workspace_rows = sizes.workspace_rows;
  params.task_capacity = sizes.task_capacity();
  params.dq_accum = call.arguments.dq_accum;
  return params;
}

PostprocessParams postprocess_params(const Call& call) {
  return {call.at<void>(BackwardSection::kDqPool),
          call.at<float>(BackwardSection::kDkPool),
          call.at<float>(BackwardSection::kDvPool),
          call.arguments.dq,
          call.arguments.dk,
          call.arguments.dv,
          call.arguments.softmax_scale,
          call.sizes.num_tokens,
          call.sizes.workspace_rows,
          call.sizes.num_heads,
          call.sizes.num_kv_heads,
          call.kernel.layout,
          call.arguments.dq_accum,
          call.arguments.kv_grad_fp32};
}

}  // namespace

WorkspacePlan plan_backward(const BackwardSizes& sizes, DqAccum dq_accum, size_t guard_bytes) {
  check_sizes(sizes);
  const size_t tasks = sizes.task_capacity();
  const size_t rows = sizes.num_tokens * sizes.num_heads;
  const size_t kv_bytes = sizes.workspace_rows * sizes.num_kv_heads * kHeadDim * sizeof(float);
  const size_t dq_element = dq_accum == DqAccum::kFp32 ? 4 : 2;
  return lay_out(
      {
          {"descriptor", sizeof(TaskDescriptor)},
          {"neg_lse", rows * sizeof(float)},
          {"delta", rows * sizeof(float)},
          {"sort_buffer_0", tasks * task_build::kBytesPerTask},
          {"sort_buffer_1", tasks * task_build::kBytesPerTask},
          {"sort_histogram", task_build::kHistogramBytes},
          {"task_headers", tasks * sizeof(TaskHeader)},
          {"task_tokens", tasks * slots_per_task(sizes.group()) * sizeof(int32_t)},
          {"dq_pool", rows * kHeadDim * dq_element},
          {"dk_pool", kv_bytes},
          {"dv_pool", kv_bytes},
      },
      guard_bytes);
}

void backward(const BackwardArguments& arguments, uint32_t stages) {
  const BackwardSizes& sizes = arguments.sizes;
  const cudaStream_t stream = arguments.stream;
  const DeviceInfo& device = device_info(arguments.device);
  const MainKernel& kernel = find_main_kernel(arguments.backend);
  check_kernel(kernel, device, arguments.dq_accum);
  const int64_t num_blocks = sizes.workspace_rows / kBlockKeys;
  const Call call{
      arguments, sizes,  plan_backward(sizes, arguments.dq_accum, arguments.guard_bytes),
      device,    kernel, kernel.tune({sizes.num_tokens, num_blocks, sizes.task_capacity()})};

  const bool has_pairs = sizes.num_tokens > 0 && num_blocks > 0 && sizes.num_entries > 0;
  const auto runs = [&](Stage stage) {
    const bool needs_pairs = stage != Stage::kClear && stage != Stage::kPostprocess;
    return (stages >> static_cast<int>(stage) & 1) != 0 && (has_pairs || !needs_pairs);
  };
  const bool builds = runs(Stage::kTaskBuild);
  if (builds) {
    task_build::launch(task_build_params(call),
                       task_build::key_bits(sizes.num_kv_heads, sizes.num_tokens, num_blocks),
                       stream);
  } else if (!has_pairs) {
    check_cuda(cudaMemsetAsync(arguments.flags, 0, sizeof(uint32_t), stream), "clearing the flags");
  }
  delta::launch(delta_params(call, runs(Stage::kDelta), runs(Stage::kClear)), builds, stream);
  if (runs(Stage::kMain)) kernel.launch(main_params(call), call.tuning, device, stream);
  if (runs(Stage::kPostprocess)) postprocess::launch(postprocess_params(call), stream);
}

}  // namespace msa
