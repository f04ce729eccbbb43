// Pools -> gradients: memory bound, every pool element read once, every gradient written once.
//
// A thread reads one unit of a pool (device/pool_layout.h) and writes its pieces of 8 d.
#include "device/pool_layout.h"
#include "device/vector.cuh"
#include "host/error.h"
#include "postprocess/launch.h"

namespace msa::postprocess {
namespace {

constexpr int kThreads = 256;
constexpr int kUnit = 16;            // elements of a unit, but of dQ in kTmem
constexpr int kTmemUnitBytes = 128;  // of dQ: 8 d of 16 bytes of heads

template <PoolLayout kLayout, class DqElement>
constexpr int kDqUnit =
    kLayout == PoolLayout::kTmem ? kTmemUnitBytes / static_cast<int>(sizeof(DqElement)) : kUnit;

// 16 bytes of the pool as floats.
__device__ void load_run(const float* run, float (&x)[4]) {
  const float4 y = __ldcs(reinterpret_cast<const float4*>(run));
  x[0] = y.x;
  x[1] = y.y;
  x[2] = y.z;
  x[3] = y.w;
}
template <class Element>
__device__ void load_run(const Element* run, float (&x)[8]) {
  const uint4 packed = __ldcs(reinterpret_cast<const uint4*>(run));
  const auto* elements = reinterpret_cast<const Element*>(&packed);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = static_cast<float>(elements[i]);
}

__device__ void store_piece(__nv_bfloat16* target, const float (&x)[8]) {
  __stcs(reinterpret_cast<uint4*>(target), pack_bf16x8(x));
}
__device__ void store_piece(float* target, const float (&x)[8]) {
  __stcs(reinterpret_cast<float4*>(target), make_float4(x[0], x[1], x[2], x[3]));
  __stcs(reinterpret_cast<float4*>(target) + 1, make_float4(x[4], x[5], x[6], x[7]));
}

// Element `first + i` of a unit is x[i]; values[piece][d] = scale * element.
template <PoolLayout kLayout, int kRun>
__device__ void place(const float (&x)[kRun], int first, float scale, float (&values)[2][8]) {
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    values[unit_piece<kLayout>(first + i)][unit_d<kLayout>(first + i)] = x[i] * scale;
  }
}

template <PoolLayout kLayout, class DqElement>
__device__ void write_dq(const PostprocessParams& params, int64_t unit) {
  constexpr int kRun = 16 / sizeof(DqElement);
  const auto* source =
      static_cast<const DqElement*>(params.dq_pool) + unit * kDqUnit<kLayout, DqElement>;
  float x[kRun];
  if constexpr (kLayout == PoolLayout::kTmem) {
    constexpr int kUnitsPerRow = kHeadDim / 8;
    const int64_t heads = unit / kUnitsPerRow;  // kRun heads of a token, as in the gradient
    if (heads >= params.num_tokens * params.num_heads / kRun) return;
    float values[kRun][8];
#pragma unroll
    for (int d = 0; d < 8; ++d) {
      load_run(source + d * kRun, x);
#pragma unroll
      for (int head = 0; head < kRun; ++head) values[head][d] = x[head] * params.softmax_scale;
    }
    __nv_bfloat16* target = params.dq + heads * kRun * kHeadDim + unit % kUnitsPerRow * 8;
#pragma unroll
    for (int head = 0; head < kRun; ++head) store_piece(target + head * kHeadDim, values[head]);
  } else {
    const int group = params.num_heads / params.num_kv_heads;
    const int units_per_head = group * kHeadDim / kUnit;
    const int64_t token_head = unit / units_per_head;  // (token, KV head), as in the gradient
    if (token_head >= params.num_tokens * params.num_kv_heads) return;
    float values[2][8];
#pragma unroll
    for (int i = 0; i < kUnit; i += kRun) {
      load_run(source + i, x);
      place<kLayout>(x, i, params.softmax_scale, values);
    }
    Piece pieces[2];
    dq_unit_pieces<kLayout>(group, static_cast<int>(unit % units_per_head), pieces);
    __nv_bfloat16* target = params.dq + token_head * group * kHeadDim;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      store_piece(target + pieces[i].row * kHeadDim + pieces[i].d, values[i]);
  }
}

template <PoolLayout kLayout, class KvGrad>
__device__ void write_kv(const PostprocessParams& params, int64_t unit, const float* pool,
                         float scale, KvGrad* gradient) {
  constexpr int kUnitsPerBlock = kBlockKeys * kHeadDim / kUnit;
  if (unit * kUnit >= params.workspace_rows * params.num_kv_heads * kHeadDim) return;
  const int64_t block_head = unit / kUnitsPerBlock;
  const int unit_in_block = static_cast<int>(unit % kUnitsPerBlock);
  const float* source = pool + block_head * kBlockKeys * kHeadDim;
  float values[2][8];
#pragma unroll
  for (int run = 0; run < 4; ++run) {
    float x[4];
    load_run(source + kv_unit_offset<kLayout>(unit_in_block, run), x);
    place<kLayout>(x, run * 4, scale, values);
  }
  if constexpr (kLayout == PoolLayout::kRowMajor) {
    store_piece(gradient + unit * kUnit, values[0]);
    store_piece(gradient + unit * kUnit + 8, values[1]);
  } else {
    const int64_t first_key = block_head / params.num_kv_heads * kBlockKeys;
    const int64_t head = block_head % params.num_kv_heads;
    Piece pieces[2];
    kv_unit_pieces<kLayout>(unit_in_block, pieces);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = (first_key + pieces[i].row) * params.num_kv_heads + head;
      store_piece(gradient + row * kHeadDim + pieces[i].d, values[i]);
    }
  }
}

// CTAs [0, dq_ctas) make dq, the next kv_ctas dk, the last kv_ctas dv.
template <PoolLayout kLayout, class DqElement, class KvGrad>
__global__ void __launch_bounds__(kThreads)
    postprocess_kernel(const __grid_constant__ PostprocessParams params, unsigned dq_ctas,
                       unsigned kv_ctas) {
  const auto unit_from = [](unsigned first_cta) {
    return int64_t{blockIdx.x - first_cta} * kThreads + threadIdx.x;
  };
  if (blockIdx.x < dq_ctas) {
    write_dq<kLayout, DqElement>(params, unit_from(0));
  } else {
    const bool is_dk = blockIdx.x < dq_ctas + kv_ctas;
    write_kv<kLayout>(params, unit_from(is_dk ? dq_ctas : dq_ctas + kv_ctas),
                      is_dk ? params.dk_pool : params.dv_pool, is_dk ? params.softmax_scale : 1.0f,
                      static_cast<KvGrad*>(is_dk ? params.dk : params.dv));
  }
}

template <PoolLayout kLayout, class DqElement, class KvGrad>
void launch_as(const PostprocessParams& params, cudaStream_t stream) {
  const auto ctas = [](int64_t rows, int unit) {
    return static_cast<unsigned>(ceil_div<int64_t>(rows * kHeadDim / unit, kThreads));
  };
  const unsigned dq_ctas = ctas(params.num_tokens * params.num_heads, kDqUnit<kLayout, DqElement>);
  const unsigned kv_ctas = ctas(params.workspace_rows * params.num_kv_heads, kUnit);
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
    case PoolLayout::kTmem:
      return launch_as<PoolLayout::kTmem>(params, stream);
  }
}

}  // namespace msa::postprocess
