#include "host/tensor_map.h"

#include <cuda_runtime_api.h>

#include "host/error.h"
#include "topology.h"

namespace msa {
namespace {

constexpr uint32_t kSwizzleBytes = 128;
constexpr int kElementBytes = 2;
constexpr uint64_t kHalfDim = kHeadDim / 2;

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode encode_function() {
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &found),
               "look-up of cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess || function == nullptr) {
      throw std::runtime_error(
          "the CUDA driver has no cuTensorMapEncodeTiled: expected driver 525 or newer");
    }
    return reinterpret_cast<Encode>(function);
  }();
  return encode;
}

}  // namespace

void check_tensor_map(const TensorMapSpec& spec) {
  require(spec.rank >= 1 && spec.rank <= 5, "tensor map: expected 1 to 5 dimensions, got ",
          spec.rank);
  require(reinterpret_cast<uintptr_t>(spec.data) % 16 == 0,
          "tensor map: expected data aligned to 16 bytes, got ", spec.data);
  for (uint32_t i = 0; i < spec.rank; ++i) {
    require(spec.sizes[i] >= 1 && spec.sizes[i] <= (1ull << 32), "tensor map: expected size ", i,
            " in [1, 2^32], got ", spec.sizes[i]);
    require(spec.box[i] >= 1 && spec.box[i] <= 256, "tensor map: expected box size ", i,
            " in [1, 256], got ", spec.box[i]);
    if (i + 1 < spec.rank) {
      require(spec.stride_bytes[i] % 16 == 0 && spec.stride_bytes[i] < (1ull << 40),
              "tensor map: expected stride ", i + 1,
              " to be a multiple of 16 bytes below 2^40, got ", spec.stride_bytes[i]);
    }
  }
  require(spec.box[0] * kElementBytes <= kSwizzleBytes,
          "tensor map: expected an innermost box of at most 128 bytes, got ",
          spec.box[0] * kElementBytes);
}

void make_tensor_map(const TensorMapSpec& spec, CUtensorMap& map) {
  check_tensor_map(spec);
  constexpr cuuint32_t kElementStrides[5] = {1, 1, 1, 1, 1};
  const CUresult result = encode_function()(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, spec.rank, const_cast<void*>(spec.data),
      spec.sizes.data(), spec.stride_bytes.data(), spec.box.data(), kElementStrides,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error(concat("cuTensorMapEncodeTiled: CUresult ", static_cast<int>(result)));
  }
}

TensorMapSpec slot_map(const StridedOperand& operand, int64_t num_tokens, int num_heads,
                       int group) {
  const uint64_t row_bytes = operand.row_stride * kElementBytes;
  const uint64_t head_bytes = operand.head_stride * kElementBytes;
  return {operand.data,
          5,
          {kHalfDim, 8, 2, static_cast<uint64_t>(num_heads) / 8, static_cast<uint64_t>(num_tokens)},
          {head_bytes, kHalfDim * kElementBytes, 8 * head_bytes, row_bytes},
          {kHalfDim, 8, 2, static_cast<uint32_t>(group) / 8, 1}};
}

TensorMapSpec block_map(const StridedOperand& operand, int64_t workspace_rows, int num_kv_heads) {
  return {operand.data,
          4,
          {kHalfDim, static_cast<uint64_t>(workspace_rows), 2, static_cast<uint64_t>(num_kv_heads)},
          {static_cast<uint64_t>(operand.row_stride) * kElementBytes, kHalfDim * kElementBytes,
           static_cast<uint64_t>(operand.head_stride) * kElementBytes},
          {kHalfDim, kBlockKeys, 2, 1}};
}

}  // namespace msa
