#include "host/backward.h"

#include <algorithm>

#include "delta/launch.h"
#include "host/error.h"
#include "host/main_kernel.h"
#include "postprocess/launch.h"
#include "task_build/launch.h"

namespace msa {
namespace {

task_build::KeyBits key_bits(const Sizes& sizes) {
  return task_build::key_bits(sizes.num_kv_heads, sizes.num_tokens,
                              sizes.workspace_rows / kBlockKeys);
}

void check_sizes(const Sizes& sizes) {
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

}  // namespace

WorkspacePlan plan_backward(const Sizes& sizes, DqAccum dq_accum, size_t guard_bytes) {
  check_sizes(sizes);
  return plan_workspace(sizes, dq_accum, guard_bytes);
}

void backward(const BackwardArguments& arguments, uint32_t stages) {
  const Sizes& sizes = arguments.sizes;
  const cudaStream_t stream = arguments.stream;
  const DeviceInfo& device = device_info(arguments.device);
  const MainKernel& kernel = find_main_kernel(arguments.backend);
  require(kernel.major == 0 || kernel.major == device.major, "backend: ", kernel.name,
          " expected a device of compute capability ", kernel.major, ".x, got ", device.name, " (",
          device.major, ".", device.minor, ")");
  require(std::count(kernel.dq_accums.begin(), kernel.dq_accums.end(), arguments.dq_accum) == 1,
          "dq_accum: not supported by backend ", kernel.name);
  const WorkspacePlan plan = plan_backward(sizes, arguments.dq_accum, arguments.guard_bytes);
  const auto at = [&](Section section) { return arguments.workspace + plan.offset(section); };
  const auto runs = [&](Stage stage) { return (stages >> static_cast<int>(stage) & 1) != 0; };
  const bool has_pairs = sizes.num_tokens > 0 && sizes.workspace_rows > 0 &&
                         sizes.task_capacity() > 0 && sizes.num_entries > 0;

  DeltaParams delta{arguments.out,
                    arguments.grad_out,
                    arguments.lse,
                    reinterpret_cast<float*>(at(Section::kNegLse)),
                    reinterpret_cast<float*>(at(Section::kDelta)),
                    sizes.num_tokens,
                    sizes.num_heads};
  if (runs(Stage::kDelta) && has_pairs) delta::launch(delta, stream);

  if (runs(Stage::kClear)) {
    const auto clear = [&](size_t begin, size_t bytes) {
      check_cuda(cudaMemsetAsync(arguments.workspace + begin, 0, bytes, stream),
                 "clearing the pools");
    };
    if (arguments.guard_bytes == 0) {
      clear(plan.offset(Section::kDqPool), plan.total_bytes - plan.offset(Section::kDqPool));
    } else {
      for (const Section pool : {Section::kDqPool, Section::kDkPool, Section::kDvPool}) {
        clear(plan.offset(pool), plan.size(pool));
      }
    }
  }

  const Tuning tuning =
      kernel.tune({sizes.num_tokens, sizes.workspace_rows / kBlockKeys, sizes.task_capacity()});
  TaskBuildParams build{};
  build.schedule = arguments.schedule;
  build.schedule.num_kv_heads = sizes.num_kv_heads;
  build.schedule.group = sizes.group();
  build.schedule.num_rows = sizes.num_rows;
  build.schedule.num_entries = sizes.num_entries;
  build.schedule.num_tokens = static_cast<int32_t>(sizes.num_tokens);
  build.schedule.num_blocks = static_cast<int32_t>(sizes.workspace_rows / kBlockKeys);
  build.schedule.work_capacity = static_cast<int32_t>(sizes.work_capacity);
  build.schedule.edge_capacity = sizes.edge_capacity;
  for (int i = 0; i < 2; ++i) {
    build.keys[i] =
        reinterpret_cast<uint64_t*>(at(i == 0 ? Section::kSortBuffer0 : Section::kSortBuffer1));
    build.values[i] = reinterpret_cast<uint32_t*>(build.keys[i] + sizes.task_capacity());
  }
  build.histogram = reinterpret_cast<uint32_t*>(at(Section::kSortHistogram));
  build.headers = reinterpret_cast<TaskHeader*>(at(Section::kTaskHeaders));
  build.tokens = reinterpret_cast<int32_t*>(at(Section::kTaskTokens));
  build.descriptor = reinterpret_cast<TaskDescriptor*>(at(Section::kDescriptor));
  build.flags = arguments.flags;
  build.task_capacity = sizes.task_capacity();
  build.window_log2 = tuning.window_log2;
  build.num_sms = device.num_sms;
  build.walk = tuning.walk;
  if (runs(Stage::kTaskBuild)) {
    if (has_pairs) {
      task_build::launch(build, key_bits(sizes), stream);
    } else {
      check_cuda(cudaMemsetAsync(arguments.flags, 0, sizeof(uint32_t), stream),
                 "clearing the flags");
    }
  }

  MainParams main{};
  main.q = arguments.q;
  main.grad_out = arguments.grad_out;
  main.k = arguments.k;
  main.v = arguments.v;
  main.neg_lse_log2 = delta.neg_lse_log2;
  main.delta = delta.delta;
  main.descriptor = build.descriptor;
  main.task_headers = build.headers;
  main.task_tokens = build.tokens;
  main.dq_pool = at(Section::kDqPool);
  main.dk_pool = reinterpret_cast<float*>(at(Section::kDkPool));
  main.dv_pool = reinterpret_cast<float*>(at(Section::kDvPool));
  main.scale_log2 = arguments.softmax_scale * 1.4426950408889634f;
  main.num_tokens = static_cast<int32_t>(sizes.num_tokens);
  main.num_heads = sizes.num_heads;
  main.num_kv_heads = sizes.num_kv_heads;
  main.group = sizes.group();
  main.workspace_rows = sizes.workspace_rows;
  main.task_capacity = sizes.task_capacity();
  main.dq_accum = arguments.dq_accum;
  if (runs(Stage::kMain) && has_pairs) kernel.launch(main, tuning, device, stream);

  const PostprocessParams post{main.dq_pool,
                               main.dk_pool,
                               main.dv_pool,
                               arguments.dq,
                               arguments.dk,
                               arguments.dv,
                               arguments.softmax_scale,
                               sizes.num_tokens,
                               sizes.workspace_rows,
                               sizes.num_heads,
                               sizes.num_kv_heads,
                               kernel.layout,
                               arguments.dq_accum,
                               arguments.kv_grad_fp32};
  if (runs(Stage::kPostprocess)) postprocess::launch(post, stream);
}

}  // namespace msa
