// Micro kernel of the tcgen05 tests: two chained GEMMs of one 128-row tile with a hand-over through
// tensor memory.
//   S = A B^T [128, 128];  P = bf16(S / 8) -> tensor memory;  out[128, 64] = P C, C seen MN-major
// | warps | role                   |
// | 0-3   | registers: S -> P, out |
// | 4     | one lane: TMA, MMA     |
#include <cuda_bf16.h>

#include "device/ptx.cuh"

namespace {

struct Maps {
  CUtensorMap a;  // boxes [2 halves of k][128][64]
  CUtensorMap b;
  CUtensorMap c;  // box [128][64]
};

struct Storage {
  uint8_t a[32768];
  uint8_t b[32768];
  uint8_t c[16384];
  uint64_t loaded;
  uint64_t scores;
  uint64_t ready;
  uint64_t done;
  uint32_t tensor_base;
};

__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t leading,
                                               uint32_t stride) {
  return 2ull << 61 | 1ull << 46 | uint64_t{stride >> 4} << 32 | uint64_t{leading >> 4} << 16 |
         (address & 0x3FFFF) >> 4;
}

// kind::f16: F32 accumulator, BF16 operands.
__host__ __device__ constexpr uint32_t instruction(int m, int n, bool b_mn_major) {
  return 1u << 4 | 1u << 7 | 1u << 10 | uint32_t(b_mn_major) << 16 | uint32_t(n >> 3) << 17 |
         uint32_t(m >> 4) << 24;
}

__device__ __forceinline__ void mma(uint32_t d, uint64_t a, uint64_t b, uint32_t idesc, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n}" ::"r"(d),
      "l"(a), "l"(b), "r"(idesc), "r"(uint32_t(add)));
}
__device__ __forceinline__ void mma_ts(uint32_t d, uint32_t a, uint64_t b, uint32_t idesc,
                                       bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, p;\n}" ::"r"(d),
      "r"(a), "l"(b), "r"(idesc), "r"(uint32_t(add)));
}
__device__ __forceinline__ void commit(uint64_t* bar) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                   msa::smem_address(bar))
               : "memory");
}
__device__ __forceinline__ void ld8(uint32_t (&x)[8], uint32_t address) {
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]), "=r"(x[4]), "=r"(x[5]), "=r"(x[6]),
                 "=r"(x[7])
               : "r"(address));
}
__device__ __forceinline__ void st4(uint32_t address, const uint32_t (&x)[4]) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
__device__ __forceinline__ void wait_ld() {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_st() {
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void fence_before() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ __forceinline__ void fence_after() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

constexpr uint32_t kScores = 0, kWeights = 128, kOut = 192;  // columns

}  // namespace

extern "C" __global__ void __launch_bounds__(160, 1)
    attention(const __grid_constant__ Maps maps, float* out) {
  using namespace msa;
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& shared = *reinterpret_cast<Storage*>(bytes);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (warp == 4) {
    if (lane == 0) {
      mbarrier_init(&shared.loaded, 1);
      mbarrier_init(&shared.scores, 1);
      mbarrier_init(&shared.ready, 4);
      mbarrier_init(&shared.done, 1);
      fence_mbarrier_init();
    }
    __syncwarp();
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 256;" ::"r"(
                     smem_address(&shared.tensor_base))
                 : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
  }
  __syncthreads();
  const uint32_t tmem = shared.tensor_base;

  if (warp == 4) {
    if (lane == 0) {
      mbarrier_arrive_expect_tx(&shared.loaded,
                                sizeof(shared.a) + sizeof(shared.b) + sizeof(shared.c));
      tma_load_4d(shared.a, &maps.a, &shared.loaded, 0, 0, 0, 0);
      tma_load_4d(shared.b, &maps.b, &shared.loaded, 0, 0, 0, 0);
      tma_load_4d(shared.c, &maps.c, &shared.loaded, 0, 0, 0, 0);
      mbarrier_wait(&shared.loaded, 0);
      for (int k = 0; k < 8; ++k) {
        const uint32_t at = k / 4 * 16384 + k % 4 * 32;
        mma(tmem + kScores, descriptor(smem_address(shared.a) + at, 16, 1024),
            descriptor(smem_address(shared.b) + at, 16, 1024), instruction(128, 128, false), k > 0);
      }
      commit(&shared.scores);
      mbarrier_wait(&shared.ready, 0);
      fence_after();
      for (int k = 0; k < 8; ++k) {
        mma_ts(tmem + kOut, tmem + kWeights + 8 * k,
               descriptor(smem_address(shared.c) + 2048 * k, 16384, 1024),
               instruction(128, 64, true), k > 0);
      }
      commit(&shared.done);
    }
  } else {
    const uint32_t quarter = uint32_t(warp * 32) << 16;
    mbarrier_wait(&shared.scores, 0);
    fence_after();
    for (int c = 0; c < 128; c += 8) {
      uint32_t s[8], p[4];
      ld8(s, tmem + quarter + kScores + c);
      wait_ld();
      for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(__uint_as_float(s[2 * i]) * 0.125f,
                                                          __uint_as_float(s[2 * i + 1]) * 0.125f);
        p[i] = reinterpret_cast<const uint32_t&>(pair);
      }
      st4(tmem + quarter + kWeights + c / 2, p);
    }
    wait_st();
    fence_before();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.ready);
    mbarrier_wait(&shared.done, 0);
    fence_after();
    for (int c = 0; c < 64; c += 8) {
      uint32_t x[8];
      ld8(x, tmem + quarter + kOut + c);
      wait_ld();
      for (int i = 0; i < 8; ++i) out[threadIdx.x * 64 + c + i] = __uint_as_float(x[i]);
    }
    fence_before();
  }
  __syncthreads();
  fence_after();
  if (warp == 4) {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 256;" ::"r"(tmem));
  }
}
