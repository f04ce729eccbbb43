// Micro kernel of the mutation test: a TMA ring, wgmma, a staged bulk reduction.
//   out[64, 64] += sum over tiles of A[tile] B[tile]^T, tiles 64 x 64 BF16
// | warps | role | | 0-3 | consumers: wgmma, staging, reduction | | 4 | producer: one lane issues
// TMA |
#include "device/ptx.cuh"
#include "device/ptx_sm90.cuh"

namespace {

constexpr int kStages = 2;
constexpr uint32_t kTileBytes = 64 * 64 * 2;

struct Maps {
  CUtensorMap a;
  CUtensorMap b;
};

struct Storage {
  uint8_t a[kStages][kTileBytes];
  uint8_t b[kStages][kTileBytes];
  float out[64 * 64];
  uint64_t full[kStages];
  uint64_t empty[kStages];
};

}  // namespace

extern "C" __global__ void __launch_bounds__(160, 1)
    pipeline(const __grid_constant__ Maps maps, float* out, int num_tiles) {
  using namespace msa;
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& shared = *reinterpret_cast<Storage*>(bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.full[i], 1);
      mbarrier_init(&shared.empty[i], 4);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  PipelineState<kStages> stage;
  if (warp == 4) {
    if (lane != 0) return;
    for (int tile = 0; tile < num_tiles; ++tile) {
      mbarrier_wait(&shared.empty[stage.index], stage.phase ^ 1);
      mbarrier_arrive_expect_tx(&shared.full[stage.index], 2 * kTileBytes);
      tma_load_4d(shared.a[stage.index], &maps.a, &shared.full[stage.index], 0, 0, tile, 0);
      tma_load_4d(shared.b[stage.index], &maps.b, &shared.full[stage.index], 0, 0, tile, 0);
      stage.advance();
    }
    return;
  }
  float acc[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) acc[i] = 0.0f;
  for (int tile = 0; tile < num_tiles; ++tile) {
    mbarrier_wait(&shared.full[stage.index], stage.phase);
    const uint64_t a = smem_descriptor(smem_address(shared.a[stage.index]), 0, 1024);
    const uint64_t b = smem_descriptor(smem_address(shared.b[stage.index]), 0, 1024);
    keep(acc);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma_m64n64k16_ss_add<Major::kK, Major::kK>(acc, advance(a, 32 * k), advance(b, 32 * k));
    }
    wgmma_commit();
    wgmma_wait<0>();
    keep(acc);
    if (lane == 0) mbarrier_arrive(&shared.empty[stage.index]);
    stage.advance();
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int row = 16 * warp + lane / 4 + i / 2 % 2 * 8;
    shared.out[row * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2] = acc[i];
  }
  fence_proxy_async();
  asm volatile("bar.sync 1, 128;" ::: "memory");
  if (threadIdx.x == 0) {
    bulk_reduce_add<DqAccum::kFp32>(out, shared.out, sizeof(shared.out));
    bulk_commit();
    bulk_wait_read<0>();
  }
}
