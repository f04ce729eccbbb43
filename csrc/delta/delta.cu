// Row statistics of the forward, and the clearing of the pools: memory bound, one pass over out and
// grad_out, one launch.
//
// Half a warp reads a row of 128 BF16 (16 bytes a lane); a warp keeps kRowsInFlight pairs of rows
// in flight.
#include "delta/launch.h"
#include "device/ptx.cuh"
#include "device/vector.cuh"
#include "host/error.h"

namespace msa::delta {
namespace {

constexpr int kThreads = 256;
constexpr int kLanesPerRow = kHeadDim / 8;
constexpr int kRowsInFlight = 4;
constexpr int kRowsPerPass = kThreads / kLanesPerRow;
constexpr int kRowsPerCta = kRowsPerPass * kRowsInFlight;
constexpr int kStoresInFlight = 8;
constexpr int kBytesPerPass = kThreads * sizeof(uint4);
constexpr int64_t kClearedPerCta = kStoresInFlight * kBytesPerPass;

__device__ const uint4* row_pieces(const StridedOperand& operand, int64_t token, int head) {
  return reinterpret_cast<const uint4*>(operand.data + token * operand.row_stride +
                                        head * operand.head_stride);
}

__device__ void write_row_stats(const DeltaParams& params) {
  const int lane = threadIdx.x % kLanesPerRow;
  const int64_t num_rows = params.num_tokens * params.num_heads;
  const int64_t first_row = int64_t{blockIdx.x} * kRowsPerCta + threadIdx.x / kLanesPerRow;

  uint4 out[kRowsInFlight];
  uint4 grad[kRowsInFlight];
  float lse[kRowsInFlight];
  int64_t token = first_row / params.num_heads;
  int head = static_cast<int>(first_row - token * params.num_heads);
#pragma unroll
  for (int i = 0; i < kRowsInFlight; ++i) {
    const int64_t row = first_row + i * kRowsPerPass;
    if (row < num_rows) {
      out[i] = __ldcs(row_pieces(params.out, token, head) + lane);
      grad[i] = __ldcs(row_pieces(params.grad_out, token, head) + lane);
      if (lane == 0) lse[i] = __ldg(params.lse + row);
    }
    for (head += kRowsPerPass; head >= params.num_heads; head -= params.num_heads) ++token;
  }
#pragma unroll
  for (int i = 0; i < kRowsInFlight; ++i) {
    const int64_t row = first_row + i * kRowsPerPass;
    float sum = 0.0f;
    if (row < num_rows) {
      float x[8];
      float y[8];
      unpack_bf16x8(out[i], x);
      unpack_bf16x8(grad[i], y);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum = fmaf(x[j], y[j], sum);
    }
#pragma unroll
    for (int offset = kLanesPerRow / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(~0u, sum, offset);
    }
    if (lane == 0 && row < num_rows) {
      // Without visible keys lse = -inf: P must be exp2(-inf) = 0, and dS = 0 * (dP - 0).
      const bool dead = lse[i] == -INFINITY;
      params.neg_lse_log2[row] = dead ? -INFINITY : -lse[i] * kLog2E;
      params.delta[row] = dead ? 0.0f : sum;
    }
  }
}

__device__ void clear(const DeltaParams& params, int64_t cta) {
  for (const ByteRange& range : params.clear) {
    const int64_t ctas = ceil_div(range.bytes, kClearedPerCta);
    if (cta < ctas) {
#pragma unroll
      for (int i = 0; i < kStoresInFlight; ++i) {
        const int64_t offset = cta * kClearedPerCta + i * kBytesPerPass + threadIdx.x * 16;
        if (offset < range.bytes) {
          *reinterpret_cast<uint4*>(range.data + offset) = make_uint4(0, 0, 0, 0);
        }
      }
      return;
    }
    cta -= ctas;
  }
}

// CTAs [0, stats_ctas) write row statistics, the others clear.
__global__ void __launch_bounds__(kThreads)
    delta_kernel(const __grid_constant__ DeltaParams params, unsigned stats_ctas) {
  if (blockIdx.x < stats_ctas) {
    write_row_stats(params);
  } else {
    clear(params, blockIdx.x - stats_ctas);
  }
  // What follows on the stream waits for this grid: it must not end before the one it overlaps.
  if (blockIdx.x + 1 == gridDim.x) grid_dependency_wait();
}

}  // namespace

void launch(const DeltaParams& params, bool overlaps_previous, cudaStream_t stream) {
  const int64_t num_rows = params.num_tokens * params.num_heads;
  const int64_t stats_ctas = ceil_div<int64_t>(num_rows, kRowsPerCta);
  int64_t ctas = stats_ctas;
  for (const ByteRange& range : params.clear) ctas += ceil_div(range.bytes, kClearedPerCta);
  if (ctas == 0) return;

  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = overlaps_previous;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(ctas);
  config.blockDim = kThreads;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, delta_kernel, params, static_cast<unsigned>(stats_ctas)),
             "launch of delta");
}

}  // namespace msa::delta
