// Pools -> gradients: memory bound, every pool element read once, every gradient written once.
//
// A thread reads one unit of a pool, 16 consecutive elements, and writes its two pieces of 8 d.
#include "device/pool_layout.cuh"
#include "device/vector.cuh"
#include "host/error.h"
#include "postprocess/launch.h"

namespace msa::postprocess {
namespace {

constexpr int kThreads = 256;
constexpr int kUnit = 16;

__device__ void load_unit(const float* unit, float (&x)[kUnit]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 y = __ldcs(reinterpret_cast<const float4*>(unit) + i);
    x[4 * i] = y.x;
    x[4 * i + 1] = y.y;
    x[4 * i + 2] = y.z;
    x[4 * i + 3] = y.w;
  }
}

// 16-bit elements.
template <class Element>
__device__ void load_unit(const Element* unit, float (&x)[kUnit]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 packed = __ldcs(reinterpret_cast<const uint4*>(unit) + i);
    const auto* elements = reinterpret_cast<const Element*>(&packed);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[8 * i + j] = static_cast<float>(elements[j]);
  }
}

__device__ void store_piece(__nv_bfloat16* target, const float (&x)[8]) {
  __stcs(reinterpret_cast<uint4*>(target), pack_bf16x8(x));
}
__device__ void store_piece(float* target, const float (&x)[8]) {
  __stcs(reinterpret_cast<float4*>(target), make_float4(x[0], x[1], x[2], x[3]));
  __stcs(reinterpret_cast<float4*>(target) + 1, make_float4(x[4], x[5], x[6], x[7]));
}

template <PoolLayout kLayout>
__device__ void unpack(const float (&x)[kUnit], float scale, float (&pieces)[2][8]) {
#pragma unroll
  for (int i = 0; i < kUnit; ++i) pieces[unit_piece<kLayout>(i)][unit_d<kLayout>(i)] = x[i] * scale;
}

// CTAs [0, dq_ctas) make dq, the next kv_ctas dk, the last kv_ctas dv.
template <PoolLayout kLayout, class DqElement, class KvGrad>
__global__ void __launch_bounds__(kThreads)
    postprocess_kernel(const __grid_constant__ PostprocessParams params, unsigned dq_ctas,
                       unsigned kv_ctas) {
  float x[kUnit];
  float values[2][8];
  Piece pieces[2];
  if (blockIdx.x < dq_ctas) {
    const int64_t unit = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    const int group = params.num_heads / params.num_kv_heads;
    const int units_per_head = group * kHeadDim / kUnit;
    const int64_t token_head = unit / units_per_head;  // (token, KV head), as in the gradient
    if (token_head >= params.num_tokens * params.num_kv_heads) return;
    load_unit(static_cast<const DqElement*>(params.dq_pool) + unit * kUnit, x);
    unpack<kLayout>(x, params.softmax_scale, values);
    dq_unit_pieces<kLayout>(group, static_cast<int>(unit % units_per_head), pieces);
    __nv_bfloat16* target = params.dq + token_head * group * kHeadDim;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      store_piece(target + pieces[i].row * kHeadDim + pieces[i].d, values[i]);
    return;
  }

  constexpr int kUnitsPerBlock = kBlockKeys * kHeadDim / kUnit;
  const bool is_dk = blockIdx.x < dq_ctas + kv_ctas;
  const int64_t unit =
      int64_t{blockIdx.x - dq_ctas - (is_dk ? 0 : kv_ctas)} * kThreads + threadIdx.x;
  if (unit * kUnit >= params.workspace_rows * params.num_kv_heads * kHeadDim) return;
  load_unit((is_dk ? params.dk_pool : params.dv_pool) + unit * kUnit, x);
  unpack<kLayout>(x, is_dk ? params.softmax_scale : 1.0f, values);
  auto* gradient = static_cast<KvGrad*>(is_dk ? params.dk : params.dv);
  if constexpr (kLayout == PoolLayout::kRowMajor) {
    store_piece(gradient + unit * kUnit, values[0]);
    store_piece(gradient + unit * kUnit + 8, values[1]);
  } else {
    const int64_t block_head = unit / kUnitsPerBlock;
    const int64_t first_key = block_head / params.num_kv_heads * kBlockKeys;
    const int64_t head = block_head % params.num_kv_heads;
    kv_unit_pieces(static_cast<int>(unit % kUnitsPerBlock), pieces);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = (first_key + pieces[i].row) * params.num_kv_heads + head;
      store_piece(gradient + row * kHeadDim + pieces[i].d, values[i]);
    }
  }
}

template <PoolLayout kLayout, class DqElement, class KvGrad>
void launch_as(const PostprocessParams& params, cudaStream_t stream) {
  const auto ctas = [](int64_t rows) {
    return static_cast<unsigned>(ceil_div<int64_t>(rows * kHeadDim / kUnit, kThreads));
  };
  const unsigned dq_ctas = ctas(params.num_tokens * params.num_heads);
  const unsigned kv_ctas = ctas(params.workspace_rows * params.num_kv_heads);
  const unsigned grid = dq_ctas + 2 * kv_ctas;
  if (grid == 0) return;
  postprocess_kernel<kLayout, DqElement, KvGrad>
      <<<grid, kThreads, 0, stream>>>(params, dq_ctas, kv_ctas);
  check_cuda(cudaGetLastError(), "launch of postprocess");
}

template <PoolLayout kLayout, class DqElement>
void launch_as(const PostprocessParams& params, cudaStream_t stream) {
  if (params.kv_grad_fp32) {
    launch_as<kLayout, DqElement, float>(params, stream);
  } else {
    launch_as<kLayout, DqElement, __nv_bfloat16>(params, stream);
  }
}

template <PoolLayout kLayout>
void launch_as(const PostprocessParams& params, cudaStream_t stream) {
  switch (params.dq_accum) {
    case DqAccum::kFp32:
      return launch_as<kLayout, float>(params, stream);
    case DqAccum::kBf16:
      return launch_as<kLayout, __nv_bfloat16>(params, stream);
    case DqAccum::kFp16:
      return launch_as<kLayout, __half>(params, stream);
  }
}

}  // namespace

void launch(const PostprocessParams& params, cudaStream_t stream) {
  switch (params.layout) {
    case PoolLayout::kRowMajor:
      return launch_as<PoolLayout::kRowMajor>(params, stream);
    case PoolLayout::kWgmma:
      return launch_as<PoolLayout::kWgmma>(params, stream);
  }
}

}  // namespace msa::postprocess
