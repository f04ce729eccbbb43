// Sizes fixed by the MSA topology, and the CTA walk rule. Host-safe; shared by host, device and
// tests.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MSA_HOST_DEVICE __host__ __device__
#else
#define MSA_HOST_DEVICE
#endif

namespace msa {

constexpr int kHeadDim = 128;          // elements of a q/k/v row
constexpr int kBlockKeys = 128;        // keys of a workspace block
constexpr int kTileRows = 128;         // (query slot, head) rows of a task
constexpr int kMaxItemQueries = 4096;  // queries of one schedule item

// Query slots of a task: 8 for a group of 16 heads, 16 for a group of 8.
MSA_HOST_DEVICE constexpr int slots_per_task(int group) { return kTileRows / group; }

template <typename T>
MSA_HOST_DEVICE constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// How a grid of CTAs walks `num_tasks` ordered tasks. CTA i < full_ctas owns
// [i*tasks_per_cta, (i+1)*tasks_per_cta); every later CTA owns tail_tasks_per_cta tasks of the
// rest.
struct Walk {
  int32_t num_tasks;
  int32_t tasks_per_cta;
  int32_t full_ctas;
  int32_t tail_tasks_per_cta;
  int32_t grid;
};

// The walk lengths a backend asks for: short walks while there are few tasks, to fill every SM.
struct WalkRule {
  int32_t short_walk = 4;
  int32_t long_walk = 64;
  int32_t short_walk_max_tasks = 2400;
};

MSA_HOST_DEVICE constexpr Walk plan_walk(int32_t num_tasks, int32_t num_sms, WalkRule rule) {
  const int32_t length = num_tasks <= rule.short_walk_max_tasks ? rule.short_walk : rule.long_walk;
  const int32_t chunks = num_tasks / length + (num_tasks % length != 0);
  const int32_t whole_waves = (chunks / num_sms) * num_sms;
  const int32_t whole_chunks = num_tasks / length;
  const int32_t full = whole_waves < whole_chunks ? whole_waves : whole_chunks;
  const int32_t left = num_tasks - full * length;
  if (left <= 0) return {num_tasks, length, full, 1, full};
  // Spread the last, partial wave evenly over the SMs, unless that leaves slivers.
  const int32_t tail = left / num_sms + (left % num_sms != 0);
  if (tail < 3) return {num_tasks, length, 0, length, chunks};
  return {num_tasks, length, full, tail, full + left / tail + (left % tail != 0)};
}

// At least the grid of plan_walk for any number of tasks in [0, capacity].
MSA_HOST_DEVICE constexpr int32_t max_grid(int64_t capacity, int num_sms, const WalkRule& rule) {
  const int64_t short_tasks =
      capacity < rule.short_walk_max_tasks ? capacity : rule.short_walk_max_tasks;
  const int64_t short_chunks = ceil_div<int64_t>(short_tasks, rule.short_walk);
  const int64_t long_chunks = ceil_div<int64_t>(capacity, rule.long_walk);
  // A spread-out tail gives each SM at least three tasks, so it has at most num_sms CTAs.
  return static_cast<int32_t>((short_chunks > long_chunks ? short_chunks : long_chunks) + num_sms);
}

struct TaskInterval {
  int32_t begin;
  int32_t end;
};

// The tasks of CTA `cta_idx`; empty for a CTA past the walk's grid.
MSA_HOST_DEVICE constexpr TaskInterval cta_interval(const Walk& walk, int32_t cta_idx) {
  if (cta_idx < walk.full_ctas) {
    return {cta_idx * walk.tasks_per_cta, (cta_idx + 1) * walk.tasks_per_cta};
  }
  const int64_t begin = int64_t{walk.full_ctas} * walk.tasks_per_cta +
                        int64_t{cta_idx - walk.full_ctas} * walk.tail_tasks_per_cta;
  const int64_t end = begin + walk.tail_tasks_per_cta;
  const int64_t num_tasks = walk.num_tasks;
  return {static_cast<int32_t>(begin < num_tasks ? begin : num_tasks),
          static_cast<int32_t>(end < num_tasks ? end : num_tasks)};
}

}  // namespace msa
