#include <gtest/gtest.h>

#include <functional>

#include "host/device.h"
#include "host/error.h"
#include "host/fatbin.h"
#include "host/tensor_map.h"
#include "pipeline/backward.h"
#include "pipeline/main_kernels.h"

namespace msa {
namespace {

template <class Error>
void expect_error(const std::function<void()>& action, const std::string& text) {
  try {
    action();
    FAIL() << "expected an error that says: " << text;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

constexpr BackwardSizes kSizes{8192, 64, 4, 8192, 1, 64, 131072, 300};

TEST(Workspace, SectionsAreAlignedAndDisjoint) {
  for (const DqAccum accum : {DqAccum::kBf16, DqAccum::kFp16, DqAccum::kFp32}) {
    for (const size_t guard : {size_t{0}, size_t{4096}}) {
      const WorkspacePlan plan = plan_backward(kSizes, accum, guard);
      size_t end = 0;
      for (const Section& section : plan.sections) {
        EXPECT_EQ(section.offset % 256, 0u) << section.name;
        EXPECT_GE(section.offset, end) << section.name;
        end = section.offset + section.bytes + guard;
      }
      EXPECT_GE(plan.total_bytes, end);
    }
  }
}

size_t bytes_of(const BackwardSizes& sizes, DqAccum accum, BackwardSection section) {
  return plan_backward(sizes, accum, 0).sections[static_cast<size_t>(section)].bytes;
}

TEST(Workspace, SizesFollowTheShapes) {
  EXPECT_EQ(kSizes.group(), 16);
  EXPECT_EQ(kSizes.task_capacity(), 4 * 131072 / 8 + 300);
  EXPECT_EQ(bytes_of(kSizes, DqAccum::kBf16, BackwardSection::kDqPool),
            size_t{8192} * 64 * 128 * 2);
  EXPECT_EQ(bytes_of(kSizes, DqAccum::kFp32, BackwardSection::kDqPool),
            size_t{8192} * 64 * 128 * 4);
  EXPECT_EQ(bytes_of(kSizes, DqAccum::kBf16, BackwardSection::kDkPool), size_t{8192} * 4 * 128 * 4);
  EXPECT_EQ(bytes_of(kSizes, DqAccum::kBf16, BackwardSection::kTaskTokens),
            size_t(kSizes.task_capacity()) * 8 * 4);
}

TEST(Workspace, PassesTwoToThe31) {
  BackwardSizes sizes = kSizes;
  sizes.num_tokens = 300'000;
  EXPECT_EQ(bytes_of(sizes, DqAccum::kFp32, BackwardSection::kDqPool), 300'000ull * 64 * 128 * 4);
}

TEST(Workspace, RejectsWhatTheKernelsCannotServe) {
  BackwardSizes sizes = kSizes;
  sizes.num_heads = 12;
  expect_error<std::invalid_argument>([&] { plan_backward(sizes, DqAccum::kBf16, 0); },
                                      "q: expected Hq / Hkv of 16 or 8, got 3");
  sizes = kSizes;
  sizes.workspace_rows = 100;
  expect_error<std::invalid_argument>([&] { plan_backward(sizes, DqAccum::kBf16, 0); },
                                      "k_aligned: expected a multiple of 128 rows, got 100");
  sizes = kSizes;
  sizes.work_capacity = (1 << 23) + 1;
  expect_error<std::invalid_argument>(
      [&] { plan_backward(sizes, DqAccum::kBf16, 0); },
      "scheduler_metadata: expected at most 8388608 items, got 8388609");
}

TEST(TensorMap, ChecksEveryField) {
  alignas(16) static char data[64];
  const TensorMapSpec good{data, 3, {64, 8, 2}, {256, 128}, {64, 8, 2}};
  EXPECT_NO_THROW(check_tensor_map(good));
  const auto rejects = [&](const std::function<void(TensorMapSpec&)>& change, const char* text) {
    TensorMapSpec spec = good;
    change(spec);
    expect_error<std::invalid_argument>([&] { check_tensor_map(spec); }, text);
  };
  rejects([](auto& s) { s.rank = 6; }, "expected 1 to 5 dimensions, got 6");
  rejects([](auto& s) { s.data = data + 8; }, "expected data aligned to 16 bytes");
  rejects([](auto& s) { s.sizes[1] = 0; }, "expected size 1 in [1, 2^32], got 0");
  rejects([](auto& s) { s.box[1] = 257; }, "expected box size 1 in [1, 256], got 257");
  rejects([](auto& s) { s.stride_bytes[0] = 24; },
          "expected stride 1 to be a multiple of 16 bytes");
  rejects([](auto& s) { s.box[0] = 128; },
          "expected an innermost box of at most 128 bytes, got 256");
}

TEST(TensorMap, OperandsOfAStridedView) {
  const StridedOperand q{nullptr, 3 * 64 * 128, 128};
  const TensorMapSpec slot = slot_map(q, 1000, 64, 16);
  EXPECT_EQ(slot.sizes, (std::array<uint64_t, 5>{64, 8, 2, 8, 1000}));
  EXPECT_EQ(slot.stride_bytes, (std::array<uint64_t, 4>{256, 128, 2048, 3 * 64 * 256}));
  EXPECT_EQ(slot.box, (std::array<uint32_t, 5>{64, 8, 2, 2, 1}));
  EXPECT_EQ(slot_map(q, 1000, 64, 8).box[3], 1u);
  const TensorMapSpec block = block_map({nullptr, 512, 128}, 256, 4);
  EXPECT_EQ(block.stride_bytes, (std::array<uint64_t, 4>{1024, 128, 256}));
  EXPECT_EQ(block.box, (std::array<uint32_t, 5>{64, 128, 2, 1}));
  EXPECT_NO_THROW(check_tensor_map(slot));
  EXPECT_NO_THROW(check_tensor_map(block));
}

TEST(Errors, NameTheCudaErrorAndWhatWasDone) {
  expect_error<std::runtime_error>([] { check_cuda(cudaErrorInvalidValue, "launch of delta"); },
                                   "launch of delta: cudaErrorInvalidValue (invalid argument)");
  EXPECT_NO_THROW(check_cuda(cudaSuccess, "nothing"));
  expect_error<std::runtime_error>([] { device_info(999); }, "properties of device 999: cudaError");
}

TEST(MainKernels, AreFoundByName) {
  EXPECT_EQ(find_main_kernel("simple").layout, PoolLayout::kRowMajor);
  expect_error<std::invalid_argument>([] { find_main_kernel("sm70"); },
                                      "backend: expected one of simple");
  for (const MainKernel& kernel : main_kernels()) {
    const Tuning tuning = kernel.tune({16384, 128, 131072});
    EXPECT_GT(tuning.walk.long_walk, 0) << kernel.name;
    EXPECT_GT(tuning.window_log2, 0) << kernel.name;
  }
}

TEST(Fatbin, ListsTheArchitecturesOfThisBinary) {
  const std::vector<std::string> archs = built_archs();
  ASSERT_FALSE(archs.empty());
  for (const std::string& arch : archs)
    EXPECT_TRUE(arch == "90a" || arch == "100a" || arch == "103a") << arch;
}

}  // namespace
}  // namespace msa
