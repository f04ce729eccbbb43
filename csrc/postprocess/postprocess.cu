// Pools -> gradients: memory bound, every pool element read once, every gradient written once.
//
// A thread makes 8 consecutive d of one row (one 16-byte BF16 store) from four pairs of the pool.
// Threads of a CTA cover 16 consecutive rows: all the pairs of a fragment layout that share a
// sector are read by one CTA.
#include "device/pool_layout.cuh"
#include "device/vector.cuh"
#include "host/error.h"
#include "postprocess/launch.h"

namespace msa::postprocess {
namespace {

constexpr int kThreads = 256;
constexpr int kPiecesPerRow = kHeadDim / 8;

__device__ float2 load_pair(const float* pool, int64_t offset) {
  return __ldg(reinterpret_cast<const float2*>(pool + offset));
}
__device__ float2 load_pair(const __nv_bfloat16* pool, int64_t offset) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(pool + offset));
}
__device__ float2 load_pair(const __half* pool, int64_t offset) {
  return __half22float2(*reinterpret_cast<const __half2*>(pool + offset));
}

__device__ void store_piece(__nv_bfloat16* row, const float (&x)[8]) {
  __stcs(reinterpret_cast<uint4*>(row), pack_bf16x8(x));
}
__device__ void store_piece(float* row, const float (&x)[8]) {
  __stcs(reinterpret_cast<float4*>(row), make_float4(x[0], x[1], x[2], x[3]));
  __stcs(reinterpret_cast<float4*>(row) + 1, make_float4(x[4], x[5], x[6], x[7]));
}

// CTAs [0, dq_ctas) make dq, the next kv_ctas dk, the last kv_ctas dv.
template <PoolLayout kLayout, class DqElement, class KvGrad>
__global__ void __launch_bounds__(kThreads)
    postprocess_kernel(const __grid_constant__ PostprocessParams params, unsigned dq_ctas,
                       unsigned kv_ctas) {
  const PoolShape shape{params.num_heads, params.num_kv_heads,
                        params.num_heads / params.num_kv_heads};
  const auto piece_of = [](unsigned cta) { return int64_t{cta} * kThreads + threadIdx.x; };
  float x[8];

  if (blockIdx.x < dq_ctas) {
    const int64_t piece = piece_of(blockIdx.x);
    const int64_t row = piece / kPiecesPerRow;
    const int d = static_cast<int>(piece % kPiecesPerRow) * 8;
    const int64_t token = row / params.num_heads;
    if (token >= params.num_tokens) return;
    const int head = static_cast<int>(row % params.num_heads);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = load_pair(static_cast<const DqElement*>(params.dq_pool),
                                    dq_pool_offset<kLayout>(shape, token, head, d + 2 * i));
      x[2 * i] = pair.x * params.softmax_scale;
      x[2 * i + 1] = pair.y * params.softmax_scale;
    }
    store_piece(params.dq + piece * 8, x);
    return;
  }

  const bool is_dk = blockIdx.x < dq_ctas + kv_ctas;
  const int64_t piece = piece_of(blockIdx.x - dq_ctas - (is_dk ? 0 : kv_ctas));
  const int64_t row = piece / kPiecesPerRow;
  const int d = static_cast<int>(piece % kPiecesPerRow) * 8;
  const int64_t key = row / params.num_kv_heads;
  if (key >= params.workspace_rows) return;
  const int head = static_cast<int>(row % params.num_kv_heads);
  const float* pool = is_dk ? params.dk_pool : params.dv_pool;
  const float scale = is_dk ? params.softmax_scale : 1.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = load_pair(pool, kv_pool_offset<kLayout>(shape, key, head, d + 2 * i));
    x[2 * i] = pair.x * scale;
    x[2 * i + 1] = pair.y * scale;
  }
  store_piece(static_cast<KvGrad*>(is_dk ? params.dk : params.dv) + piece * 8, x);
}

template <PoolLayout kLayout, class DqElement, class KvGrad>
void launch_as(const PostprocessParams& params, cudaStream_t stream) {
  constexpr int64_t kRowsPerCta = kThreads / kPiecesPerRow;
  const auto ctas = [](int64_t rows) { return static_cast<unsigned>(ceil_div(rows, kRowsPerCta)); };
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
