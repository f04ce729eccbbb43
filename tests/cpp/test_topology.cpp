#include <gtest/gtest.h>

#include "topology.h"

namespace msa {
namespace {

constexpr Walk kWalk = plan_walk(10000, 132, WalkRule{});
static_assert(kWalk.tasks_per_cta == 64 && kWalk.grid > 0,
              "the walk rule is usable in constant expressions");

void expect_every_task_once(int32_t num_tasks, int32_t num_sms, const WalkRule& rule) {
  const Walk walk = plan_walk(num_tasks, num_sms, rule);
  int32_t next = 0;
  for (int32_t cta = 0; cta < walk.grid; ++cta) {
    const TaskInterval tasks = cta_interval(walk, cta);
    ASSERT_EQ(tasks.begin, next) << num_tasks << " tasks, " << num_sms << " SMs, CTA " << cta;
    ASSERT_GT(tasks.end, tasks.begin) << num_tasks << " tasks, " << num_sms << " SMs, CTA " << cta;
    next = tasks.end;
  }
  EXPECT_EQ(next, num_tasks);
  const TaskInterval surplus = cta_interval(walk, walk.grid + 7);
  EXPECT_EQ(surplus.begin, surplus.end);
}

TEST(Walk, CoversEveryTaskOnce) {
  for (const int32_t num_sms : {1, 8, 78, 132, 148, 160}) {
    for (int32_t num_tasks = 0; num_tasks <= 3000; ++num_tasks) {
      expect_every_task_once(num_tasks, num_sms, WalkRule{});
      expect_every_task_once(num_tasks, num_sms, WalkRule{32, 32, 0});
    }
    for (const int32_t num_tasks : {8'447, 8'448, 8'449, 131'072, 999'983}) {
      expect_every_task_once(num_tasks, num_sms, WalkRule{});
    }
  }
}

TEST(Walk, GridBoundHoldsForEveryTaskCount) {
  for (const WalkRule& rule : {WalkRule{}, WalkRule{32, 32, 0}, WalkRule{4, 8, 100}}) {
    for (const int32_t num_sms : {1, 78, 132, 148}) {
      const int32_t bound = max_grid(20'000, num_sms, rule);
      for (int32_t num_tasks = 0; num_tasks <= 20'000; ++num_tasks) {
        ASSERT_LE(plan_walk(num_tasks, num_sms, rule).grid, bound) << num_tasks << " tasks";
      }
    }
  }
}

TEST(Topology, SlotsPerTask) {
  EXPECT_EQ(slots_per_task(16), 8);
  EXPECT_EQ(slots_per_task(8), 16);
}

}  // namespace
}  // namespace msa
